#include "rounding.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <vector>

#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long VALUES_AT_ONCE = 1 << 16;  // a thread rounds so many at a time
constexpr float SMALLEST_ABSMAX = 1e-30f;
constexpr float WHOLE_NUMBERS = 1.5f * 8388608;  // from 2^23 to 2^24 float has nothing else
constexpr float NARROW_SCALE = 0.9f;
constexpr long LANES = 8, SUMS = 4, STEP = LANES * SUMS, STEPS = 16;

// The value of the greatest magnitude of a group, padded to `count`; the highest of two; 0 if it is very small.
float extreme_of(const float* group, long count) {
    float highest = group[0], lowest = group[0];
    for (long i = 1; i < count; i++) {
        highest = std::max(highest, group[i]);
        lowest = std::min(lowest, group[i]);
    }
    const float extreme = highest > -lowest ? highest : lowest;
    return std::fabs(extreme) < SMALLEST_ABSMAX ? 0.0f : extreme;
}

float factor_of(float scale) { return scale == 0 ? 0.0f : 1.0f / scale; }

// The nearest multiples of a scale, as whole numbers from -8 to 7.
void round_group(const float* group, long count, float scale, float* elements) {
    const float factor = factor_of(scale);
    for (long i = 0; i < count; i++)
        elements[i] = std::min(std::max(group[i] * factor + WHOLE_NUMBERS - WHOLE_NUMBERS, -8.0f), 7.0f);
}

float squared(float element, float scale, float value) {
    const float difference = element * scale - value;
    return difference * difference;
}

// The squared errors of a group, in one order of summation: 4 sums of 8 lanes each, added to others after every 16.
float squared_error(const float* group, const float* elements, float scale, long count) {
    float sums[SUMS][LANES] = {}, all[SUMS][LANES] = {};
    const auto add = [&](float* lanes, long first) {
        for (long lane = 0; lane < LANES; lane++)
            lanes[lane] += squared(elements[first + lane], scale, group[first + lane]);
    };
    const auto add_up = [](float* lanes, const float* others) {
        for (long lane = 0; lane < LANES; lane++) lanes[lane] += others[lane];
    };
    long first = 0, steps = 0;
    for (; first + STEP <= count; first += STEP) {
        for (long sum = 0; sum < SUMS; sum++) add(sums[sum], first + sum * LANES);
        if (++steps % STEPS == 0)
            for (long sum = 0; sum < SUMS; sum++) {
                add_up(all[sum], sums[sum]);
                std::fill(sums[sum], sums[sum] + LANES, 0.0f);
            }
    }
    for (long sum = 0; sum < SUMS; sum++) add_up(sums[sum], all[sum]);
    for (; first + LANES <= count; first += LANES) add(sums[0], first);
    for (long sum = 1; sum < SUMS; sum++) add_up(sums[0], sums[sum]);
    float total = 0;
    for (; first < count; first++) total += squared(elements[first], scale, group[first]);
    for (long lane = 0; lane < LANES; lane++) total += sums[0][lane];
    return total;
}

// int8 has one more value below zero than above, and does without.
float round_to_int8(const float* group, long count, long stored, std::uint8_t* elements) {
    const float scale = std::fabs(extreme_of(group, count)) / 127, factor = factor_of(scale);
    for (long i = 0; i < stored; i++)  // the lowest byte is the whole number
        elements[i] = static_cast<std::uint8_t>(std::bit_cast<std::uint32_t>(group[i] * factor + (WHOLE_NUMBERS + 128)));
    return scale;
}

// int4 has too few values for that: the extreme becomes -8, by a scale of its opposite sign, and of two such scales the one
// with the smaller squared error is taken. `rounded`: room for two groups.
float round_to_int4(const float* group, long count, long stored, float* rounded, std::uint8_t* elements) {
    float scale = extreme_of(group, count) / -8;
    const float narrow = scale * NARROW_SCALE;
    float *wide_elements = rounded, *narrow_elements = rounded + count;
    round_group(group, count, scale, wide_elements);
    round_group(group, count, narrow, narrow_elements);
    if (squared_error(group, narrow_elements, narrow, count) < squared_error(group, wide_elements, scale, count)) {
        scale = narrow;
        wide_elements = narrow_elements;
    }
    for (long i = 0; i < stored; i++) elements[i] = static_cast<std::uint8_t>(static_cast<int>(wide_elements[i]) + 8);
    return scale;
}

}  // namespace

void round_to_nearest(const float* rows, long num_rows, long width, long group_size, bool is_int4, std::uint8_t* elements,
                      float* scales) {
    const long num_groups = (width + group_size - 1) / group_size;
    share_range(num_rows, std::max(VALUES_AT_ONCE / width, 1l), [&](long begin, long end) {
        std::vector<float> padded(group_size), rounded(2 * group_size);
        for (long row = begin; row < end; row++)
            for (long group = 0; group < num_groups; group++) {
                const long first = row * width + group * group_size, stored = std::min(group_size, width - group * group_size);
                const float* values = rows + first;
                if (stored < group_size) {  // zeros fill the last group
                    std::fill(std::copy(values, values + stored, padded.begin()), padded.end(), 0.0f);
                    values = padded.data();
                }
                scales[row * num_groups + group] =
                    is_int4 ? round_to_int4(values, group_size, stored, rounded.data(), elements + first)
                            : round_to_int8(values, group_size, stored, elements + first);
            }
    });
}

}  // namespace quire
