#include "packing.hpp"

#include <algorithm>
#include <cstring>

#include "gang.hpp"

namespace quire {
namespace {

constexpr long STRIPS_AT_ONCE = 4;

// Sixteen rows of 32 inputs, tile by tile: a tile is written while its sixteen lines of the weight are in the cache.
void pack_strip(const bf16* weight, long stride, long rows, long in_features, bf16* packed) {
    for (long tile = 0; tile < num_tiles(in_features); tile++, weight += TILE_INPUTS, packed += TILE_ELEMENTS) {
        const long inputs = std::min(TILE_INPUTS, in_features - tile * TILE_INPUTS);
        if (rows < STRIP || inputs < TILE_INPUTS) std::memset(packed, 0, TILE_ELEMENTS * sizeof(bf16));
        for (long row = 0; row < rows; row++) {
            const bf16* source = weight + row * stride;
            bf16* out = packed + row * 2;
            for (long pair = 0; pair < inputs / 2; pair++) std::memcpy(out + pair * 2 * STRIP, source + pair * 2, 2 * sizeof(bf16));
            if (inputs % 2) out[inputs / 2 * 2 * STRIP] = source[inputs - 1];
        }
    }
}

void pack_strip(const float* weight, long stride, long rows, long in_features, float* packed) {
    for (long input = 0; input < in_features; input++)
        for (long row = 0; row < STRIP; row++) packed[input * STRIP + row] = row < rows ? weight[row * stride + input] : 0.0f;
}

template <typename T>
void pack(const T* weight, long stride, long out_features, long in_features, T* packed, long every) {
    const long strip_elements = packed_size(STRIP, in_features, weight);
    share_range(num_strips(out_features), STRIPS_AT_ONCE, [&](long begin, long end) {
        for (long strip = begin; strip < end; strip++)
            pack_strip(weight + strip * STRIP * stride, stride, std::min(STRIP, out_features - strip * STRIP), in_features,
                       packed + strip * every * strip_elements);
    });
}

}  // namespace

long packed_size(long out_features, long in_features, const bf16*) {
    return num_strips(out_features) * num_tiles(in_features) * TILE_ELEMENTS;
}

long packed_size(long out_features, long in_features, const float*) {
    return num_strips(out_features) * STRIP * in_features;
}

void pack_linear(const bf16* weight, long stride, long out_features, long in_features, bf16* packed, long every) {
    pack(weight, stride, out_features, in_features, packed, every);
}

void pack_linear(const float* weight, long stride, long out_features, long in_features, float* packed, long every) {
    pack(weight, stride, out_features, in_features, packed, every);
}

}  // namespace quire
