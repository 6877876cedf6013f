// Linear layers by vectors: a strip's sixteen outputs in the lanes of sums.
//
// A thread takes some rows and some strips. Few rows are bound by reading: their weights pass by once, front to back. More
// are bound by multiplying: they take some inputs at a time, whose weights stay in the cache while the rows pass by. Sums
// are put down in between and taken up again, the same numbers.
#pragma once

#include "thread_pool.hpp"
#include "linear_output.hpp"
#include "packed_words.hpp"
#include "products.hpp"

namespace quire::ISA {

constexpr long FEW_STRIPS = 4, FEW_ROWS = 96;  // of a block: its sums stay in the first-level cache
constexpr long SUMS_STRIDE = FEW_STRIPS * STRIP;
constexpr long WORDS_AT_ONCE = 512;            // of inputs; 256 are slower
constexpr long EXPANDED_WORDS = 64;            // of few rows: four strips' take half of the first-level cache

// How many strips are multiplied at once with so many rows.
constexpr int strips_beside(long rows) {
    const long most = SUM_REGISTERS / PARTS / rows;
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// Finish a block of sums, [row][strip][16].
template <typename T>
void finish_block(const Linear<T>& op, long row, long num_rows, long strip, long num_strips, float* sums) {
    if (op.addend)
        for (long r = 0; r < num_rows; r++)
            for (long s = 0; s < num_strips; s++) add_addend(op, row + r, strip + s, sums + r * SUMS_STRIDE + s * STRIP);
    for (long r = 0; r < num_rows; r++)
        for (long s = 0; s < num_strips; s += 2) {
            const float* left = sums + r * SUMS_STRIDE + s * STRIP;
            if (s + 1 < num_strips)
                finish_pair(op, row + r, strip + s, load(left), load(left + STRIP));
            else
                finish(op, row + r, strip + s, load(left));
        }
}

// Some rows x up to four strips.
template <typename T>
struct VectorBlock {
    const Linear<T>& op;
    const PackedWords<T>& weights;
    const Factor<T>* x;
    long x_stride, row, num_rows, strip, num_strips;
    float* sums;  // [row][strip][16]

    void compute() const {
        const long groups = (num_rows + MAX_ROWS - 1) / MAX_ROWS, height = (num_rows + groups - 1) / groups;
        const long width = strips_beside(height), words = (op.in_features + PAIR<T> - 1) / PAIR<T>;
        const long at_once = groups == 1 ? weights.at_once(words, EXPANDED_WORDS) : WORDS_AT_ONCE;
        for (long first = 0; first < num_strips; first += width)
            for (long word = 0; word < words; word += at_once) {
                const long end = std::min(first + width, num_strips), count = std::min(at_once, words - word);
                const StripWords<T> piece = weights.of(strip + first, end - first, word, count);
                in_groups<MAX_ROWS>(num_rows, [&](auto rows, long top) { add<rows>(top, first, end, piece, word, count); });
            }
        finish_block(op, row, num_rows, strip, num_strips, sums);
    }

private:

    template <int rows>
    void add(long top, long first, long end, StripWords<T> piece, long word, long count) const {
        constexpr int most = strips_beside(rows);
        for (long strips; first < end; first += strips, piece.words += strips * piece.stride) {
            if (most == 4 && first + 4 <= end) strips = add<rows, std::min(most, 4)>(top, first, piece, word, count);
            else if (most >= 2 && first + 2 <= end) strips = add<rows, std::min(most, 2)>(top, first, piece, word, count);
            else strips = add<rows, 1>(top, first, piece, word, count);
        }
    }

    template <int rows, int strips>
    long add(long top, long first, StripWords<T> piece, long word, long count) const {
        const T* words[strips];
        for (int s = 0; s < strips; s++) words[s] = piece.words + s * piece.stride;
        float* to = sums + top * SUMS_STRIDE + first * STRIP;
        Sums<rows, strips> block;
        if (word > 0) block.load(to, SUMS_STRIDE);
        block.template add<T, strips == 1 ? 2048 : 0>(words, STRIP * PAIR<T>, x + (row + top) * x_stride + word * PAIR<T>, x_stride, count);
        block.store(to, SUMS_STRIDE);
        return strips;
    }
};

// Rows as factors, a whole number of words each: as they are, or copied, with a zero behind an odd end.
template <typename T>
const Factor<T>* factors_of(const Linear<T>& op, long& stride) {
    if constexpr (std::is_same_v<T, Factor<T>>)
        if (op.in_features % PAIR<T> == 0) return op.x;
    stride = rounded_up(op.in_features, LANES);
    static thread_local Aligned<Factor<T>> scratch;
    Factor<T>* x = scratch.at_least(op.num_rows * stride);
    constexpr long rows_at_once = 16;
    share_range(op.num_rows, rows_at_once, [&](long begin, long end) {
        for (long row = begin; row < end; row++)
            for (long i = 0; i < op.in_features; i += LANES)
                store(x + row * stride + i, load_some(op.x + row * op.x_stride + i, op.in_features - i));
    });
    return x;
}

// Share a layer out in blocks: compute(row, num_rows, strip, num_strips, memory for their sums).
template <typename T, typename Compute>
void share_blocks(const Linear<T>& op, long strip_bytes, Compute&& compute) {
    const long strips = layer_strips(op), width = rounded_up(strips_at_once(strips, strip_bytes), FEW_STRIPS);
    const long row_blocks = (op.num_rows + FEW_ROWS - 1) / FEW_ROWS;
    share(row_blocks * ((strips + width - 1) / width), [&](Chunks& chunks) {
        static thread_local Aligned<float> scratch;
        float* sums = scratch.at_least(FEW_ROWS * SUMS_STRIDE);
        for (long i; (i = chunks.take()) < chunks.count();) {
            const long block = i % row_blocks, row = op.num_rows * block / row_blocks;
            const long first = i / row_blocks * width, end = std::min(first + width, strips);
            for (long strip = first; strip < end; strip += FEW_STRIPS)
                compute(row, op.num_rows * (block + 1) / row_blocks - row, strip, std::min(FEW_STRIPS, end - strip), sums);
        }
    });
}

template <typename T>
void linear_by_vectors(const Linear<T>& op) {
    long stride = op.x_stride;
    const Factor<T>* x = factors_of(op, stride);
    const PackedWords<T> weights(op);
    share_blocks(op, packed_size<T>(STRIP, op.in_features) * sizeof(T),
                 [&](long row, long num_rows, long strip, long num_strips, float* sums) {
                     VectorBlock<T>{op, weights, x, stride, row, num_rows, strip, num_strips, sums}.compute();
                 });
}

}  // namespace quire::ISA
