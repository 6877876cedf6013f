#include "packing.hpp"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>

#include "thread_pool.hpp"

namespace quire {
namespace {

// Bytes that a thread packs at a time: a huge page, for two threads that write to a page that has not been
// touched would both fill it with zeros.
constexpr long BYTES_AT_ONCE = 2 << 20;

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

}  // namespace

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

}  // namespace quire
