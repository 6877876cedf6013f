// Bytes of 8-bit floating point (e4m3fn) as floats: a sign, four bits of an exponent with a bias of 7, three of a fraction;
// a magnitude of nothing but ones is NaN.
#pragma once

#include "vec.hpp"

namespace quire::ISA {

#if defined(__AVX512F__) || (defined(__AVX2__) && defined(__F16C__))

// As halves, which have one bit more of exponent, of a bias of 15: numbers are 2^8 times too small, subnormal or not, and
// what should be NaN is the only one whose magnitude carries into the exponent's highest bit.
inline Register widened_e4m3(const std::uint8_t* bytes) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(bytes)));
    const __m256i halves = _mm256_and_si256(_mm256_slli_epi16(wide, 7), _mm256_set1_epi16(static_cast<short>(0xbf80)));
    const __m256i carried = _mm256_and_si256(_mm256_add_epi16(halves, _mm256_set1_epi16(0x80)), _mm256_set1_epi16(0x4000));
    return (Register)_mm512_cvtph_ps(_mm256_or_si256(halves, carried)) * 0x1p8f;
#else
    const __m128i wide = _mm_cvtepi8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(bytes)));
    const __m128i halves = _mm_and_si128(_mm_slli_epi16(wide, 7), _mm_set1_epi16(static_cast<short>(0xbf80)));
    const __m128i carried = _mm_and_si128(_mm_add_epi16(halves, _mm_set1_epi16(0x80)), _mm_set1_epi16(0x4000));
    return (Register)_mm256_cvtph_ps(_mm_or_si128(halves, carried)) * 0x1p8f;
#endif
}

#else

// With the exponent -7, which means -6 and no leading one, the value is what is left when that one is taken off.
inline Register widened_e4m3(const std::uint8_t* bytes) {
    RegisterWords elements;
#if defined(__SSE2__) && !defined(__AVX2__)
    std::int32_t four;
    std::memcpy(&four, bytes, sizeof four);
    const __m128i zero = _mm_setzero_si128();
    elements = (RegisterWords)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero), zero);
#else
    for (int lane = 0; lane < REGISTER_LANES; lane++) elements[lane] = bytes[lane];
#endif
    const RegisterWords magnitudes = elements & 0x7fu;
    const RegisterWords is_small = (RegisterWords)((RegisterIntegers)magnitudes < 8);
    const RegisterWords is_nan = (RegisterWords)((RegisterIntegers)magnitudes == 0x7f);
    const RegisterWords bits = (magnitudes << 20) + (120u << 23) + (is_small & (1u << 23));
    const Register values = (Register)(bits | (is_nan & 0x7fc00000u)) - (Register)(is_small & (121u << 23));
    return (Register)((RegisterWords)values | (elements & 0x80u) << 24);
}

#endif

}  // namespace quire::ISA
