// Quantized linear layers on the matrix unit: tiles of 16 rows x 16 outputs of int32 sums, 64 inputs at a time.
//
// Made of the blocks of linear_vectors.hpp. Some tiles of inputs at a time stay in the first-level cache, int4 ones
// expanded to bytes, while the block's rows pass by: two tiles of rows x two strips, four products for four loads. Sums of
// longer groups are put down in between and taken up again.
#pragma once

#include "quantized_vectors.hpp"
#include "tiles.hpp"

#ifdef __AMX_INT8__

namespace quire::ISA {

constexpr long TILES_AT_ONCE = 8;  // tiles of inputs
constexpr long PAIR_ROWS = 2 * TILE_ROWS, PAIR_STRIPS = 2;

// Int32 sums of two tiles of rows x two strips.
struct alignas(64) TileDots {
    float dots[PAIR_ROWS * PAIR_STRIPS * STRIP];  // bits of int32: [row][strip][16]
    static constexpr long STRIDE = PAIR_STRIPS * STRIP, STRIDE_BYTES = STRIDE * sizeof(float), HALF = TILE_ROWS * STRIDE;

    // Add the products of `count` tiles: of rows `stride` bytes apart and of two strips' weights, 1 KiB or less a tile.
    void add(const std::int8_t* x, long stride, const std::uint8_t* const (&weights)[2], long count, long tile_inputs, bool is_first) {
        if (is_first) {
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        } else {
            _tile_loadd(0, dots, STRIDE_BYTES); _tile_loadd(1, dots + STRIP, STRIDE_BYTES);
            _tile_loadd(2, dots + HALF, STRIDE_BYTES); _tile_loadd(3, dots + HALF + STRIP, STRIDE_BYTES);
        }
        for (long tile = 0; tile < count; tile++) {
            _tile_loadd(6, weights[0] + tile * tile_inputs * STRIP, 64);
            _tile_loadd(4, x + tile * tile_inputs, stride);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(5, x + TILE_ROWS * stride + tile * tile_inputs, stride);
            _tile_dpbsud(2, 5, 6);
            _tile_loadd(7, weights[1] + tile * tile_inputs * STRIP, 64);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(3, 5, 7);
        }
        _tile_stored(0, dots, STRIDE_BYTES); _tile_stored(1, dots + STRIP, STRIDE_BYTES);
        _tile_stored(2, dots + HALF, STRIDE_BYTES); _tile_stored(3, dots + HALF + STRIP, STRIDE_BYTES);
    }
};

// Tiles of int4 as bytes.
inline void expand_nibbles(const std::uint8_t* packed, long tiles, long tile_bytes, std::uint8_t* bytes) {
    for (long tile = 0; tile < tiles; tile++, packed += tile_bytes, bytes += 2 * tile_bytes)
        for (long i = 0; i < tile_bytes; i += 4 * STRIP) {
            const RegisterWords both = load_quads(packed + i);
            const RegisterWords low = both & 0x0f0f0f0fu, high = (both >> 4) & 0x0f0f0f0fu;
            std::memcpy(bytes + i, &low, sizeof low);
            std::memcpy(bytes + tile_bytes + i, &high, sizeof high);
        }
}

struct TileScratch {
    TileDots dots[(FEW_ROWS + PAIR_ROWS - 1) / PAIR_ROWS * FEW_STRIPS / PAIR_STRIPS];
    alignas(64) std::uint8_t expanded[PAIR_STRIPS][TILES_AT_ONCE * 1024];
};

template <typename T>
struct QuantizedTiles {
    const Linear<T>& op;
    const QuantizedLayout& layout;
    const QuantizedRows<std::int8_t>& x;
    long row, num_rows, strip, num_strips;
    float* sums;  // [row][strip][16]
    TileScratch& scratch;

    void compute() const {
        std::memset(sums, 0, num_rows * SUMS_STRIDE * sizeof(float));
        shape_tiles(TILE_ROWS, layout.tile_inputs / 4);
        for (long group = 0; group < layout.num_groups; group++)
            for (long tile = 0; tile < layout.num_tiles(group); tile += TILES_AT_ONCE) {
                TileDots* dots = scratch.dots;
                for (long left = 0; left < num_strips; left += PAIR_STRIPS) {
                    const std::uint8_t* weights[] = {tiles_of(left, group, tile), tiles_of(std::min(left + 1, num_strips - 1), group, tile)};
                    expand(weights, group, tile);
                    for (long top = 0; top < num_rows; top += PAIR_ROWS) add(*dots++, weights, top, left, group, tile);
                }
            }
        _tile_release();
        finish_block(op, row, num_rows, strip, num_strips, sums);
    }

private:
    const std::uint8_t* headers(long of_strip, long group) const {
        return reinterpret_cast<const std::uint8_t*>(op.packed) + (strip + of_strip) * layout.strip_bytes + group * layout.group_bytes;
    }
    const std::uint8_t* tiles_of(long of_strip, long group, long tile) const {
        return headers(of_strip, group) + layout.header_bytes + tile * layout.tile_bytes;
    }
    long count(long group, long tile) const { return std::min(TILES_AT_ONCE, layout.num_tiles(group) - tile); }

    void expand(const std::uint8_t* (&weights)[2], long group, long tile) const {
        if (op.format != WeightFormat::int4_a8) return;
        for (int i = 0; i < 2; i++) {
            expand_nibbles(weights[i], count(group, tile), layout.tile_bytes, scratch.expanded[i]);
            weights[i] = scratch.expanded[i];
        }
    }

    void add(TileDots& four, const std::uint8_t* const (&weights)[2], long top, long left, long group, long tile) const {
        const std::int8_t* rows = x.values + (row + top) * x.stride + group * layout.padded_group + tile * layout.tile_inputs;
        four.add(rows, x.stride, weights, count(group, tile), layout.tile_inputs, tile == 0);
        if (tile + TILES_AT_ONCE < layout.num_tiles(group)) return;
        with_offsets(op.quantization.offsets, [&](auto offsets) { end_group<offsets>(four, top, left, group); });
    }

    template <Offsets offsets>
    void end_group(const TileDots& four, long top, long left, long group) const {
        for (long s = 0; s < std::min(PAIR_STRIPS, num_strips - left); s++) {
            const GroupScales<offsets> scales(headers(left + s, group), 0);
            for (long r = 0; r < std::min(PAIR_ROWS, num_rows - top); r++) {
                const long at = (row + top + r) * x.num_groups + group;
                float* to = sums + (top + r) * SUMS_STRIDE + (left + s) * STRIP;
                const RegisterIntegers dots = (RegisterIntegers)load(four.dots + r * TileDots::STRIDE + s * STRIP);
                store(to, scales.add(dots + scales.first(x.sums[at]), x.scales[at], x.sums[at], load(to)));
            }
        }
    }
};

template <typename T>
void quantized_by_tiles(const Linear<T>& op, const QuantizedLayout& layout) {
    const auto x = quantize_rows<std::int8_t>(op, layout, PAIR_ROWS);
    share_blocks(op, layout.strip_bytes, [&](long row, long num_rows, long strip, long num_strips, float* sums) {
        static thread_local Aligned<TileScratch> scratch;
        QuantizedTiles<T>{op, layout, x, row, num_rows, strip, num_strips, sums, *scratch.at_least(1)}.compute();
    });
}

}  // namespace quire::ISA

#endif
