#include "expanded_packing.hpp"

#include <cstring>
#include <limits>

#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long BYTES_AT_ONCE = 1 << 20;     // packed weights that a thread takes
constexpr long ELEMENTS_AT_ONCE = 1 << 14;  // looked up by a thread

// Values [rows, num_groups] as [group][16], zeros for the rows that are missing.
template <typename Given>
void pack_header(const Given* values, long rows, long num_groups, float* packed) {
    std::memset(packed, 0, num_groups * STRIP * sizeof(float));
    for (long row = 0; row < rows; row++)
        for (long group = 0; group < num_groups; group++) {
            const float value = values[row * num_groups + group];
            packed[group * STRIP + row] = value == value ? value : std::numeric_limits<float>::quiet_NaN();
        }
}

void pack_elements(const std::uint8_t* elements, long stride, long rows, long in_features, bool is_half, std::uint8_t* packed) {
    for (long row = 0; row < rows; row++) {
        const std::uint8_t* from = elements + row * stride;
        std::uint8_t* to = packed + row;
        if (!is_half) {
            for (long i = 0; i < in_features; i++) to[i * STRIP] = from[i];
            continue;
        }
        for (long pair = 0; pair < in_features / 2; pair++)
            to[pair * STRIP] = static_cast<std::uint8_t>((from[2 * pair] & 15) | from[2 * pair + 1] << 4);
        if (in_features % 2) to[in_features / 2 * STRIP] = from[in_features - 1] & 15;
    }
}

}  // namespace

void pack_expanded(WeightFormat format, Quantization quantization, const std::uint8_t* elements, long stride,
                   long out_features, long in_features, const float* scales, const void* offsets, std::uint8_t* packed,
                   long every) {
    const ExpandedLayout layout(format, quantization, in_features);
    const bool is_half = format == WeightFormat::int4 || format == WeightFormat::codebook4;
    const auto pack_strip = [&](long strip) {
        const long first = strip * STRIP, rows = std::min(STRIP, out_features - first), scale = first * layout.num_groups;
        std::uint8_t* to = packed + strip * every * layout.strip_bytes;
        float* header = reinterpret_cast<float*>(to);
        float* second_header = header + layout.num_groups * STRIP;
        pack_header(scales + scale, rows, layout.num_groups, header);
        if (quantization.offsets == Offsets::zero_points)
            pack_header(static_cast<const std::uint8_t*>(offsets) + scale, rows, layout.num_groups, second_header);
        if (quantization.offsets == Offsets::minimums)
            pack_header(static_cast<const float*>(offsets) + scale, rows, layout.num_groups, second_header);
        std::memset(to + layout.header_bytes, 0, layout.strip_bytes - layout.header_bytes);
        pack_elements(elements + first * stride, stride, rows, in_features, is_half, to + layout.header_bytes);
    };
    share_range(num_strips(out_features), std::max<long>(1, BYTES_AT_ONCE / layout.strip_bytes), [&](long begin, long end) {
        for (long strip = begin; strip < end; strip++) pack_strip(strip);
    });
}

void look_up_expanded(WeightFormat format, Quantization quantization, const std::uint8_t* packed, long out_features,
                      long in_features, const std::int64_t* row_ids, long num_ids, float* values) {
    const ExpandedLayout layout(format, quantization, in_features);
    const bool is_half = format == WeightFormat::int4 || format == WeightFormat::codebook4;
    require_rows(row_ids, num_ids, out_features);
    const auto look_up_row = [&](const std::uint8_t* strip, long row, float* to) {
        const float* scales = reinterpret_cast<const float*>(strip) + row;
        const float* offsets = scales + layout.num_groups * STRIP;
        const std::uint8_t* elements = strip + layout.header_bytes + row;
        for (long i = 0; i < in_features; i++) {
            const long group = (quantization.groups ? quantization.groups[i] : i / quantization.group_size) * STRIP;
            const int element = is_half ? elements[i / 2 * STRIP] >> i % 2 * 4 & 15 : elements[i * STRIP];
            if (quantization.codebook)
                to[i] = quantization.codebook[element] * scales[group];
            else if (quantization.offsets == Offsets::minimums)
                to[i] = static_cast<float>(element) * scales[group] - offsets[group];
            else if (quantization.offsets == Offsets::zero_points)
                to[i] = (static_cast<float>(element) - offsets[group]) * scales[group];
            else
                to[i] = static_cast<float>(element - quantization.zero_point) * scales[group];
        }
    };
    share_range(num_ids, std::max(1l, ELEMENTS_AT_ONCE / in_features), [&](long begin, long end) {
        for (long i = begin; i < end; i++)
            look_up_row(packed + row_ids[i] / STRIP * layout.strip_bytes, row_ids[i] % STRIP, values + i * in_features);
    });
}

}  // namespace quire
