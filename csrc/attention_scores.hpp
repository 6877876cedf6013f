// A block of query rows over one partition: the buffers in between the two products, and the softmax.
//
// Scores of a whole partition are known before its softmax weighs them, so that nothing is rescaled within it. A row's
// weights are then 2^(score * scale * log2(e) - highest); what a row does not see weighs exactly 0.
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

struct RowSums {
    float highest, weight;
};

// Hide the scores outside of `seen`.
inline void hide(float* scores, Columns seen, Columns computed) {
    constexpr Words lanes = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    typedef std::int32_t Integers16 __attribute__((vector_size(64)));
    for (long i = computed.first(); i < computed.last(); i += LANES) {
        if (i >= seen.begin && i + LANES <= seen.end) continue;
        const Integers16 column = (Integers16)lanes + static_cast<std::int32_t>(i);
        const Words is_seen = (Words)((column >= (std::int32_t)seen.begin) & (column < (std::int32_t)seen.end));
        const Words hidden = (Words)splat(-__builtin_inff());
        store(scores + i, as_floats((is_seen & (Words)load(scores + i)) | (~is_seen & hidden)));
    }
}

inline float highest_score(const float* scores, Columns computed) {
    Floats highest = splat(-__builtin_inff());
    for (long i = computed.first(); i < computed.last(); i += LANES) highest = maximum(load(scores + i), highest);
    return largest_lane(highest);
}

// Scores become weights, where they stand: floats, or bfloat16 in the first half of the row. The sum is of the weights
// as they are multiplied: rounded ones where they are rounded, whose common error then cancels in the mean.
inline Floats weigh_scores(float* scores, Columns computed, Floats scale, Floats highest, float*) {
    Floats sum = {};
    for (long i = computed.first(); i < computed.last(); i += LANES) {
        const Floats weights = exp2(multiply_add(load(scores + i), scale, -highest));
        store(scores + i, weights);
        sum += weights;
    }
    return sum;
}

#ifdef __AVX512BF16__
inline Floats weigh_scores(float* scores, Columns computed, Floats scale, Floats highest, bf16* weights) {
    Floats sum = {};
    for (long i = computed.first(); i < computed.last(); i += 2 * LANES) {
        const Floats low = exp2(multiply_add(load(scores + i), scale, -highest));
        const Floats high = exp2(multiply_add(load(scores + i + LANES), scale, -highest));
        const Words pairs = (Words)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
        std::memcpy(weights + i, &pairs, sizeof pairs);
        sum += as_floats(pairs << 16);
        sum += as_floats(pairs & 0xffff0000u);
    }
    return sum;
}
#endif

// The softmax of one row over a partition. `scale` includes log2(e).
template <typename Weight>
RowSums weigh_row(float* scores, Columns seen, Columns computed, float scale) {
    hide(scores, seen, computed);
    const float highest = highest_score(scores, computed) * scale;
    const float bounded = highest < LOWEST ? LOWEST : highest;
    const Floats sums = weigh_scores(scores, computed, splat(scale), splat(bounded), reinterpret_cast<Weight*>(scores));
    return {bounded, sum_of_lanes(sums)};
}

}  // namespace quire::ISA
