// Linear layers of quantized weights by vectors, in the blocks of dense ones (linear_vectors.hpp): a group's integer sums
// stay in registers, then are scaled and added to the outputs' float sums.
#pragma once

#include "linear_vectors.hpp"
#include "quantized_products.hpp"
#include "quantized_rows.hpp"

namespace quire::ISA {

constexpr long INPUTS_AT_ONCE = 1024;  // of many rows: the weights of so many stay in the first-level cache

// Add one group to the float sums [rows][strips][16 outputs] of a block, each step rounded by itself. `dots` are the bits of
// the int32 sums of products, [rows][strips][16], too; rows are `stride` apart.
struct GroupScales {
    Quantization quantization;
    long header_bytes, strip_bytes;
    const std::uint8_t* headers;  // of the first strip
    const float* row_scales;
    const std::int32_t* row_sums;
    long num_groups;              // from row to row of the two

    void add(const float* dots, long dots_stride, float* sums, long stride, long rows, long strips) const {
        switch (quantization.offsets) {
            case Offsets::minimums: return add<Offsets::minimums>(dots, dots_stride, sums, stride, rows, strips);
            case Offsets::zero_points: return add<Offsets::zero_points>(dots, dots_stride, sums, stride, rows, strips);
            default: return add<Offsets::zero_point>(dots, dots_stride, sums, stride, rows, strips);
        }
    }

private:
    template <Offsets offsets>
    void add(const float* dots, long dots_stride, float* sums, long stride, long rows, long strips) const {
        for (long s = 0; s < strips; s++) {
            const float* header = reinterpret_cast<const float*>(headers + s * strip_bytes);
            const Floats scales = load(header);
            Floats own = {};
            if constexpr (offsets != Offsets::zero_point) own = load(header + STRIP);
            for (long r = 0; r < rows; r++) {
                const Integers dot = (Integers)load(dots + r * dots_stride + s * STRIP);
                const float row_scale = row_scales[r * num_groups];
                const std::int32_t row_sum = row_sums[r * num_groups];
                float* to = sums + r * stride + s * STRIP;
                Floats sum = load(to);
                if constexpr (offsets == Offsets::minimums) {
                    sum = sum + __builtin_convertvector(dot, Floats) * (splat(row_scale) * scales);
                    sum = sum - splat(static_cast<float>(row_sum)) * (splat(row_scale) * own);
                } else {
                    const std::int32_t zero_point = static_cast<std::int32_t>(quantization.zero_point);
                    const Integers taken = offsets == Offsets::zero_point ? zero_point * row_sum - Integers{} : (Integers)own * row_sum;
                    sum = sum + __builtin_convertvector(dot - taken, Floats) * (splat(row_scale) * scales);
                }
                store(to, sum);
            }
        }
    }
};

// Some rows x up to four strips.
template <typename W, typename T>
struct QuantizedBlock {
    using Products = TileProducts<W>;
    const Linear<T>& op;
    const QuantizedLayout& layout;
    const QuantizedRows<typename Products::X>& x;
    long row, num_rows, strip, num_strips;
    float* sums;  // [row][strip][16]

    void compute() const {
        const long heights = (num_rows + MAX_ROWS - 1) / MAX_ROWS, width = strips_beside((num_rows + heights - 1) / heights);
        const long at_once = heights == 1 ? layout.num_groups : std::max(1L, INPUTS_AT_ONCE / layout.group_size);
        std::memset(sums, 0, num_rows * SUMS_STRIDE * sizeof(float));
        for (long first = 0; first < num_strips; first += width)
            for (long group = 0; group < layout.num_groups; group += at_once)
                in_groups<MAX_ROWS>(num_rows, [&](auto rows, long top) {
                    add<rows>(top, first, std::min(first + width, num_strips), group, std::min(group + at_once, layout.num_groups));
                });
        finish_block(op, row, num_rows, strip, num_strips, sums);
    }

private:
    template <int rows>
    void add(long top, long first, long end, long group, long end_group) const {
        constexpr int most = strips_beside(rows);
        while (first < end) {
            if (most == 4 && first + 4 <= end) first += add<rows, std::min(most, 4)>(top, first, group, end_group);
            else if (most >= 2 && first + 2 <= end) first += add<rows, std::min(most, 2)>(top, first, group, end_group);
            else first += add<rows, 1>(top, first, group, end_group);
        }
    }

    template <int rows, int strips>
    long add(long top, long first, long group, long end_group) const {
        const std::uint8_t* packed = reinterpret_cast<const std::uint8_t*>(op.packed) + (strip + first) * layout.strip_bytes;
        const long at = (row + top) * x.num_groups;
        for (; group < end_group; group++) {
            const std::uint8_t* headers = packed + group * layout.group_bytes;
            const W* weights[strips];
            for (int s = 0; s < strips; s++)
                weights[s] = reinterpret_cast<const W*>(headers + s * layout.strip_bytes + layout.header_bytes);
            IntegerSums<rows, strips> block;
            Products::template add<strips == 1 ? 2048 : 0>(block, weights, x.values + (row + top) * x.stride + group * layout.padded_group,
                                                           x.stride, layout.num_tiles(group) * layout.tile_inputs / 4);
            alignas(64) float dots[rows * strips * STRIP];  // bits of int32
            block.store(dots, strips * STRIP);
            GroupScales{op.quantization, layout.header_bytes, layout.strip_bytes, headers, x.scales + at + group, x.sums + at + group, x.num_groups}
                .add(dots, strips * STRIP, sums + top * SUMS_STRIDE + first * STRIP, SUMS_STRIDE, rows, strips);
        }
        return strips;
    }
};

template <typename W, typename T>
void quantized_by_vectors(const Linear<T>& op, const QuantizedLayout& layout) {
    const auto x = quantize_rows<typename TileProducts<W>::X>(op, layout);
    share_blocks(op, layout.strip_bytes, [&](long row, long num_rows, long strip, long num_strips, float* sums) {
        QuantizedBlock<W, T>{op, layout, x, row, num_rows, strip, num_strips, sums}.compute();
    });
}

}  // namespace quire::ISA
