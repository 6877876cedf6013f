// exp for sixteen floats, the same bits in every lane, on every row and for any number of values.
//
// exp(x) = 2^n * exp(r), n the integer nearest to x / ln 2 and |r| <= ln 2 / 2, subtracted in two parts so that r is
// exact to the last bits; exp(r) by a polynomial of degree 6 (relative error below 4e-7, measured in tests). Above 88.7 the
// result is infinity, far below -87.3 it is 0, NaN for NaN.
#pragma once

#include "vec.hpp"

namespace quire::ISA {

inline Floats choose(Words mask, Floats yes, Floats no) { return (Floats)((mask & (Words)yes) | (~mask & (Words)no)); }

constexpr float LN2_HIGH = 0.693145752f, LN2_LOW = 1.42860677e-6f;

// combine(a, b, c) is a * b + c, rounded once or twice.
template <typename Combine>
inline Floats exp_of_remainder(Floats r, Combine combine) {
    Floats p = splat(1.3888889e-3f);
    p = combine(p, r, splat(8.3333333e-3f));
    p = combine(p, r, splat(4.1666667e-2f));
    p = combine(p, r, splat(1.6666667e-1f));
    p = combine(p, r, splat(0.5f));
    p = combine(p, r, splat(1.0f));
    return combine(p, r, splat(1.0f));
}

inline Floats exp_of_remainder(Floats r) {
    return exp_of_remainder(r, [](Floats a, Floats b, Floats c) { return multiply_add(a, b, c); });
}

#ifdef __AVX512F__

// The bounds keep infinity out of the remainder; NaN is the second operand, which minimum and maximum return.
inline Floats exp(Floats x) {
    const __m512 bounded = _mm512_max_ps(_mm512_set1_ps(-110.0f), _mm512_min_ps(_mm512_set1_ps(90.0f), (__m512)x));
    const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(bounded, _mm512_set1_ps(LOG2_E)), _MM_FROUND_TO_NEAREST_INT);
    const __m512 high = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_HIGH), bounded);
    const __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(LN2_LOW), high);
    return (Floats)_mm512_scalef_ps((__m512)exp_of_remainder((Floats)r), n);
}

#else

inline Floats exp(Floats x) {
    constexpr float magic = 12582912.0f;
    const Words is_low = is_below(x, splat(-87.33f)), is_high = is_below(splat(88.72f), x), is_none = is_nan(x);
    const Floats bounded = choose(is_low | is_high | is_none, Floats{}, x);
    const Floats shifted = bounded * splat(LOG2_E) + splat(magic);  // the integer is in the lowest bits
    const Floats n = shifted - splat(magic);
    const Floats r = (bounded - n * splat(LN2_HIGH)) - n * splat(LN2_LOW);
    const Floats p = exp_of_remainder(r);
    // Two factors, since 2^128 is no float but exp(88.7) is one.
    const Words exponent = (Words)shifted - 0x4b400000u;             // n as a two's complement integer
    const Words half = (Words)((Integers)exponent >> 1);
    const Floats scale = as_floats((half + 127u) << 23), rest = as_floats((exponent - half + 127u) << 23);
    Floats result = p * scale * rest;
    result = choose(is_low, Floats{}, result);
    result = choose(is_high, splat(__builtin_inff()), result);
    return choose(is_none, x, result);
}

#endif

}  // namespace quire::ISA
