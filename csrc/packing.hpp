// The layout of packed weights, the same for every instruction set.
//
// Outputs are grouped in strips of 16, and a strip holds all its inputs one after the other, so that a product reads weights
// from the first byte to the last. float: [strip][input][16 outputs]. bfloat16: [strip][pair of inputs][16 outputs][2],
// inputs padded to a multiple of 32 with zeros: 16 pairs are 1 KiB, one tile of the matrix unit.
#pragma once

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

// Whether none of `count` values is infinite or no number. All threads take part.
template <typename T>
bool all_finite(const T* values, long count);

// Pack weight [out_features, in_features], rows `stride` elements apart, into every strip of `packed` or into every
// second one. All threads take part.
template <typename T>
void pack_linear(const T* weight, long stride, long out_features, long in_features, T* packed, long every);

}  // namespace quire
