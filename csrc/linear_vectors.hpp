// Linear layers by vectors: a strip's sixteen outputs in the lanes of sums.
//
// A thread takes some rows and some strips. Few rows are bound by reading: their weights pass by once, front to back. More
// are bound by multiplying: they take some inputs at a time, whose weights stay in the cache while the rows pass by. Sums
// are put down in between and taken up again, the same numbers. Rows are finished right behind their last sums, while which the
// lines of their outputs are fetched: else each store waits for memory.
#pragma once

#include "thread_pool.hpp"
#include "linear_output.hpp"
#include "packed_words.hpp"
#include "products.hpp"

namespace quire::ISA {

constexpr long FEW_STRIPS = 4, FEW_ROWS = 96;  // size of a block: its sums stay in the first-level cache
constexpr long SUMS_STRIDE = FEW_STRIPS * STRIP;
constexpr long WORDS_AT_ONCE = 512;            // words of inputs; 256 are slower
constexpr long EXPANDED_WORDS = 64;            // few rows: four strips' take half of the first-level cache

// How many strips are multiplied at once with so many rows.
constexpr int strips_beside(long rows) {
    const long most = SUM_REGISTERS / PARTS / rows;
    return most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

// Finish a block of sums, [row][strip][16], or some rows of it.
template <typename T>
void finish_block(const Linear<T>& op, long row, long num_rows, long strip, long num_strips, float* sums) {
    if (op.has_addends()) add_addends(op, row, num_rows, strip, num_strips, {sums, SUMS_STRIDE, STRIP});
    for (long r = 0; r < num_rows; r++)
        for (long s = 0; s < num_strips; s += 2) {
            const float* left = sums + r * SUMS_STRIDE + s * STRIP;
            if (s + 1 < num_strips)
                finish_pair(op, row + r, strip + s, load(left), load(left + STRIP));
            else
                finish(op, row + r, strip + s, load(left));
        }
}

// Fetch words of some strips into the second-level cache, a share at each call, so that memory works while sums are added.
template <typename T>
class FetchWords {
public:
    FetchWords() = default;

    // `count` words of each strip, a cache line a word, in so many calls.
    FetchWords(StripWords<T> strips, long num_strips, long count, long calls)
        : at_(strips.words), to_next_(strips.stride - count * LINE_ELEMENTS), count_(count), left_(num_strips * count),
          share_((left_ + calls - 1) / calls) {}

    void operator()() {
        const long share = std::min(share_, left_);
        for (long i = 0; i < share; i++, at_ += LINE_ELEMENTS) {
            __builtin_prefetch(at_, 0, INTO_L2);
            if (++word_ == count_) word_ = 0, at_ += to_next_;
        }
        left_ -= share;
    }

private:
    static constexpr long LINE_ELEMENTS = STRIP * PAIR<T>;
    static constexpr int INTO_L2 = 2;
    const T* at_ = nullptr;
    long to_next_ = 0, count_ = 0, left_ = 0, share_ = 0, word_ = 0;
};

// Some rows x up to four strips. Meanwhile the words of `next_strip`, and of those beside it, are fetched; -1: none.
template <typename T>
struct VectorBlock {
    const Linear<T>& op;
    const PackedWords<T>& weights;
    const Factor<T>* x;
    long x_stride, row, num_rows, strip, num_strips, next_strip;
    float* sums;  // [row][strip][16]

    void compute() const {
        const long groups = (num_rows + MAX_ROWS - 1) / MAX_ROWS, height = (num_rows + groups - 1) / groups;
        const long width = strips_beside(height), words = (op.in_features + PAIR<T> - 1) / PAIR<T>;
        const long at_once = groups == 1 ? weights.at_once(words, EXPANDED_WORDS) : WORDS_AT_ONCE;
        for (long first = 0; first < num_strips; first += width)
            for (long word = 0; word < words; word += at_once) {
                const long end = std::min(first + width, num_strips), count = std::min(at_once, words - word);
                const StripWords<T> piece = weights.of(strip + first, end - first, word, count);
                FetchWords<T> fetch = after(first, width, words, word, at_once, groups * ((count + STEPS_BETWEEN - 1) / STEPS_BETWEEN));
                const bool is_last = end == num_strips && word + count == words && !op.has_addends();
                in_groups<MAX_ROWS>(num_rows, [&](auto rows, long top) {
                    if (is_last) fetch_outputs(op, row + top, rows, strip, num_strips);
                    add<rows>(top, first, end, piece, word, count, fetch);
                    if (is_last) finish_block(op, row + top, rows, strip, num_strips, sums + top * SUMS_STRIDE);
                });
            }
        if (op.has_addends()) finish_block(op, row, num_rows, strip, num_strips, sums);
    }

private:
    // What to fetch while `at_once` words of strips from `first` on are multiplied: what is multiplied next.
    FetchWords<T> after(long first, long width, long words, long word, long at_once, long calls) const {
        if (op.format != WeightFormat::dense || num_rows <= MAX_ROWS) return {};
        long next = strip + first, beside = std::min(width, num_strips - first);
        word += at_once;
        if (word >= words) {
            word = 0;
            if (first + width < num_strips) {
                next += width, beside = std::min(width, num_strips - first - width);
            } else {
                if (next_strip < 0) return {};
                next = next_strip, beside = std::min(width, layer_strips(op) - next_strip);
            }
        }
        const long count = std::min(at_once, words - word);
        return {weights.of(next, beside, word, count), beside, count, calls};
    }

    template <int rows>
    void add(long top, long first, long end, StripWords<T> piece, long word, long count, FetchWords<T>& fetch) const {
        constexpr int most = strips_beside(rows);
        for (long strips; first < end; first += strips, piece.words += strips * piece.stride) {
            if (most == 4 && first + 4 <= end) strips = add<rows, std::min(most, 4)>(top, first, piece, word, count, fetch);
            else if (most >= 2 && first + 2 <= end) strips = add<rows, std::min(most, 2)>(top, first, piece, word, count, fetch);
            else strips = add<rows, 1>(top, first, piece, word, count, fetch);
        }
    }

    template <int rows, int strips>
    long add(long top, long first, StripWords<T> piece, long word, long count, FetchWords<T>& fetch) const {
        const T* words[strips];
        for (int s = 0; s < strips; s++) words[s] = piece.words + s * piece.stride;
        float* to = sums + top * SUMS_STRIDE + first * STRIP;
        Sums<rows, strips> block;
        if (word > 0) block.load(to, SUMS_STRIDE);
        block.template add<T, strips == 1 ? 2048 : 0>(words, STRIP * PAIR<T>, x + (row + top) * x_stride + word * PAIR<T>, x_stride, count, fetch);
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

// Share a layer out in blocks: compute(row, num_rows, strip, num_strips, memory for their sums), and, if it takes one more
// argument, the first strip of what the thread computes next, or -1. For that a thread takes its next chunk early, so that
// chunks of few rows are single blocks. Chunks of the same rows follow each other: those stay in the cache while weights pass by.
template <typename T, typename Compute>
void share_blocks(const Linear<T>& op, long strip_bytes, Compute&& compute) {
    constexpr bool looks_ahead = std::is_invocable_v<Compute, long, long, long, long, float*, long>;
    const long strips = layer_strips(op), row_blocks = (op.num_rows + FEW_ROWS - 1) / FEW_ROWS;
    const bool is_early = looks_ahead && op.num_rows > MAX_ROWS;
    const long width = is_early && row_blocks == 1 ? FEW_STRIPS : rounded_up(strips_at_once(strips, strip_bytes), FEW_STRIPS);
    const long strip_blocks = (strips + width - 1) / width;
    share(row_blocks * strip_blocks, [&](Chunks& chunks) {
        static thread_local Aligned<float> scratch;
        float* sums = scratch.at_least(FEW_ROWS * SUMS_STRIDE);
        if (op.low_rank && op.low_rank->num_left > 0) multiply_down(op);
        const auto first_strip = [&](long i) { return i < chunks.count() ? i % strip_blocks * width : -1; };
        for (long i = chunks.take(), after; i < chunks.count(); i = after) {
            const long block = i / strip_blocks, row = op.num_rows * block / row_blocks;
            const long num_rows = op.num_rows * (block + 1) / row_blocks - row;
            const long end = std::min(first_strip(i) + width, strips);
            after = -1;
            for (long strip = first_strip(i); strip < end; strip += FEW_STRIPS) {
                const long num_strips = std::min(FEW_STRIPS, end - strip);
                if (op.low_rank) fetch_addends(op, row, num_rows, strip, num_strips);
                const bool is_last = strip + FEW_STRIPS >= end;
                if (is_last && is_early) after = chunks.take();
                if constexpr (looks_ahead)
                    compute(row, num_rows, strip, num_strips, sums, !is_last ? strip + FEW_STRIPS : is_early ? first_strip(after) : -1);
                else
                    compute(row, num_rows, strip, num_strips, sums);
            }
            if (!is_early) after = chunks.take();
        }
    });
}

template <typename T>
void linear_by_vectors(const Linear<T>& op) {
    long stride = op.x_stride;
    const Factor<T>* x = factors_of(op, stride);
    const PackedWords<T> weights(op);
    share_blocks(op, packed_size<T>(STRIP, op.in_features) * sizeof(T),
                 [&](long row, long num_rows, long strip, long num_strips, float* sums, long next_strip) {
                     VectorBlock<T>{op, weights, x, stride, row, num_rows, strip, num_strips, next_strip, sums}.compute();
                 });
}

}  // namespace quire::ISA
