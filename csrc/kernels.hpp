// What each instruction set implements. Every source of kernels is compiled once per instruction set, with ISA defined
// as the name of the namespace that it fills. Pointers, shapes and strides only: no torch, no Python.
#pragma once

#include <cstdint>

namespace quire {

using bf16 = std::uint16_t;  // the upper half of a float

// A linear layer: out = x W^T + bias, x [num_rows, in_features] and out [num_rows, out_features], rows `stride` elements
// apart. Packed weights as `packed_size` and `pack_linear` say. bias is float32 or null.
template <typename T>
struct Linear {
    const T* x;
    long num_rows, in_features, x_stride;
    const T* packed;
    long out_features;
    const float* bias;
    void* out;
    long out_stride;
    bool out_is_float;   // else T
};

// summed = x + residual (x itself where residual is null: summed is not written); out = RMSNorm(summed) * weight.
// x rows are x_stride elements apart; everything else is [num_rows, width] without gaps, weight [width].
template <typename T>
struct RmsNorm {
    const T *x, *residual, *weight;
    T *summed, *out;
    long num_rows, width, x_stride;
    float eps;
};

// out [num_rows, width] = silu(gate) * up for gate_up [num_rows, 2 * width], gate in the first half of each row.
template <typename T>
struct SiluAndMul {
    const T* gate_up;
    T* out;
    long num_rows, width;
};

template <template <typename> class Op>
struct ForBoth {
    void (*bf16)(const Op<quire::bf16>&);
    void (*float32)(const Op<float>&);
};

struct Kernels {
    ForBoth<Linear> linear;
    ForBoth<RmsNorm> rms_norm;
    ForBoth<SiluAndMul> silu_and_mul;
};

namespace portable { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }

}  // namespace quire
