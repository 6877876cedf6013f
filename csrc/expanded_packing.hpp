// The layout of packed weights that are expanded while they are multiplied, the same for every instruction set.
//
// Strips of 16 outputs, as of dense ones. Each strip has float32 scales [group][16 outputs]; zero points or minimums,
// float32, likewise, unless one zero point serves all; then the elements: a byte each [input][16], or of four bits [pair of
// inputs][16], whose low bits are of the first input. NaN is the quiet one with no more bits set, so that it stays one when
// its value is rounded to bfloat16 as a number would be.
#pragma once

#include "packing.hpp"

namespace quire {

// Where the parts of a strip are; offsets and sizes in bytes.
struct ExpandedLayout {
    long num_groups = 0, header_bytes = 0, strip_bytes = 0;

    ExpandedLayout() = default;
    ExpandedLayout(WeightFormat format, const Quantization& quantization, long in_features)
        : num_groups((in_features + quantization.group_size - 1) / quantization.group_size),
          header_bytes(num_groups * STRIP * 4 * (quantization.offsets == Offsets::zero_point ? 1 : 2)),
          strip_bytes(header_bytes + rounded_up(elements_bytes(format, in_features), 64)) {}

private:
    static long elements_bytes(WeightFormat format, long in_features) {
        const bool is_half = format == WeightFormat::int4 || format == WeightFormat::codebook4;
        return rounded_up(in_features, 2) * STRIP / (is_half ? 2 : 1);
    }
};

// Bytes of a packed weight.
inline long expanded_size(WeightFormat format, Quantization quantization, long out_features, long in_features) {
    return num_strips(out_features) * ExpandedLayout(format, quantization, in_features).strip_bytes;
}

// Pack elements [out_features, in_features], a byte each and rows `stride` bytes apart, into every strip of `packed` or into
// every second one. Scales, and zero points (uint8) or minimums (float32) or null, are [out_features, groups] without gaps.
// All threads take part.
void pack_expanded(WeightFormat format, Quantization quantization, const std::uint8_t* elements, long stride,
                   long out_features, long in_features, const float* scales, const void* offsets, std::uint8_t* packed,
                   long every);

// Write the values of rows of a packed weight of integers or codes, float32 [num_ids, in_features] without gaps. A row outside
// of the weight is a std::out_of_range. All threads take part.
void look_up_expanded(WeightFormat format, Quantization quantization, const std::uint8_t* packed, long out_features,
                      long in_features, const std::int64_t* row_ids, long num_ids, float* values);

}  // namespace quire
