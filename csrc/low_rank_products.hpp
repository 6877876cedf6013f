// Addends of adapters: what B (A x) adds to the sums of rows (Hu et al. 2021).
//
// A x comes in pieces, of some rows and one strip of A. The threads of a layer compute them before their own blocks, and wait
// for the last one where they finish the first block: so no thread is idle while another one reads a piece. B is multiplied
// where sums are finished, rows of one adapter and some strips at a time, while the sums are in the first-level cache. Each
// product is summed apart, in one accumulator from the first input to the last: which rows and strips are computed beside it
// changes no bit.
#pragma once

#include <algorithm>

#include "aligned.hpp"
#include "packing.hpp"
#include "products.hpp"
#include "thread_pool.hpp"

namespace quire::ISA {

// --- A --------------------------------------------------------------------------------------------------------------

// Rows of an adapter: where they are, if they follow one another; else a copy of them, valid until the thread's next.
template <typename X>
const X* rows_of(const std::int32_t* rows, long num_rows, const X* x, long width, long& stride) {
    if (rows[num_rows - 1] - rows[0] == num_rows - 1) return x + rows[0] * stride;
    static thread_local Aligned<X> scratch;
    X* copy = scratch.at_least(num_rows * width);
    for (long i = 0; i < num_rows; i++) std::memcpy(copy + i * width, x + rows[i] * stride, width * sizeof(X));
    stride = width;
    return copy;
}

// How A x is cut into pieces of up to `most` rows x one strip of an adapter.
struct DownPieces {
    long most;

    template <typename T>
    long row_blocks(const LowRankRows<T>& adapter) const { return (adapter.num_rows + most - 1) / most; }
    template <typename T>
    long count(const LowRankRows<T>& adapter) const { return row_blocks(adapter) * num_strips(adapter.rank); }
    template <typename T>
    long count(const LowRank<T>& low_rank) const {
        long sum = 0;
        for (const LowRankRows<T>& adapter : low_rank) sum += count(adapter);
        return sum;
    }

    // Take pieces until none is left: compute(adapter, first row, number of rows, strip). All row blocks of a strip come one
    // after the other, so that it is read once.
    template <typename T, typename Compute>
    void take(LowRank<T>& low_rank, Compute&& compute) const {
        struct Finished {
            std::atomic<long>& num_left;
            ~Finished() { num_left.fetch_sub(1, std::memory_order_release); }  // also by an exception: no thread waits for ever
        };
        const long all = count(low_rank);
        for (long i; (i = low_rank.next_piece.fetch_add(1, std::memory_order_relaxed)) < all;) {
            const Finished finished{low_rank.num_left};
            const LowRankRows<T>* adapter = low_rank.adapters;
            for (; i >= count(*adapter); adapter++) i -= count(*adapter);
            const long blocks = row_blocks(*adapter), block = i % blocks, first = adapter->num_rows * block / blocks;
            compute(*adapter, first, adapter->num_rows * (block + 1) / blocks - first, i / blocks);
        }
    }
};

constexpr DownPieces DOWN_PIECES{MAX_ROWS};

// Compute pieces of A x until none is left.
template <typename T>
[[gnu::noinline]] void multiply_down(const Linear<T>& op) {
    constexpr long bytes_ahead = 2048;
    const long words = (op.in_features + PAIR<T> - 1) / PAIR<T>;
    DOWN_PIECES.take(*op.low_rank, [&](const LowRankRows<T>& adapter, long first, long num_rows, long strip) {
        long stride = op.low_rank->x_stride;
        const auto* x = rows_of(adapter.rows + first, num_rows, static_cast<const Factor<T>*>(op.low_rank->x), words * PAIR<T>, stride);
        const T* const packed[] = {adapter.down + packed_size<T>(strip * STRIP, op.in_features)};
        in_groups<MAX_ROWS>(num_rows, [&](auto rows, long) {
            Sums<rows, 1> sums;
            sums.template add<T, bytes_ahead>(packed, STRIP * PAIR<T>, x, stride, words);
            float product[rows][STRIP];
            sums.store(product[0], STRIP);
            T* inner = adapter.inner + first * adapter.rank + strip * STRIP;
            for (long r = 0; r < rows; r++) store_some(inner + r * adapter.rank, load(product[r]), adapter.rank - strip * STRIP);
        });
    });
}

// --- B --------------------------------------------------------------------------------------------------------------

template <typename T>
long low_rank_strip_elements(long rank) { return rounded_up(rank, PAIR<T>) * STRIP; }

// A's outputs of some rows as factors, a whole number of words each: as they are, or copied, with a zero behind an odd end.
template <typename T>
const Factor<T>* inner_factors(const T* inner, long num_rows, long rank, long& stride) {
    if constexpr (std::is_same_v<T, Factor<T>>)
        if (rank % PAIR<T> == 0) return inner;
    static thread_local Aligned<Factor<T>> scratch;
    const long width = rounded_up(rank, LANES);
    Factor<T>* factors = scratch.at_least(num_rows * width);
    for (long r = 0; r < num_rows; r++)
        for (long i = 0; i < rank; i += LANES) store(factors + r * width + i, load_some(inner + r * stride + i, rank - i));
    stride = width;
    return factors;
}

// The outputs of some strips of B for rows of A's outputs, `stride` apart.
template <int rows, int strips, typename T>
inline Sums<rows, strips> multiply_up(const T* inner, long stride, const T* packed, long rank) {
    const Factor<T>* factors = inner_factors(inner, rows, rank, stride);
    const T* words[strips];
    for (int s = 0; s < strips; s++) words[s] = packed + s * low_rank_strip_elements<T>(rank);
    Sums<rows, strips> sums;
    sums.template add<T>(words, STRIP * PAIR<T>, factors, stride, (rank + PAIR<T> - 1) / PAIR<T>);
    return sums;
}

// Sums of a block in memory, sixteen outputs at [row][strip].
struct SumsInMemory {
    float* first;
    long row_stride, strip_stride;

