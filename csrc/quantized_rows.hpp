// Rows of activations rounded to int8, each group of inputs by its own scale: absmax / 127.
#pragma once

#include <cmath>
#include <limits>

#include "aligned.hpp"
#include "packing.hpp"
#include "thread_pool.hpp"
#include "vec.hpp"

namespace quire::ISA {

typedef std::int8_t Bytes __attribute__((vector_size(16)));
typedef std::int16_t Shorts __attribute__((vector_size(32)));

// [row][group][inputs of a group, padded with zeros as packed weights are]. X is std::int8_t, or std::int16_t: then the two
// inner ones of four inputs have changed places.
template <typename X>
struct QuantizedRows {
    const X* values;
    long stride;                // values from row to row
    const float* scales;        // [row][group]
    const std::int32_t* sums;   // [row][group], of the rounded values; if one zero point serves all, times its negative
    long num_groups;
};

inline void store_rounded(std::int8_t* to, Integers values) {
    const Bytes bytes = __builtin_convertvector(values, Bytes);
    std::memcpy(to, &bytes, sizeof bytes);
}

inline void store_rounded(std::int16_t* to, Integers values) {
    const Shorts shorts = __builtin_convertvector(values, Shorts);
    const Shorts turned = __builtin_shufflevector(shorts, shorts, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    std::memcpy(to, &turned, sizeof turned);
}

// Without their signs, numbers are in the order of their bits, and whatever is not finite comes last.
template <typename T>
std::int32_t highest_bits(const T* x, long count) {
    Integers highest = {};
    for (long i = 0; i < count; i += LANES) {
        const Integers bits = (Integers)load_some(x + i, count - i) & 0x7fffffff;
        highest = bits > highest ? bits : highest;
    }
    std::int32_t most = 0;
    for (int lane = 0; lane < LANES; lane++) most = std::max(most, highest[lane]);
    return most;
}

// Round `count` values to `padded` ones and return their sum. A group that is not finite gets zeros and the scale NaN.
template <typename T, typename X>
std::int32_t quantize_group(const T* x, long count, long padded, X* to, float& scale) {
    constexpr float most = 127, least = 1e-30f, round_to_even = 12582912;  // 1.5 * 2^23: behind it a float has no fraction
    constexpr std::int32_t infinity = 0x7f800000;
    const std::int32_t bits = highest_bits(x, count);
    float absmax;
    std::memcpy(&absmax, &bits, sizeof absmax);
    scale = bits >= infinity ? std::numeric_limits<float>::quiet_NaN() : absmax < least ? 0 : absmax / most;
    if (!(scale > 0)) {
        std::memset(to, 0, padded * sizeof(X));
        return 0;
    }
    const Floats factor = splat(most / absmax), shift = splat(round_to_even);
    Integers sum = {};
    long i = 0;
    for (; i < count; i += LANES) {
        const Integers rounded = (Integers)(load_some(x + i, count - i) * factor + shift) - (Integers)shift;
        sum += rounded;
        store_rounded(to + i, rounded);
    }
    if (i < padded) std::memset(to + i, 0, (padded - i) * sizeof(X));
    std::int32_t total = 0;
    for (int lane = 0; lane < LANES; lane++) total += sum[lane];
    return total;
}

// A row in the order in which the weight has its inputs.
template <typename T>
const T* in_order(const Linear<T>& op, long row) {
    const T* x = op.x + row * op.x_stride;
    if (!op.quantization.order) return x;
    static thread_local Aligned<T> scratch;
    T* ordered = scratch.at_least(op.in_features);
    for (long i = 0; i < op.in_features; i++) ordered[i] = x[op.quantization.order[i]];
    return ordered;
}

// All rows of a layer, in memory that is used again from call to call. All threads take part. `spare` rows behind the last
// one may be read, too.
template <typename X, typename T>
QuantizedRows<X> quantize_rows(const Linear<T>& op, const QuantizedLayout& layout, long spare = 0) {
    // An odd number of cache lines: rows that are a power of two apart would evict each other.
    const long stride = (rounded_up(layout.padded_row, 64) / 64 | 1) * 64, groups = layout.num_groups;
    static thread_local Aligned<X> values;
    static thread_local Aligned<float> scales;
    static thread_local Aligned<std::int32_t> sums;
    X* to = values.at_least((op.num_rows + spare) * stride);
    float* scale = scales.at_least(op.num_rows * groups);
    std::int32_t* sum = sums.at_least(op.num_rows * groups);
    const std::int32_t times = op.quantization.offsets == Offsets::zero_point ? static_cast<std::int32_t>(-op.quantization.zero_point) : 1;
    constexpr long rows_at_once = 16;
    share_range(op.num_rows, rows_at_once, [&](long begin, long end) {
        for (long row = begin; row < end; row++) {
            const T* x = in_order(op, row);
            for (long group = 0; group < groups; group++)
                sum[row * groups + group] = times * quantize_group(
                    x + group * layout.group_size, layout.num_inputs(group), layout.num_tiles(group) * layout.tile_inputs,
                    to + row * stride + group * layout.padded_group, scale[row * groups + group]);
        }
    });
    return {to, stride, scale, sum, groups};
}

}  // namespace quire::ISA
