#include "packing.hpp"

#include <algorithm>
#include <cstring>

namespace quire {

long packed_size(long out_features, long in_features, const bf16*) {
    return num_strips(out_features) * num_tiles(in_features) * TILE_ELEMENTS;
}

long packed_size(long out_features, long in_features, const float*) {
    return num_strips(out_features) * STRIP * in_features;
}

void pack_linear(const bf16* weight, long stride, long out_features, long in_features, bf16* packed) {
    const long tiles = num_tiles(in_features);
#pragma omp parallel for schedule(static)
    for (long strip = 0; strip < num_strips(out_features); strip++) {
        bf16* out = packed + strip * tiles * TILE_ELEMENTS;
        const long rows = std::min(STRIP, out_features - strip * STRIP);
        if (rows < STRIP || in_features % TILE_INPUTS) std::memset(out, 0, tiles * TILE_ELEMENTS * sizeof(bf16));
        for (long row = 0; row < rows; row++) {
            const bf16* source = weight + (strip * STRIP + row) * stride;
            for (long pair = 0; pair < in_features / 2; pair++)
                std::memcpy(out + (pair * STRIP + row) * 2, source + pair * 2, 2 * sizeof(bf16));
            if (in_features % 2) out[(in_features / 2 * STRIP + row) * 2] = source[in_features - 1];
        }
    }
}

void pack_linear(const float* weight, long stride, long out_features, long in_features, float* packed) {
#pragma omp parallel for schedule(static)
    for (long strip = 0; strip < num_strips(out_features); strip++) {
        float* out = packed + strip * STRIP * in_features;
        const long rows = std::min(STRIP, out_features - strip * STRIP);
        for (long input = 0; input < in_features; input++)
            for (long row = 0; row < STRIP; row++)
                out[input * STRIP + row] = row < rows ? weight[(strip * STRIP + row) * stride + input] : 0.0f;
    }
}

}  // namespace quire
