// exp for sixteen floats, the same bits in every lane, on every row and for any number of values.
//
// exp(x) = 2^n * exp(r), n the integer nearest to x / ln 2 and |r| <= ln 2 / 2, subtracted in two parts so that r is
// exact to the last bits; exp(r) by a polynomial of degree 6 (relative error below 2e-7, measured in tests). Below -87.3
// the result is 0, above 88.7 infinity: nothing subnormal comes out.
#pragma once

#include "vec.hpp"

namespace quire::ISA {

typedef std::int32_t Integers __attribute__((vector_size(64)));

inline Floats choose(Words mask, Floats yes, Floats no) { return (Floats)((mask & (Words)yes) | (~mask & (Words)no)); }

inline Floats exp(Floats x) {
    constexpr float log2_e = 1.44269504f, ln2_high = 0.693145752f, ln2_low = 1.42860677e-6f, magic = 12582912.0f;
    const Words is_low = (Words)(x < splat(-87.33f)), is_high = (Words)(x > splat(88.72f)), is_nan = (Words)(x != x);
    const Floats bounded = choose(is_low | is_high | is_nan, Floats{}, x);
    const Floats shifted = bounded * splat(log2_e) + splat(magic);  // the integer stands in the lowest bits
    const Floats n = shifted - splat(magic);
    const Floats r = (bounded - n * splat(ln2_high)) - n * splat(ln2_low);
    Floats p = splat(1.3888889e-3f);
    p = multiply_add(p, r, splat(8.3333333e-3f));
    p = multiply_add(p, r, splat(4.1666667e-2f));
    p = multiply_add(p, r, splat(1.6666667e-1f));
    p = multiply_add(p, r, splat(0.5f));
    p = multiply_add(p, r, splat(1.0f));
    p = multiply_add(p, r, splat(1.0f));
    // Two factors, since 2^128 is no float but exp(88.7) is one.
    const Words exponent = (Words)shifted - 0x4b400000u;             // n as a two's complement integer
    const Words half = (Words)((Integers)exponent >> 1);
    const Floats scale = as_floats((half + 127u) << 23), rest = as_floats((exponent - half + 127u) << 23);
    Floats result = p * scale * rest;
    result = choose(is_low, Floats{}, result);
    result = choose(is_high, splat(__builtin_inff()), result);
    return choose(is_nan, x, result);
}

}  // namespace quire::ISA
