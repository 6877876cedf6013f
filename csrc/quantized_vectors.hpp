// Linear layers of quantized weights by vectors, in the blocks of dense ones (linear_vectors.hpp): a group's integer sums
// stay in registers, from which they are scaled and added to the outputs' float sums.
#pragma once

#include "linear_vectors.hpp"
#include "quantized_products.hpp"
#include "quantized_rows.hpp"

namespace quire::ISA {

constexpr long INPUTS_AT_ONCE = 1024;  // many rows: the weights of so many stay in the caches next to the core
constexpr long BYTES_AHEAD = 4096;     // few rows: weights that are asked for

// Some outputs and one group: how its sums of products begin, and how they are added to the outputs' float sums, each step
// rounded by itself.
template <Offsets offsets>
struct GroupScales {
    Register scales, own;  // own: zero points, as integers, or minimums

    GroupScales(const std::uint8_t* header, long lane) {
        std::memcpy(&scales, header + lane * sizeof(float), sizeof scales);
        if constexpr (offsets != Offsets::zero_point) std::memcpy(&own, header + (STRIP + lane) * sizeof(float), sizeof own);
    }
    RegisterIntegers first(std::int32_t row_sum) const {
        if constexpr (offsets == Offsets::zero_point) return row_sum - RegisterIntegers{};
        if constexpr (offsets == Offsets::zero_points) return (RegisterIntegers)own * -row_sum;
        return RegisterIntegers{};
    }
    Register add(RegisterIntegers dots, float row_scale, std::int32_t row_sum, Register sums) const {
        sums = sums + __builtin_convertvector(dots, Register) * (row_scale * scales);
        if constexpr (offsets == Offsets::minimums) sums = sums - static_cast<float>(row_sum) * (row_scale * own);
        return sums;
    }
};

// Call work(offsets, as a constant).
template <typename Work>
inline void with_offsets(Offsets offsets, Work&& work) {
    switch (offsets) {
        case Offsets::minimums: return work(std::integral_constant<Offsets, Offsets::minimums>());
        case Offsets::zero_points: return work(std::integral_constant<Offsets, Offsets::zero_points>());
        default: return work(std::integral_constant<Offsets, Offsets::zero_point>());
    }
}

// Sums of some rows x up to four strips.
template <typename W, Offsets offsets>
struct QuantizedSums {
    using Products = TileProducts<W>;
    using Rows = QuantizedRows<typename Products::X>;
    const QuantizedLayout& layout;
    const Rows& x;
    const std::uint8_t* packed;  // the first strip
    long row, num_rows, num_strips;
    float* sums;  // [row][strip][16]

    void compute() const {
        std::memset(sums, 0, num_rows * SUMS_STRIDE * sizeof(float));
        if (num_rows <= MAX_ROWS)
            return in_groups<MAX_ROWS>(num_rows, [&](auto rows, long) {
                for (long strip = 0; strip < num_strips; strip++) add<rows, 1, BYTES_AHEAD>(0, strip, 0, layout.num_groups);
            });
        const long heights = (num_rows + MAX_ROWS - 1) / MAX_ROWS, width = strips_beside((num_rows + heights - 1) / heights);
        const long at_once = std::max(1L, INPUTS_AT_ONCE / layout.group_size);
        for (long first = 0; first < num_strips; first += width)
            for (long group = 0; group < layout.num_groups; group += at_once)
                in_groups<MAX_ROWS>(num_rows, [&](auto rows, long top) {
                    add<rows>(top, first, std::min(first + width, num_strips), group, std::min(group + at_once, layout.num_groups));
                });
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

    template <int rows, int strips, long ahead = 0>
    long add(long top, long first, long group, long end_group) const {
        const long at = (row + top) * x.num_groups;
        for (; group < end_group; group++) {
            const std::uint8_t* headers = packed + first * layout.strip_bytes + group * layout.group_bytes;
            const float* row_scales = x.scales + at + group;
            const std::int32_t* row_sums = x.sums + at + group;
            const W* weights[strips];
            IntegerSums<rows, strips> dots;
#pragma GCC unroll 8
            for (int c = 0; c < strips * PARTS; c++) {
                const GroupScales<offsets> scales(headers + c / PARTS * layout.strip_bytes, c % PARTS * REGISTER_LANES);
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) dots.parts[r][c] = scales.first(row_sums[r * x.num_groups]);
            }
            for (int s = 0; s < strips; s++)
                weights[s] = reinterpret_cast<const W*>(headers + s * layout.strip_bytes + layout.header_bytes);
            if constexpr (ahead > 0) __builtin_prefetch(headers + ahead);
            Products::template add<ahead>(dots, weights, x.values + (row + top) * x.stride + group * layout.padded_group,
                                          x.stride, layout.num_tiles(group) * layout.tile_inputs / 4);
#pragma GCC unroll 8
            for (int c = 0; c < strips * PARTS; c++) {
                const GroupScales<offsets> scales(headers + c / PARTS * layout.strip_bytes, c % PARTS * REGISTER_LANES);
                float* to = sums + top * SUMS_STRIDE + first * STRIP + c * REGISTER_LANES;
#pragma GCC unroll 8
                for (int r = 0; r < rows; r++) {
                    Register sum;
                    std::memcpy(&sum, to + r * SUMS_STRIDE, sizeof sum);
                    sum = scales.add(dots.parts[r][c], row_scales[r * x.num_groups], row_sums[r * x.num_groups], sum);
                    std::memcpy(to + r * SUMS_STRIDE, &sum, sizeof sum);
                }
            }
        }
        return strips;
    }
};

template <typename W, typename T>
void quantized_by_vectors(const Linear<T>& op, const QuantizedLayout& layout) {
    const auto x = quantize_rows<typename TileProducts<W>::X>(op, layout);
    const std::uint8_t* packed = reinterpret_cast<const std::uint8_t*>(op.packed);
    share_blocks(op, layout.strip_bytes, [&](long row, long num_rows, long strip, long num_strips, float* sums) {
        with_offsets(op.quantization.offsets, [&](auto offsets) {
            QuantizedSums<W, offsets>{layout, x, packed + strip * layout.strip_bytes, row, num_rows, num_strips, sums}.compute();
        });
        finish_block(op, row, num_rows, strip, num_strips, sums);
    });
}

}  // namespace quire::ISA
