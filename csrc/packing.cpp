#include "packing.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "thread_pool.hpp"

namespace quire {
namespace {

// Bytes that a thread packs at a time: a huge page, for two threads that write to a page that has not been
// touched would both fill it with zeros.
constexpr long BYTES_AT_ONCE = 2 << 20;
constexpr long ELEMENTS_AT_ONCE = 1 << 14;  // looked up by a thread

// A weight is packed by words: one float, or a pair of bfloat16.
constexpr long WORD_BYTES = 4;
typedef std::uint32_t FourWords __attribute__((vector_size(16)));

FourWords load_four(const char* words) {
    FourWords loaded;
    std::memcpy(&loaded, words, sizeof loaded);
    return loaded;
}

// Four words of four rows, `stride` bytes apart, to four rows of a strip.
void transpose_four(const char* rows, long stride, char* packed) {
    const FourWords a = load_four(rows), b = load_four(rows + stride);
    const FourWords c = load_four(rows + 2 * stride), d = load_four(rows + 3 * stride);
    const FourWords ac_low = __builtin_shufflevector(a, c, 0, 4, 1, 5), ac_high = __builtin_shufflevector(a, c, 2, 6, 3, 7);
    const FourWords bd_low = __builtin_shufflevector(b, d, 0, 4, 1, 5), bd_high = __builtin_shufflevector(b, d, 2, 6, 3, 7);
    const FourWords columns[4] = {
        __builtin_shufflevector(ac_low, bd_low, 0, 4, 1, 5), __builtin_shufflevector(ac_low, bd_low, 2, 6, 3, 7),
        __builtin_shufflevector(ac_high, bd_high, 0, 4, 1, 5), __builtin_shufflevector(ac_high, bd_high, 2, 6, 3, 7)};
    for (long i = 0; i < 4; i++) std::memcpy(packed + i * STRIP * WORD_BYTES, &columns[i], sizeof columns[i]);
}

// The words of up to sixteen rows, word by word; rows that are missing are zero.
void transpose_words(const char* weight, long stride, long rows, long num_words, char* packed) {
    const long whole_rows = rows / 4 * 4, whole_words = num_words / 4 * 4;
    const auto copy_word = [&](long row, long word) {
        std::memcpy(packed + (word * STRIP + row) * WORD_BYTES, weight + row * stride + word * WORD_BYTES, WORD_BYTES);
    };
    if (rows < STRIP) std::memset(packed, 0, num_words * STRIP * WORD_BYTES);
    for (long word = 0; word < whole_words; word += 4) {
        for (long row = 0; row < whole_rows; row += 4)
            transpose_four(weight + row * stride + word * WORD_BYTES, stride, packed + (word * STRIP + row) * WORD_BYTES);
        for (long row = whole_rows; row < rows; row++)
            for (long i = word; i < word + 4; i++) copy_word(row, i);
    }
    for (long word = whole_words; word < num_words; word++)
        for (long row = 0; row < rows; row++) copy_word(row, word);
}

void pack_strip(const float* weight, long stride, long rows, long in_features, float* packed) {
    transpose_words((const char*)weight, stride * long(sizeof(float)), rows, in_features, (char*)packed);
}

// An odd last input, and what is missing in the last tile, makes pairs with zeros.
void pack_strip(const bf16* weight, long stride, long rows, long in_features, bf16* packed) {
    const long num_pairs = in_features / 2;
    transpose_words((const char*)weight, stride * long(sizeof(bf16)), rows, num_pairs, (char*)packed);
    std::fill(packed + num_pairs * 2 * STRIP, packed + num_tiles(in_features) * TILE_ELEMENTS, 0);
    if (in_features % 2)
        for (long row = 0; row < rows; row++) packed[(num_pairs * STRIP + row) * 2] = weight[row * stride + in_features - 1];
}

// Up to `tile_inputs` inputs of up to sixteen rows, as quads, with zeros for what is missing.
void pack_tile(const std::uint8_t* elements, long stride, long rows, long inputs, long tile_inputs, std::uint8_t* tile) {
    const long num_quads = inputs / 4;
    transpose_words((const char*)elements, stride, rows, num_quads, (char*)tile);
    std::fill(tile + num_quads * 4 * STRIP, tile + tile_inputs * STRIP, 0);
    for (long row = 0; row < rows; row++)
        for (long i = num_quads * 4; i < inputs; i++) tile[(num_quads * STRIP + row) * 4 + i % 4] = elements[row * stride + i];
}

// One value for each output of a strip, zeros for outputs that are missing.
template <typename Wanted, typename Given>
void pack_header(const Given* values, long stride, long rows, std::uint8_t* packed) {
    Wanted header[STRIP] = {};
    for (long row = 0; row < rows; row++) header[row] = values[row * stride];
    std::memcpy(packed, header, sizeof header);
}

}  // namespace

void pack_quantized(WeightFormat format, Quantization quantization, const std::uint8_t* elements, long stride,
                    long out_features, long in_features, const float* scales, const void* offsets, long scale_stride,
                    long scale_group_size, std::uint8_t* packed, long every) {
    const QuantizedLayout layout(format, quantization, in_features);
    const auto pack_group = [&](long first_row, long group, std::uint8_t* to) {
        const long rows = std::min(STRIP, out_features - first_row), inputs = layout.num_inputs(group);
        const long scale = first_row * scale_stride + group * layout.group_size / scale_group_size;
        std::uint8_t* second_header = to + layout.header_bytes / 2;
        pack_header<float>(scales + scale, scale_stride, rows, to);
        if (quantization.offsets == Offsets::zero_points)
            pack_header<std::int32_t>(static_cast<const std::uint8_t*>(offsets) + scale, scale_stride, rows, second_header);
        if (quantization.offsets == Offsets::minimums)
            pack_header<float>(static_cast<const float*>(offsets) + scale, scale_stride, rows, second_header);
        to += layout.header_bytes;
        for (long first = 0; first < inputs; first += layout.tile_inputs, to += layout.tile_bytes) {
            std::uint8_t tile[64 * STRIP];
            pack_tile(elements + first_row * stride + group * layout.group_size + first, stride, rows,
                      std::min(layout.tile_inputs, inputs - first), layout.tile_inputs, tile);
            for (long i = 0; format == WeightFormat::int4_a8 && i < layout.tile_bytes; i++)
                tile[i] = static_cast<std::uint8_t>((tile[i] & 15) | tile[layout.tile_bytes + i] << 4);
            std::memcpy(to, tile, layout.tile_bytes);
        }
    };
    const long strips_at_once = std::max<long>(1, BYTES_AT_ONCE / (layout.strip_bytes * every));
    share_range(num_strips(out_features), strips_at_once, [&](long begin, long end) {
        for (long strip = begin; strip < end; strip++)
            for (long group = 0; group < layout.num_groups; group++)
                pack_group(strip * STRIP, group, packed + strip * every * layout.strip_bytes + group * layout.group_bytes);
    });
}

template <typename T>
void pack_linear(const T* weight, long stride, long out_features, long in_features, T* packed, long every) {
    const long strip_elements = packed_size<T>(STRIP, in_features);
    const long strips_at_once = std::max<long>(1, BYTES_AT_ONCE / (strip_elements * every * long(sizeof(T))));
    share_range(num_strips(out_features), strips_at_once, [&](long begin, long end) {
        for (long strip = begin; strip < end; strip++)
            pack_strip(weight + strip * STRIP * stride, stride, std::min(STRIP, out_features - strip * STRIP), in_features,
                       packed + strip * every * strip_elements);
    });
}

void require_rows(const std::int64_t* row_ids, long num_ids, long num_rows) {
    for (long i = 0; i < num_ids; i++)
        if (row_ids[i] < 0 || row_ids[i] >= num_rows)
            throw std::out_of_range("row " + std::to_string(row_ids[i]) + " of a table of " + std::to_string(num_rows));
}

template <typename T>
void look_up_packed(const T* packed, long out_features, long in_features, const std::int64_t* row_ids, long num_ids, T* rows) {
    constexpr long inputs = WORD_BYTES / long(sizeof(T));  // elements in a word
    const long strip_elements = packed_size<T>(STRIP, in_features);
    require_rows(row_ids, num_ids, out_features);
    share_range(num_ids, std::max(1l, ELEMENTS_AT_ONCE / in_features), [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
            const T* words = packed + row_ids[i] / STRIP * strip_elements + row_ids[i] % STRIP * inputs;
            for (long input = 0; input < in_features; input++)
                rows[i * in_features + input] = words[input / inputs * inputs * STRIP + input % inputs];
        }
    });
}

