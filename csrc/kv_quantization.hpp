// Elements of 8 bits: how they are made of a head's numbers, and widened again. The arithmetic is that of
// kernels/reference/kv_cache.py, to the bit.
#pragma once

#include "cache_layout.hpp"
#include "e4m3.hpp"
#include "vec.hpp"

namespace quire::ISA {

typedef std::uint8_t Bytes __attribute__((vector_size(16)));
typedef std::uint16_t Pairs __attribute__((vector_size(16)));

template <typename S>
constexpr float LARGEST = 448.0f;
template <>
inline constexpr float LARGEST<std::int8_t> = 127.0f;

constexpr float SMALLEST_MAGNITUDE = 1e-30f;  // a head with smaller numbers is stored as zeros with a scale of 0

// Ones where a < b, of numbers below 2^31. No comparison: gcc 12 takes those of wide vectors apart.
inline Words less(Words a, Words b) { return (Words)((Integers)(a - b) >> 31); }
inline Words where(Words mask, Words yes, Words no) { return (mask & yes) | (~mask & no); }

// Sixteen elements, of which only the first `count` are read.
template <typename S>
inline Bytes load_bytes(const S* p, long count) {
    Bytes bytes = {};
    if (count >= LANES)
        std::memcpy(&bytes, p, sizeof bytes);
    else
        std::memcpy(&bytes, p, count);
    return bytes;
}

// Each byte as the highest of a word. Not by conversions of vectors: gcc 12 takes them apart.
inline Words as_highest_bytes(Bytes bytes) {
#ifdef __AVX512F__
    return (Words)_mm512_slli_epi32(_mm512_cvtepu8_epi32((__m128i)bytes), 24);
#else
    Words words;
#ifdef __FMA__
    const __m128i later = _mm_srli_si128((__m128i)bytes, 8);
    const __m256i parts[] = {_mm256_cvtepu8_epi32((__m128i)bytes), _mm256_cvtepu8_epi32(later)};
    std::memcpy(&words, parts, sizeof words);
    return words << 24;
#else
    const Pairs low = (Pairs)__builtin_shufflevector(bytes, bytes, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
    const Pairs high = (Pairs)__builtin_shufflevector(bytes, bytes, 8, 8, 9, 9, 10, 10, 11, 11, 12, 12, 13, 13, 14, 14, 15, 15);
    const Pairs parts[] = {
        __builtin_shufflevector(low, low, 0, 0, 1, 1, 2, 2, 3, 3), __builtin_shufflevector(low, low, 4, 4, 5, 5, 6, 6, 7, 7),
        __builtin_shufflevector(high, high, 0, 0, 1, 1, 2, 2, 3, 3), __builtin_shufflevector(high, high, 4, 4, 5, 5, 6, 6, 7, 7)};
    std::memcpy(&words, parts, sizeof words);
    return words;  // the lower bytes hold anything
#endif
#endif
}

inline Floats widened(const std::int8_t* p, long count) {
    return __builtin_convertvector((Integers)as_highest_bytes(load_bytes(p, count)) >> 24, Floats);
}

inline Floats widened(const E4M3* p, long count) {
    const Bytes bytes = load_bytes(p, count);
    Register parts[PARTS];
    for (int part = 0; part < PARTS; part++) parts[part] = widened_e4m3(reinterpret_cast<const std::uint8_t*>(&bytes) + part * REGISTER_LANES);
    Floats values;
    std::memcpy(&values, parts, sizeof values);
    return values;
}

// The nearest element, ties to even, in the low byte of each lane; |v| is at most the largest element, or hardly more.
inline Words nearest(Floats v, std::int8_t) { return (Words)(v + splat(12582912.0f)) - 0x4b400000u; }

inline Words nearest(Floats v, E4M3) {
    const Words largest = (Words)splat(LARGEST<E4M3>), subnormal = (Words)splat(0x1p14f);
    const Words bits = (Words)v, sign = bits & 0x80000000u, absolute = bits ^ sign;
    const Words magnitude = where(less(largest, absolute), largest, absolute);
    const Words small = (Words)(as_floats(magnitude) + as_floats(subnormal)) - subnormal;  // steps of 2^-9
    const Words normal = (magnitude - (120u << 23) + 0x7ffffu + ((magnitude >> 20) & 1u)) >> 20;
    const Words element = where(less(magnitude, Words{} + (121u << 23)), small, normal) | sign >> 24;
    return where(less(Words{} + 0x7f7fffffu, absolute), Words{} + 0x7fu, element);
}

// Store a head's numbers, each times `factor`, as elements.
template <typename S, typename T>
void store_elements(const T* x, long head_dim, Floats factor, S* out) {
    for (long i = 0; i < head_dim; i += LANES) {
        const long count = head_dim - i < LANES ? head_dim - i : LANES;
        const Bytes bytes = __builtin_convertvector(nearest(load_some(x + i, count) * factor, S{}), Bytes);
        std::memcpy(out + i, &bytes, count);
    }
}

// Quantize a head by itself; return its scale: 0 beside zeros, NaN if a number is not finite.
template <typename S, typename T>
float quantize(const T* x, long head_dim, S* out) {
    Words largest = {};  // absolute values as integers: in the order of the numbers, infinity and NaN above them
    for (long i = 0; i < head_dim; i += LANES) {
        const Words bits = (Words)load_some(x + i, head_dim - i < LANES ? head_dim - i : LANES) & 0x7fffffffu;
        largest = where(less(largest, bits), bits, largest);
    }
    std::uint32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits = largest[lane] > bits ? largest[lane] : bits;
    float magnitude;
    std::memcpy(&magnitude, &bits, sizeof magnitude);
    const bool is_finite = bits < 0x7f800000u;
    if (!is_finite || magnitude < SMALLEST_MAGNITUDE) {
        std::memset(out, 0, head_dim);
        return is_finite ? 0.0f : __builtin_nanf("");
    }
    store_elements(x, head_dim, splat(LARGEST<S> / magnitude), out);
    return magnitude / LARGEST<S>;
}

}  // namespace quire::ISA
