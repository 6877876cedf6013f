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

struct Kernels {
    void (*linear_bf16)(const Linear<bf16>&);
    void (*linear_float)(const Linear<float>&);
};

namespace portable { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }

}  // namespace quire