void look_up_quantized(WeightFormat format, Quantization quantization, const std::uint8_t* packed, long out_features,
                       long in_features, const std::int64_t* row_ids, long num_ids, float* values) {
    const QuantizedLayout layout(format, quantization, in_features);
    require_rows(row_ids, num_ids, out_features);
    const auto look_up_group = [&](const std::uint8_t* packed_group, long row, long inputs, float* to) {
        float scale, minimum = 0;
        std::int32_t zero_point = static_cast<std::int32_t>(quantization.zero_point);
        const std::uint8_t* second_header = packed_group + layout.header_bytes / 2 + row * 4;
        std::memcpy(&scale, packed_group + row * 4, sizeof scale);
        if (quantization.offsets == Offsets::zero_points) std::memcpy(&zero_point, second_header, sizeof zero_point);
        if (quantization.offsets == Offsets::minimums) std::memcpy(&minimum, second_header, sizeof minimum);
        const std::uint8_t* tile = packed_group + layout.header_bytes;
        for (long i = 0; i < inputs; i++) {
            const long in_tile = i % layout.tile_inputs, place = (in_tile / 4 * STRIP + row) * 4 + in_tile % 4;
            const std::uint8_t* own_tile = tile + i / layout.tile_inputs * layout.tile_bytes;
            const int element = format != WeightFormat::int4_a8 ? own_tile[place]
                                : place < layout.tile_bytes     ? own_tile[place] & 15
                                                                : own_tile[place - layout.tile_bytes] >> 4;
            to[i] = quantization.offsets == Offsets::minimums ? static_cast<float>(element) * scale - minimum
                                                              : static_cast<float>(element - zero_point) * scale;
        }
    };
    share_range(num_ids, std::max(1l, ELEMENTS_AT_ONCE / in_features), [&](long begin, long end) {
        for (long i = begin; i < end; i++)
            for (long group = 0; group < layout.num_groups; group++)
                look_up_group(packed + row_ids[i] / STRIP * layout.strip_bytes + group * layout.group_bytes, row_ids[i] % STRIP,
                              layout.num_inputs(group), values + i * in_features + group * layout.group_size);
    });
}

// What is not finite has an exponent of nothing but ones. No branch: the compiler compares many values at once.
template <typename T>
bool all_finite(const T* values, long count) {
    using Bits = std::conditional_t<sizeof(T) == sizeof(bf16), std::uint16_t, std::uint32_t>;
    constexpr Bits ones = sizeof(T) == sizeof(bf16) ? 0x7f80 : 0x7f800000;
    std::atomic<bool> has_any{false};
    share_range(count, BYTES_AT_ONCE / 8 / long(sizeof(T)), [&](long begin, long end) {
        Bits found = 0;
        for (long i = begin; i < end; i++) {
            Bits bits;
            std::memcpy(&bits, values + i, sizeof bits);
            found |= (bits & ones) == ones;
        }
        if (found) has_any.store(true, std::memory_order_relaxed);
    });
    return !has_any;
}

template bool all_finite(const bf16*, long);
template bool all_finite(const float*, long);
template void pack_linear(const bf16*, long, long, long, bf16*, long);
template void pack_linear(const float*, long, long, long, float*, long);
template void look_up_packed(const bf16*, long, long, const std::int64_t*, long, bf16*);
template void look_up_packed(const float*, long, long, const std::int64_t*, long, float*);

}  // namespace quire
