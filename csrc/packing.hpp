// The layout of packed weights, the same for every instruction set.
//
// Outputs are grouped in strips of 16, and a strip holds all its inputs one after the other, so that a product reads weights
// from the first byte to the last. float: [strip][input][16 outputs]. bfloat16: [strip][pair of inputs][16 outputs][2],
// inputs padded to a multiple of 32 with zeros: 16 pairs are 1 KiB, one tile of the matrix unit.
//
// Quantized: [strip][group of inputs], and of each group float32 scales [16 outputs]; zero points (int32) or minimums
// (float32) [16 outputs] unless one zero point serves all; then its elements as tiles of 64 inputs (32 where a group has no
// more; 16 of int8), [quad of inputs][16 outputs][4], a byte each. Of int4 a byte's low four bits are of the first half of a tile's
// quads, the high ones of the second half. Groups are padded to whole tiles with zeros. So a product reads one stream.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels.hpp"

namespace quire {

constexpr long STRIP = 16;        // outputs
constexpr long TILE_INPUTS = 32;  // bfloat16 inputs in one tile
constexpr long TILE_ELEMENTS = STRIP * TILE_INPUTS;

inline long num_strips(long out_features) { return (out_features + STRIP - 1) / STRIP; }
inline long num_tiles(long in_features) { return (in_features + TILE_INPUTS - 1) / TILE_INPUTS; }

// Elements of a packed weight.
template <typename T>
long packed_size(long out_features, long in_features) {
    return num_strips(out_features) * (sizeof(T) == sizeof(bf16) ? num_tiles(in_features) * TILE_ELEMENTS : STRIP * in_features);
}

// Where the parts of a quantized weight are; offsets and sizes in bytes.
struct QuantizedLayout {
    long in_features, group_size, num_groups, tile_inputs, tile_bytes, header_bytes;
    long padded_group, padded_row;  // inputs of any group but the last, and of all groups, padded to whole tiles
    long group_bytes, strip_bytes;  // any group but the last, and all groups

    QuantizedLayout(WeightFormat format, const Quantization& quantization, long in_features)
        : in_features(in_features),
          group_size(quantization.group_size),
          num_groups((in_features + group_size - 1) / group_size),
          tile_inputs(group_size > 32 ? 64 : group_size > 16 || format == WeightFormat::int4_a8 ? 32 : 16),
          tile_bytes(tile_inputs * STRIP / (format == WeightFormat::int4_a8 ? 2 : 1)),
          header_bytes(STRIP * 4 * (quantization.offsets == Offsets::zero_point ? 1 : 2)),
          padded_group(rounded_up(group_size, tile_inputs)),
          padded_row((num_groups - 1) * padded_group + num_tiles(num_groups - 1) * tile_inputs),
          group_bytes(header_bytes + padded_group / tile_inputs * tile_bytes),
          strip_bytes(num_groups * header_bytes + padded_row / tile_inputs * tile_bytes) {}

    long num_inputs(long group) const { return std::min(group_size, in_features - group * group_size); }
    long num_tiles(long group) const { return (num_inputs(group) + tile_inputs - 1) / tile_inputs; }
};

// Bytes of a packed quantized weight.
inline long quantized_size(WeightFormat format, Quantization quantization, long out_features, long in_features) {
    return num_strips(out_features) * QuantizedLayout(format, quantization, in_features).strip_bytes;
}

// Throw std::out_of_range for a row that a table does not have.
void require_rows(const std::int64_t* row_ids, long num_ids, long num_rows);

// Write rows of a packed weight, as they were before, [num_ids, in_features] without gaps. A row outside of the weight is a
// std::out_of_range. All threads take part.
template <typename T>
void look_up_packed(const T* packed, long out_features, long in_features, const std::int64_t* row_ids, long num_ids, T* rows);

// The same of a quantized weight: the values of its elements, in float32. Its inputs are in the order of x's.
void look_up_quantized(WeightFormat format, Quantization quantization, const std::uint8_t* packed, long out_features,
                       long in_features, const std::int64_t* row_ids, long num_ids, float* values);

// Whether none of `count` values is infinite or no number. All threads take part.
template <typename T>
bool all_finite(const T* values, long count);

// Pack weight [out_features, in_features], rows `stride` elements apart, into every strip of `packed` or into every
// second one. All threads take part.
template <typename T>
void pack_linear(const T* weight, long stride, long out_features, long in_features, T* packed, long every);

// Pack elements [out_features, in_features], a byte each and rows `stride` bytes apart, into every strip of `packed` or into
// every second one. Scales, and zero points (uint8) or minimums (float32) or null, [out_features, groups of
// scale_group_size inputs], rows scale_stride elements apart: those groups are whole groups of `quantization`, whose copies
// get the same scale. All threads take part.
void pack_quantized(WeightFormat format, Quantization quantization, const std::uint8_t* elements, long stride,
                    long out_features, long in_features, const float* scales, const void* offsets, long scale_stride,
                    long scale_group_size, std::uint8_t* packed, long every);

}  // namespace quire