    float* at(long row, long strip) const { return first + row * row_stride + strip * strip_stride; }
};

// Rows of an adapter among [row, row + num_rows): `count` of its rows from `first` on.
struct RowsWithin {
    long first, count;
};

template <typename T>
RowsWithin rows_within(const LowRankRows<T>& adapter, long row, long num_rows) {
    const std::int32_t* end = adapter.rows + adapter.num_rows;
    const std::int32_t* first = std::lower_bound(adapter.rows, end, row);
    return {first - adapter.rows, std::lower_bound(first, end, row + num_rows) - first};
}

// Add the outputs of some whole strips of B to the sums of some rows.
template <int strips, typename T>
inline void add_strips(const LowRankRows<T>& adapter, RowsWithin within, const LowRankPart& part, const T* packed, long row,
                       const SumsInMemory& sums) {
    in_groups<MAX_ROWS>(within.count, [&](auto rows, long top) {
        const long first = within.first + top;
        if constexpr (strips > 1 && rows * strips * PARTS > SUM_REGISTERS) {
            for (int s = 0; s < strips; s++)
                add_strips<1>(adapter, {first, rows}, part, packed + s * low_rank_strip_elements<T>(part.rank), row,
                              {sums.at(0, s), sums.row_stride, sums.strip_stride});
        } else {
            const Sums<rows, strips> product =
                multiply_up<rows, strips>(adapter.inner + first * adapter.rank + part.first_input, adapter.rank, packed, part.rank);
            for (int r = 0; r < rows; r++)
                for (int i = 0; i < strips * PARTS; i++) {
                    float* to = sums.at(adapter.rows[first + r] - row, i / PARTS) + i % PARTS * REGISTER_LANES;
                    Register sum;
                    std::memcpy(&sum, to, sizeof sum);
                    sum = sum + product.parts[r][i];
                    std::memcpy(to, &sum, sizeof sum);
                }
        }
    });
}

// Add `count` outputs of a strip of B, from `lane` on, to sums that begin at any lane of theirs.
template <typename T>
inline void add_lanes(const LowRankRows<T>& adapter, RowsWithin within, const LowRankPart& part, const T* packed, long row,
                      const SumsInMemory& sums, long lane, long count) {
    for (long i = within.first; i < within.first + within.count; i++) {
        float product[STRIP];
        multiply_up<1, 1>(adapter.inner + i * adapter.rank + part.first_input, adapter.rank, packed, part.rank).store(product, STRIP);
        float* to = sums.at(adapter.rows[i] - row, 0);
        for (long j = 0; j < count; j++) to[j] += product[lane + j];
    }
}

// Add what an adapter adds to its rows among [row, row + num_rows) and to outputs [first, first + count) of the layer. A part
// may begin within a strip of the layer, and its strips lie across the layer's.
template <typename T>
inline void add_low_rank(const LowRankRows<T>& adapter, long row, long num_rows, long first, long count, const SumsInMemory& sums) {
    const RowsWithin within = rows_within(adapter, row, num_rows);
    for (long i = 0; i < adapter.num_parts && within.count > 0; i++) {
        const LowRankPart& part = adapter.parts[i];
        const long end = std::min(first + count - part.first_output, part.num_outputs);  // end of the part's outputs
        for (long output = std::max(first - part.first_output, 0L), added; output < end; output += added) {
            const T* packed = static_cast<const T*>(part.packed) + output / STRIP * low_rank_strip_elements<T>(part.rank);
            const long at = part.first_output + output - first, lane = output % STRIP, left = end - output;
            const SumsInMemory own{sums.at(0, at / STRIP) + at % STRIP, sums.row_stride, sums.strip_stride};
            if (at % STRIP == 0 && lane == 0 && left >= STRIP) {
                if (left >= 4 * STRIP) add_strips<4>(adapter, within, part, packed, row, own), added = 4 * STRIP;
                else if (left >= 2 * STRIP) add_strips<2>(adapter, within, part, packed, row, own), added = 2 * STRIP;
                else add_strips<1>(adapter, within, part, packed, row, own), added = STRIP;
                continue;
            }
            added = std::min({STRIP - lane, STRIP - at % STRIP, left});
            add_lanes(adapter, within, part, packed, row, own, lane, added);
        }
    }
}

// Fetch what an adapter adds to `count` outputs from `first` on, so that it has arrived when the sums are ready.
template <typename T>
inline void fetch_low_rank(const LowRankRows<T>& adapter, long first, long count) {
    for (long i = 0; i < adapter.num_parts; i++) {
        const LowRankPart& part = adapter.parts[i];
        const long begin = std::max(first - part.first_output, 0L), end = std::min(first + count - part.first_output, part.num_outputs);
        if (begin >= end) continue;
        const long strip_bytes = low_rank_strip_elements<T>(part.rank) * static_cast<long>(sizeof(T));
        const char* packed = static_cast<const char*>(part.packed);
        for (long at = begin / STRIP * strip_bytes; at < num_strips(end) * strip_bytes; at += 64) {
            __builtin_prefetch(packed + at);  // into the second-level cache alone, it often does not arrive (Zen 5)
            asm volatile("");                 // gcc removes calls of functions that do nothing but fetch
        }
    }
}

}  // namespace quire::ISA
