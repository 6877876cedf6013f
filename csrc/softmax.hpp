// What a softmax needs of sixteen floats: a power of two, and their maximum and sum in an order that never changes.
#pragma once

#include "vec.hpp"

namespace quire::ISA {

// 2^x for x <= 1, with a relative error below 2e-7; exactly 1 for 0, exactly 0 below -125, NaN for NaN.
//
// x = n + f with n whole and |f| <= 1/2. Adding 1.5 * 2^23 rounds x to n and leaves n in the low bits of the sum, from
// where a shift takes it to the exponent. 2^f is a polynomial, of least relative error among those that are 1 at 0.
inline Floats exp2(Floats x) {
    const Floats shifted = x + 12582912.0f;
    const Floats f = x - (shifted - 12582912.0f);
    Floats power = multiply_add(splat(0x1.5bba14p-10f), f, splat(0x1.3cea88p-7f));
    power = multiply_add(power, f, splat(0x1.c6b752p-5f));
    power = multiply_add(power, f, splat(0x1.ebf9bcp-3f));
    power = multiply_add(power, f, splat(0x1.62e42ap-1f));
    power = multiply_add(power, f, splat(1.0f));
    const Words scaled = (Words)power + ((Words)shifted << 23);
#ifdef __AVX512F__
    return (Floats)_mm512_maskz_mov_epi32(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-125.0f), _CMP_NLT_UQ),
                                          (__m512i)scaled);
#else
    return as_floats(scaled & ~(Words)(x < splat(-125.0f)));
#endif
}

inline float exp2(float x) { return exp2(splat(x))[0]; }

inline Floats maximum(Floats a, Floats b) {
#ifdef __AVX512F__
    return (Floats)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

// Over the lanes, halves first: 8 pairs, 4 pairs, 2 pairs, 1.
template <typename Combine>
inline float over_lanes(Floats v, Combine combine) {
    v = combine(v, __builtin_shuffle(v, Words{8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = combine(v, __builtin_shuffle(v, Words{4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = combine(v, __builtin_shuffle(v, Words{2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = combine(v, __builtin_shuffle(v, Words{1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

inline float largest_lane(Floats v) { return over_lanes(v, maximum); }
inline float sum_of_lanes(Floats v) { return over_lanes(v, [](Floats a, Floats b) { return a + b; }); }

}  // namespace quire::ISA
