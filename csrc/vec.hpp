// Sixteen floats at a time, in the words of the compiler's vector extension: one zmm register, or as many smaller ones
// as the target has. Everything lives in the instruction set's own namespace, so that no two builds share code.
#pragma once

#include <cstring>

#if defined(__FMA__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "kernels.hpp"

namespace quire::ISA {

constexpr int LANES = 16;
constexpr float LOG2_E = 1.44269504f;

typedef float Floats __attribute__((vector_size(64)));
typedef std::uint32_t Words __attribute__((vector_size(64)));
typedef std::int32_t Integers __attribute__((vector_size(64)));
typedef std::uint16_t Halves __attribute__((vector_size(32)));

inline Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

inline Floats splat(float x) { return x - Floats{}; }

// What one register holds. Loops that keep sums in registers are written on these: gcc keeps wider vectors in memory.
#if defined(__AVX512F__)
constexpr int REGISTER_LANES = 16;
#elif defined(__FMA__)
constexpr int REGISTER_LANES = 8;
#else
constexpr int REGISTER_LANES = 4;
#endif
constexpr int PARTS = LANES / REGISTER_LANES;  // registers of sixteen floats

typedef float Register __attribute__((vector_size(4 * REGISTER_LANES)));
typedef std::uint32_t RegisterWords __attribute__((vector_size(4 * REGISTER_LANES)));
typedef std::int32_t RegisterIntegers __attribute__((vector_size(4 * REGISTER_LANES)));

// a * b + c, rounded once where the CPU can, twice where it cannot; always the same on one instruction set.
inline Register multiply_add(Register a, Register b, Register c) {
#if defined(__AVX512F__)
    return (Register)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Register)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// Sixteen lanes register by register, work(number): gcc takes comparisons and conversions of vectors that are wider than a
// register apart, lane by lane.
template <typename Vector, typename Work>
inline Vector by_registers(Work work) {
    Register parts[PARTS];
    for (int i = 0; i < PARTS; i++) parts[i] = (Register)work(i);
    Vector v;
    static_assert(sizeof v == sizeof parts);
    std::memcpy(&v, parts, sizeof v);
    return v;
}

inline Register part(Floats v, int number) {
    Register registers[PARTS];
    std::memcpy(registers, &v, sizeof v);
    return registers[number];
}

// All bits of the lanes where a is less than b.
inline Words is_below(Floats a, Floats b) {
    return by_registers<Words>([&](int i) { return part(a, i) < part(b, i); });
}
inline Words is_nan(Floats a) {
    return by_registers<Words>([&](int i) { return part(a, i) != part(a, i); });
}

#ifdef __AVX512F__
inline Floats maximum(Floats a, Floats b) { return (Floats)_mm512_max_ps((__m512)a, (__m512)b); }
inline Floats minimum(Floats a, Floats b) { return (Floats)_mm512_min_ps((__m512)a, (__m512)b); }
#else
inline Floats multiply_add(Floats a, Floats b, Floats c) { return a * b + c; }
inline Floats maximum(Floats a, Floats b) {
    return by_registers<Floats>([&](int i) { return part(a, i) > part(b, i) ? part(a, i) : part(b, i); });
}
inline Floats minimum(Floats a, Floats b) {
    return by_registers<Floats>([&](int i) { return part(a, i) < part(b, i) ? part(a, i) : part(b, i); });
}
#endif

inline Floats as_floats(Words bits) { return (Floats)bits; }

// Round to the nearest bfloat16, ties to even; NaN stays NaN.
inline Words rounded_bits(Floats v) {
#ifdef __AVX512F__
    const __m512i bits = (__m512i)v, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i sum = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 is_nan = _mm512_cmp_ps_mask((__m512)v, (__m512)v, _CMP_UNORD_Q);
    return (Words)_mm512_srli_epi32(_mm512_mask_or_epi32(sum, is_nan, bits, _mm512_set1_epi32(0x400000)), 16);
#else
    const Words bits = (Words)v, rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16, nan = is_nan(v);
    return (nan & ((bits >> 16) | 0x40u)) | (~nan & rounded);
#endif
}

// The lower halves of words. Instructions before AVX-512 pack signed ones, none of which is then too large.
inline Halves lower_halves(Words v) {
#if defined(__AVX512F__) || !defined(__SSE2__)
    return __builtin_convertvector(v, Halves);
#else
    const Floats values = (Floats)((Integers)(v << 16) >> 16);
#ifdef __FMA__
    const __m256i packed = _mm256_packs_epi32((__m256i)part(values, 0), (__m256i)part(values, 1));
    return (Halves)_mm256_permute4x64_epi64(packed, 0xd8);
#else
    const __m128i packed[2] = {_mm_packs_epi32((__m128i)part(values, 0), (__m128i)part(values, 1)),
                               _mm_packs_epi32((__m128i)part(values, 2), (__m128i)part(values, 3))};
    Halves halves;
    std::memcpy(&halves, packed, sizeof halves);
    return halves;
#endif
#endif
}

// Words with zeros above halves. As gcc converts them, AVX-512 takes four instructions.
inline Words widened(Halves v) {
#ifdef __AVX512F__
    return (Words)_mm512_cvtepu16_epi32((__m256i)v);
#else
    return __builtin_convertvector(v, Words);
#endif
}

inline Floats load(const bf16* p) {
#if defined(__FMA__) && !defined(__AVX512F__)
    return by_registers<Floats>([&](int i) {
        return _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 8 * i))), 16);
    });
#else
    Halves v;
    std::memcpy(&v, p, sizeof v);
    return as_floats(widened(v) << 16);
#endif
}

#ifdef __AVX512BF16__
inline Halves rounded_halves(Floats v) { return (Halves)_mm512_cvtneps_pbh((__m512)v); }  // takes subnormal floats as zeros
#else
inline Halves rounded_halves(Floats v) { return lower_halves(rounded_bits(v)); }
#endif

inline void store(bf16* p, Floats v) {
    const Halves halves = rounded_halves(v);
    std::memcpy(p, &halves, sizeof halves);
}

// As it would be read back after it has been stored as T.
template <typename T>
inline Floats rounded(Floats v) {
    if constexpr (sizeof(T) == sizeof(float)) return v;
#ifdef __AVX512BF16__
    return as_floats(widened(rounded_halves(v)) << 16);
#else
    return as_floats(rounded_bits(v) << 16);
#endif
}

// The first `count` lanes only.
template <typename T>
inline void store_some(T* p, Floats v, long count) {
    if (count >= LANES) return store(p, v);
    T lanes[LANES];
    store(lanes, v);
    std::memcpy(p, lanes, count * sizeof(T));
}

template <typename T>
inline Floats load_some(const T* p, long count) {
    if (count >= LANES) return load(p);
    T lanes[LANES] = {};
    std::memcpy(lanes, p, count * sizeof(T));
    return load(lanes);
}

}  // namespace quire::ISA
