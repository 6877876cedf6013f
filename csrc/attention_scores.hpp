// A block of query rows over one partition: the buffers in between the two products, and the softmax.
//
// Scores of a whole partition are known before its softmax weighs them, so that nothing is rescaled within it. A row's
// weights are then 2^((score - highest) * scale * log2(e)); what a row does not see weighs exactly 0.
#pragma once

#include "attention_view.hpp"
#include "exp.hpp"
#include "softmax.hpp"

namespace quire::ISA {

constexpr long BLOCK_ROWS = 32;                  // rows that share one pass over keys and values
constexpr long SCORE_STRIDE = PARTITION + GROUP;  // a row apart, not a multiple of 4 KiB: other lines of the cache
constexpr float LOWEST = -3e38f;                 // a maximum that has seen nothing: with -inf, -inf - -inf would be NaN

// Columns of a partition that rows see, relative to its start: columns [begin, end), and none where end <= begin.
struct Columns {
    long begin, end;

    long first() const { return begin / (2 * GROUP) * (2 * GROUP); }                       // widened to whole pairs of
    long last() const { return end > begin ? rounded_up(end, 2 * GROUP) : first(); }    // groups: what is computed
};

// Hide the scores outside of `seen`.
inline void hide(float* scores, Columns seen, Columns computed) {
    if (seen.begin <= computed.first() && seen.end >= computed.last()) return;
    constexpr Integers lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const Words hidden = (Words)splat(-__builtin_inff());
    for (long i = computed.first(); i < computed.last(); i += LANES) {
        if (i >= seen.begin && i + LANES <= seen.end) continue;
        const Integers column = lanes + static_cast<std::int32_t>(i);
        const Words is_seen = (Words)((column >= (std::int32_t)seen.begin) & (column < (std::int32_t)seen.end));
        store(scores + i, as_floats((is_seen & (Words)load(scores + i)) | (~is_seen & hidden)));
    }
}

// LOWEST where nothing is seen.
inline float highest_score(const float* scores, Columns computed) {
    Floats even = splat(LOWEST), odd = even;
    for (long i = computed.first(); i < computed.last(); i += 2 * LANES) {
        even = maximum(load(scores + i), even);
        odd = maximum(load(scores + i + LANES), odd);
    }
    return largest_lane(maximum(even, odd));
}

// Turn a row's scores into weights, in the scores' memory if `weights` is there. Returns the sum of the weights.
inline float weigh_scores(const float* scores, Columns computed, float highest, float scale, float* weights) {
    Floats sum = {};
    for (long i = computed.first(); i < computed.last(); i += LANES) {
        const Floats powers = power(load(scores + i) - splat(highest), splat(scale));
        store(weights + i, powers);
        sum += powers;
    }
    return sum_of_lanes(sum);
}

// Multiply each token's scores by its key's scale; null for none.
inline void scale_scores(float* scores, long rows, Columns computed, const float* key_scales) {
    for (long r = 0; key_scales && r < rows; r++, scores += SCORE_STRIDE)
        for (long i = computed.first(); i < computed.last(); i += LANES) store(scores + i, load(scores + i) * load(key_scales + i));
}

// Copy a row's query, in float or as it is.
template <typename T, typename Query>
inline void pack_query(const T* query, long head_dim, Query* out) {
    for (long i = 0; i < head_dim; i += LANES) {
        const long count = std::min<long>(LANES, head_dim - i);
        store_some(out + i, load_some(query + i, count), count);
    }
}

// Cap scores: what they are times the scale becomes softcap * tanh(that / softcap) (Gemma 2; Bello et al. 2016).
[[gnu::noinline]] inline void cap_scores(float* scores, Columns computed, float scale, float softcap) {
    const Floats inward = splat(2.0f * scale / softcap), outward = splat(softcap / scale);
    for (long i = computed.first(); i < computed.last(); i += LANES) {
        const Floats tanh = splat(1.0f) - splat(2.0f) / (exp(load(scores + i) * inward) + splat(1.0f));
        store(scores + i, tanh * outward);
    }
}

// Turn a row's scores into weights, each multiplied by its value's scale; return the sum of the weights without.
template <typename Weight>
inline float weigh_scores(const float* scores, Columns computed, float highest, float scale, const float* value_scales,
                          Weight* weights) {
    Floats sum = {};
    for (long i = computed.first(); i < computed.last(); i += LANES) {
        const Floats powers = power(load(scores + i) - splat(highest), splat(scale));
        store(weights + i, powers * load(value_scales + i));
        sum += powers;
    }
    return sum_of_lanes(sum);
}

// The offset to subtract from a score before rough_power.
inline float score_offset(float highest, float scale) { return 0.5f + std::max(highest * scale, LOWEST); }

#ifdef __AVX512BF16__
// Turn 32 scores into weights in bfloat16, which may overwrite the scores.
inline void weigh_scores(const float* scores, float offset, Floats scale, bf16* weights) {
    alignas(64) static constexpr bf16 upper_halves[2 * LANES] = {
        1,  3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31,
        33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59, 61, 63};
    const Floats low = multiply_add(load(scores), scale, splat(-offset));
    const Floats high = multiply_add(load(scores + LANES), scale, splat(-offset));
    const __m512i both = _mm512_permutex2var_epi16(power_bf16(low), _mm512_load_si512(upper_halves), power_bf16(high));
    std::memcpy(weights, &both, sizeof both);
}

// The sum is that of the rounded weights: what the rounding has in common cancels in the mean.
inline float weigh_scores(const float* scores, Columns computed, float highest, float scale, bf16* weights) {
    const float offset = score_offset(highest, scale);
    __m512 sum = {};
    for (long i = computed.first(); i < computed.last(); i += 2 * LANES) {
        weigh_scores(scores + i, offset, splat(scale), weights + i);
        sum = _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(weights + i), (__m512bh)_mm512_set1_epi16(0x3f80));
    }
    return sum_of_lanes((Floats)sum);
}
#endif

}  // namespace quire::ISA
