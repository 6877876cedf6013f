// Addends of adapters: what B (A x) adds to the sums of a row, a strip of B at a time while the sums are in the first-level cache.
//
// The product is summed apart, in one accumulator from the first of A's outputs to the last, and then added to the sums:
// which rows and strips are computed beside it changes no bit.
#pragma once

#include <algorithm>

#include "packing.hpp"
#include "products.hpp"

namespace quire::ISA {

constexpr long INNER_AT_ONCE = 128;  // outputs of A that are turned into factors

template <typename T>
long low_rank_strip_elements(long rank) { return rounded_up(rank, PAIR<T>) * STRIP; }

// A's outputs as factors, a whole number of words: as they are, or copied, with a zero behind an odd end.
template <typename T>
const Factor<T>* inner_factors(const T* inner, long count, Factor<T>* scratch) {
    if constexpr (std::is_same_v<T, Factor<T>>)
        if (count % PAIR<T> == 0) return inner;
    for (long i = 0; i < count; i += LANES) store(scratch + i, load_some(inner + i, count - i));
    return scratch;
}

// The outputs of some strips of B for one row.
template <typename T, int strips>
inline Sums<1, strips> multiply_low_rank(const T* inner, const T* packed, long rank) {
    Sums<1, strips> sums;
    for (long first = 0; first < rank; first += INNER_AT_ONCE) {
        const long count = std::min(INNER_AT_ONCE, rank - first);
        alignas(64) Factor<T> scratch[INNER_AT_ONCE];
        const T* words[strips];
        for (int s = 0; s < strips; s++) words[s] = packed + s * low_rank_strip_elements<T>(rank) + first * STRIP;
        sums.template add<T>(words, STRIP * PAIR<T>, inner_factors(inner + first, count, scratch), 0, (count + PAIR<T> - 1) / PAIR<T>);
    }
    return sums;
}

// Add the outputs of some whole strips of B to sums, which are `step` apart from strip to strip.
template <int strips, typename T>
inline void add_strips(const T* inner, const T* packed, long rank, float* sums, long step) {
    const Sums<1, strips> product = multiply_low_rank<T, strips>(inner, packed, rank);
    for (int i = 0; i < strips * PARTS; i++) {
        float* to = sums + i / PARTS * step + i % PARTS * REGISTER_LANES;
        Register sum;
        std::memcpy(&sum, to, sizeof sum);
        sum = sum + product.parts[0][i];
        std::memcpy(to, &sum, sizeof sum);
    }
}

// Add what a row's adapter adds to outputs [first, first + count) of the layer. Their sums are sixteen to a strip, and strips
// `step` apart. A part may begin within a strip of the layer, and its strips lie across the layer's.
template <typename T>
inline void add_low_rank(const LowRankRow<T>& row, long first, long count, float* sums, long step) {
    for (long i = 0; i < row.num_parts; i++) {
        const LowRankPart& part = row.parts[i];
        const T* inner = row.inner + part.first_input;
        const long end = std::min(first + count - part.first_output, part.num_outputs);  // of the part's outputs
        for (long output = std::max(first - part.first_output, 0L), added; output < end; output += added) {
            const T* packed = static_cast<const T*>(part.packed) + output / STRIP * low_rank_strip_elements<T>(part.rank);
            const long at = part.first_output + output - first, lane = output % STRIP, left = end - output;
            float* to = sums + at / STRIP * step + at % STRIP;
            if (at % STRIP == 0 && lane == 0 && left >= STRIP) {
                if (left >= 4 * STRIP) add_strips<4>(inner, packed, part.rank, to, step), added = 4 * STRIP;
                else if (left >= 2 * STRIP) add_strips<2>(inner, packed, part.rank, to, step), added = 2 * STRIP;
                else add_strips<1>(inner, packed, part.rank, to, step), added = STRIP;
                continue;
            }
            added = std::min({STRIP - lane, STRIP - at % STRIP, left});
            float product[STRIP];
            multiply_low_rank<T, 1>(inner, packed, part.rank).store(product, STRIP);
            for (long j = 0; j < added; j++) to[j] += product[lane + j];
        }
    }
}

// Fetch what adapters add to `count` outputs from `first` on, so that it has arrived when the sums are ready.
template <typename T>
inline void fetch_low_rank(const LowRankRow<T>& row, long first, long count) {
    constexpr int into_l2 = 2;
    for (long i = 0; i < row.num_parts; i++) {
        const LowRankPart& part = row.parts[i];
        const long begin = std::max(first - part.first_output, 0L), end = std::min(first + count - part.first_output, part.num_outputs);
        if (begin >= end) continue;
        const long strip_bytes = low_rank_strip_elements<T>(part.rank) * static_cast<long>(sizeof(T));
        const char* packed = static_cast<const char*>(part.packed);
        for (long at = begin / STRIP * strip_bytes; at < num_strips(end) * strip_bytes; at += 64) __builtin_prefetch(packed + at, 0, into_l2);
    }
}

}  // namespace quire::ISA
