// Softmax primitives of sixteen floats: a power of two, and maximum and sum in a fixed order.
#pragma once

#include "vec.hpp"

namespace quire::ISA {

// 2^(x * scale) for x <= 0 and scale > 0, with a relative error below 2e-7: exactly 1 for x = 0, exactly 0 below 2^-125
// (results that are not normal cost a hundred times as much), NaN for NaN.
//
// x * scale = n + f with n whole. 2^f is a polynomial, of least relative error among those that are 1 at 0.
inline Floats power(Floats x, Floats scale) {
#ifdef __AVX512F__
    const Floats t = x * scale, f = (Floats)_mm512_reduce_ps((__m512)t, _MM_FROUND_TO_NEG_INF);  // 0 <= f < 1
    Floats result = multiply_add(splat(0x1.e97536p-10f), f, splat(0x1.277846p-7f));
    result = multiply_add(result, f, splat(0x1.c91ceap-5f));
    result = multiply_add(result, f, splat(0x1.ebdb56p-3f));
    result = multiply_add(result, f, splat(0x1.62e4bap-1f));
    result = multiply_add(result, f, splat(1.0f));
    const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)t, (__m512)splat(-125.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(is_kept, (__m512)result, (__m512)t);
#else
    // Adding 1.5 * 2^23 rounds to n and leaves n in the low bits of the sum, from where a shift takes it to the exponent.
    const Floats middle = splat(12582912.0f), shifted = multiply_add(x, scale, middle);
    const Floats f = multiply_add(x, scale, middle - shifted);  // |f| <= 1/2
    Floats result = multiply_add(splat(0x1.5bba14p-10f), f, splat(0x1.3cea88p-7f));
    result = multiply_add(result, f, splat(0x1.c6b752p-5f));
    result = multiply_add(result, f, splat(0x1.ebf9bcp-3f));
    result = multiply_add(result, f, splat(0x1.62e42ap-1f));
    result = multiply_add(result, f, splat(1.0f));
    const Floats lowest = splat(12582912.0f - 125.0f);
    return as_floats(((Words)result + ((Words)shifted << 23)) & ~is_below(shifted, lowest));
#endif
}

#ifdef __AVX512F__
// 2^(t + 1/2) for t <= -1/2, plus `half_step` * 2^n, n the integer nearest to t; 0 below 2^-125 and for -inf, NaN for NaN.
// Relative error below 8e-5.
//
// While the matrix unit works, products, maxima and scalings of 512 bits have one port, of two; sums keep both. So n and f
// come from three sums: t = n + f, |f| <= 1/2.
inline Floats rough_power(Floats t, float half_step = 0.0f) {
    const Floats middle = splat(12582912.0f), n = t + middle - middle, f = t - n;
    Floats result = multiply_add(splat(0x1.3f968ap-4f), f, splat(0x1.5f56a4p-2f));
    result = multiply_add(result, f, splat(0x1.f5f97ep-1f));
    result = multiply_add(result, f, splat(0x1.6a033cp+0f + half_step));
    const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)n, (__m512)splat(-125.0f), _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_scalef_ps(is_kept, (__m512)result, (__m512)n);
}
#endif

#ifdef __AVX512BF16__
// The same rounded to bfloat16, in the upper half of each float, something in the lower half. sqrt(2) * 2^f lies in [1, 2], where
// rounding is to add 2^-8 and to cut.
inline __m512i power_bf16(Floats t) { return (__m512i)rough_power(t, 0x1p-8f); }
#endif

// Over the lanes, halves first: 8 pairs, 4 pairs, 2 pairs, 1.
template <typename Combine>
inline float over_lanes(Floats v, Combine combine) {
    v = combine(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    v = combine(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    v = combine(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    v = combine(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    return v[0];
}

inline float largest_lane(Floats v) { return over_lanes(v, maximum); }
inline float sum_of_lanes(Floats v) { return over_lanes(v, [](Floats a, Floats b) { return a + b; }); }

}  // namespace quire::ISA
