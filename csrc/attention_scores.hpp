// A block of query rows over one partition: the buffers in between the two products, and the softmax.
//
// Scores of a whole partition are known before its softmax weighs them, so that nothing is rescaled within it. A row's
// weights are then 2^((score - highest) * scale * log2(e)); what a row does not see weighs exactly 0.
#pragma once

#include "attention_view.hpp"
#include "softmax.hpp"

namespace quire::ISA {

constexpr long BLOCK_ROWS = 32;                  // rows that share one pass over keys and values
constexpr long SCORE_STRIDE = PARTITION + GROUP;  // a row apart, not a multiple of 4 KiB: other lines of the cache
constexpr float LOWEST = -3e38f;                 // a maximum that has seen nothing: with -inf, -inf - -inf would be NaN

// What rows see of a partition, relative to its start: columns [begin, end), and none where end <= begin.
struct Columns {
    long begin, end;

    long first() const { return begin / BLOCK_ROWS * BLOCK_ROWS; }                       // widened to whole pairs of
    long last() const { return end > begin ? rounded_up(end, BLOCK_ROWS) : first(); }    // groups: what is computed
};

// Hide the scores outside of `seen`.
inline void hide(float* scores, Columns seen, Columns computed) {
    if (seen.begin <= computed.first() && seen.end >= computed.last()) return;
    typedef std::int32_t Integers __attribute__((vector_size(64)));
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

// Scores become weights, where they stand: floats, or bfloat16 in the first half of the row. Returns the sum of the
// weights as they will be multiplied: of rounded ones where they are rounded, for what the rounding has in common then
// cancels in the mean.
inline float weigh_scores(float* scores, Columns computed, Floats highest, Floats scale, float*) {
    Floats sum = {};
    for (long i = computed.first(); i < computed.last(); i += LANES) {
        const Floats weights = power<Precision::fine>(load(scores + i) - highest, scale);
        store(scores + i, weights);
        sum += weights;
    }
    return sum_of_lanes(sum);
}

#ifdef __AVX512BF16__
inline float weigh_scores(float* scores, Columns computed, Floats highest, Floats scale, bf16* weights) {
    const __m512bh ones = (__m512bh)_mm512_set1_epi32(0x3f803f80);
    __m512 sum = _mm512_setzero_ps();
    for (long i = computed.first(); i < computed.last(); i += 2 * LANES) {
        const Floats low = power<Precision::coarse>(load(scores + i) - highest, scale);
        const Floats high = power<Precision::coarse>(load(scores + i + LANES) - highest, scale);
        const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        std::memcpy(weights + i, &both, sizeof both);
        sum = _mm512_dpbf16_ps(sum, both, ones);
    }
    return sum_of_lanes((Floats)sum);
}
#endif

}  // namespace quire::ISA
