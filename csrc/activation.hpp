// The activations of feed-forward layers, sixteen floats at a time, each as quire/kernels/reference/activation.py defines it.
#pragma once

#include "exp.hpp"

namespace quire::ISA {

inline Floats silu(Floats x) { return x / (exp(-x) + splat(1.0f)); }

inline Floats relu(Floats x) { return choose(is_below(x, Floats{}), Floats{}, x); }

inline Floats relu2(Floats x) { return relu(x) * relu(x); }

// gpt-oss's gate, at most 7, times its sigmoid at 1.702 times the gate, times an up of -7 to 7, plus 1.
inline Floats clamped_silu_and_mul(Floats gate, Floats up) {
    const Floats limit = splat(7.0f);
    gate = choose(is_below(limit, gate), limit, gate);
    up = choose(is_below(limit, up), limit, choose(is_below(up, -limit), -limit, up));
    return gate / (exp(gate * splat(-1.702f)) + splat(1.0f)) * (up + splat(1.0f));
}

// x times its sigmoid at 1.702 x.
inline Floats quick_gelu(Floats x) { return x / (exp(x * splat(-1.702f)) + splat(1.0f)); }

// (1 + tanh(u)) / 2 is 1 / (1 + exp(-2u)).
inline Floats gelu_tanh(Floats x) {
    constexpr float twice_sqrt_2_over_pi = 1.59576912f;
    const Floats cubed = x * x * x, twice_u = (x + cubed * splat(0.044715f)) * splat(twice_sqrt_2_over_pi);
    return x / (exp(-twice_u) + splat(1.0f));
}

// x times the normal distribution's integral, whose tail is a polynomial in 1 / (1 + p z) times exp(-z^2), z = |x| / sqrt 2,
// to an absolute error of 1.5e-7 (Abramowitz and Stegun 1964, 7.1.26).
inline Floats gelu(Floats x) {
    const Floats z = maximum(x, -x) * splat(0.707106781f), t = splat(1.0f) / (z * splat(0.3275911f) + splat(1.0f));
    Floats tail = splat(1.061405429f);
    tail = multiply_add(tail, t, splat(-1.453152027f));
    tail = multiply_add(tail, t, splat(1.421413741f));
    tail = multiply_add(tail, t, splat(-0.284496736f));
    tail = multiply_add(tail, t, splat(0.254829592f));
    tail = tail * t * exp(-z * z) * splat(0.5f);
    return x * choose(is_below(Floats{}, x), splat(1.0f) - tail, tail);
}

}  // namespace quire::ISA
