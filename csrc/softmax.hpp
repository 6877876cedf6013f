// What a softmax needs of sixteen floats: a power of two, and their maximum and sum in an order that never changes.
#pragma once

#include "vec.hpp"

namespace quire::ISA {

// 2^(x * scale) for x <= 0 and scale > 0: exactly 1 for x = 0, exactly 0 below 2^-125, NaN for NaN. Relative error below
// 2e-7 with the fine polynomial, below 1.1e-4 with the coarse one, which is for weights that will be rounded to bfloat16.
//
// x * scale = n + f with n whole and |f| <= 1/2. Adding 1.5 * 2^23 rounds to n and leaves n in the low bits of the sum,
// from where a shift takes it to the exponent. 2^f is a polynomial, of least relative error among those that are 1 at 0.
enum class Precision { fine, coarse };

template <Precision precision>
inline Floats power(Floats x, Floats scale) {
    const Floats middle = splat(12582912.0f), shifted = multiply_add(x, scale, middle);
    const Floats f = multiply_add(x, scale, middle - shifted);
    Floats result;
    if constexpr (precision == Precision::fine) {
        result = multiply_add(splat(0x1.5bba14p-10f), f, splat(0x1.3cea88p-7f));
        result = multiply_add(result, f, splat(0x1.c6b752p-5f));
        result = multiply_add(result, f, splat(0x1.ebf9bcp-3f));
        result = multiply_add(result, f, splat(0x1.62e42ap-1f));
    } else {
        result = multiply_add(splat(0x1.c2a218p-5f), f, splat(0x1.f00c4cp-3f));
        result = multiply_add(result, f, splat(0x1.62f5fap-1f));
    }
    result = multiply_add(result, f, splat(1.0f));
    const Floats lowest = splat(12582912.0f - 125.0f);
#ifdef __AVX512F__
    const __mmask16 is_kept = _mm512_cmp_ps_mask((__m512)shifted, (__m512)lowest, _CMP_NLT_UQ);
    return (Floats)_mm512_maskz_add_epi32(is_kept, (__m512i)result, _mm512_slli_epi32((__m512i)shifted, 23));
#else
    return as_floats(((Words)result + ((Words)shifted << 23)) & ~(Words)(shifted < lowest));
#endif
}

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
