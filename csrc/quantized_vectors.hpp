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

// Finish rows of a block. Sums that are only rounded to T are stored without the choices that `finish` makes for each strip.
template <typename T>
void finish_rows(const Linear<T>& op, long row, long num_rows, long strip, long num_strips, float* sums) {
    const bool is_rounded_only = op.activation == Activation::none && !op.bias && !op.has_addends() && !op.out_is_float;
    if (!is_rounded_only || (strip + num_strips) * STRIP > op.out_features) return finish_block(op, row, num_rows, strip, num_strips, sums);
    T* out = static_cast<T*>(op.out) + row * op.out_stride + strip * STRIP;
    for (long r = 0; r < num_rows; r++)
        for (long s = 0; s < num_strips; s++) store(out + r * op.out_stride + s * STRIP, load(sums + r * SUMS_STRIDE + s * STRIP));
}

// What finishes rows of a block of a layer with outputs of any type, for which the loops of products are compiled once.
class BlockFinish {
public:
    template <typename T>
    BlockFinish(const Linear<T>& op, long row, long strip, long num_strips)
        : is_whole(op.has_addends()), op_(&op), row_(row), strip_(strip), num_strips_(num_strips),
          fetch_([](const BlockFinish& self, long top, long num_rows) {
              fetch_outputs(*static_cast<const Linear<T>*>(self.op_), self.row_ + top, num_rows, self.strip_, self.num_strips_);
          }),
          finish_([](const BlockFinish& self, long top, long num_rows, float* sums) {
              finish_rows(*static_cast<const Linear<T>*>(self.op_), self.row_ + top, num_rows, self.strip_, self.num_strips_, sums);
          }) {}

    void fetch(long top, long num_rows) const { fetch_(*this, top, num_rows); }
    void operator()(long top, long num_rows, float* sums) const { finish_(*this, top, num_rows, sums); }

    const bool is_whole;  // all rows at once

private:
    const void* op_;
    long row_, strip_, num_strips_;
    void (*fetch_)(const BlockFinish&, long, long);
    void (*finish_)(const BlockFinish&, long, long, float*);
};

// Some rows x up to four strips. Meanwhile what is `next` strips behind the first one is fetched; 0: nothing.
template <typename W, Offsets offsets>
struct QuantizedBlock {
    using Products = TileProducts<W>;
    using Rows = QuantizedRows<typename Products::X>;
    const QuantizedLayout& layout;
    const Rows& x;
    const std::uint8_t* packed;  // the first strip
    long row, num_rows, num_strips, next;
    float* sums;  // [row][strip][16]
    const BlockFinish& finish;

    void compute() const {
        std::memset(sums, 0, num_rows * SUMS_STRIDE * sizeof(float));
        if (num_rows <= MAX_ROWS) {
            in_groups<MAX_ROWS>(num_rows, [&](auto rows, long) {
                for (long strip = 0; strip < num_strips; strip++) add<rows, 1, BYTES_AHEAD>(0, strip, 0, layout.num_groups, Nothing());
            });
            return finish(0, num_rows, sums);
        }
        const long heights = (num_rows + MAX_ROWS - 1) / MAX_ROWS, width = strips_beside((num_rows + heights - 1) / heights);
        const long at_once = std::max(1L, INPUTS_AT_ONCE / layout.group_size);
        for (long first = 0; first < num_strips; first += width)
            for (long group = 0, end_group; group < layout.num_groups; group = end_group) {
                const long end = std::min(first + width, num_strips);
                end_group = std::min(group + at_once, layout.num_groups);
                FetchWords<W> fetch = after(first, width, end_group, at_once, heights * (end_group - group));
                const bool is_last = end == num_strips && end_group == layout.num_groups && !finish.is_whole;
                in_groups<MAX_ROWS>(num_rows, [&](auto rows, long top) {
                    if (is_last) finish.fetch(top, rows);
                    add<rows>(top, first, end, group, end_group, fetch);
                    if (is_last) finish(top, rows, sums + top * SUMS_STRIDE);
                });
            }
        if (finish.is_whole) finish(0, num_rows, sums);
    }

private:
    // What to fetch while the groups before `group` of strips from `first` on are multiplied: what is multiplied next.
    FetchWords<W> after(long first, long width, long group, long at_once, long calls) const {
        long strip = first, beside = std::min(width, num_strips - first);
        if (group == layout.num_groups) {
            group = 0;
            if (first + width < num_strips) {
                strip += width, beside = std::min(width, num_strips - strip);
            } else {
                if (next == 0) return {};
                strip = next;
            }
        }
        const long begin = group * layout.group_bytes;
        const long bytes = std::min(begin + at_once * layout.group_bytes, layout.strip_bytes) - begin;
        return {{reinterpret_cast<const W*>(packed + strip * layout.strip_bytes + begin), layout.strip_bytes}, beside, bytes / (STRIP * PAIR<W>), calls};
    }

    template <int rows>
    void add(long top, long first, long end, long group, long end_group, FetchWords<W>& fetch) const {
        constexpr int most = strips_beside(rows);
        while (first < end) {
            if (most == 4 && first + 4 <= end) first += add<rows, std::min(most, 4)>(top, first, group, end_group, fetch);
            else if (most >= 2 && first + 2 <= end) first += add<rows, std::min(most, 2)>(top, first, group, end_group, fetch);
            else first += add<rows, 1>(top, first, group, end_group, fetch);
        }
    }

    // meanwhile() is called before each group.
    template <int rows, int strips, long ahead = 0, typename Meanwhile>
    long add(long top, long first, long group, long end_group, Meanwhile&& meanwhile) const {
        const long at = (row + top) * x.num_groups;
        for (; group < end_group; group++) {
            meanwhile();
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
    share_blocks(op, layout.strip_bytes, [&](long row, long num_rows, long strip, long num_strips, float* sums, long next_strip) {
        const BlockFinish finish(op, row, strip, num_strips);
        const long next = next_strip < 0 ? 0 : next_strip - strip;
        with_offsets(op.quantization.offsets, [&](auto offsets) {
            QuantizedBlock<W, offsets>{layout, x, packed + strip * layout.strip_bytes, row, num_rows, num_strips, next, sums, finish}.compute();
        });
    });
}

}  // namespace quire::ISA
