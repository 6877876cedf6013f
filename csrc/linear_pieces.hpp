// Some outputs of a linear layer, computed by one of several threads: a piece of work where many small layers are one work
// list. The kernel of linear layers finds all other threads at work and stays in its own.
#pragma once

#include <cstring>

#include "aligned.hpp"
#include "expanded_packing.hpp"
#include "packing.hpp"

namespace quire::ISA {

template <typename T>
void linear(const Linear<T>&);

constexpr long PIECE_STEP = 2 * STRIP;  // unit of a piece's borders: kernels finish strips in pairs

// Bytes of a strip of sixteen outputs; of a gated layer there are two.
template <typename T>
inline long strip_bytes(const LinearWeights& layer) {
    switch (layer.format) {
        case WeightFormat::dense: return packed_size<T>(STRIP, layer.in_features) * static_cast<long>(sizeof(T));
        case WeightFormat::int8_a8:
        case WeightFormat::int4_a8: return QuantizedLayout(layer.format, layer.quantization, layer.in_features).strip_bytes;
        default: return ExpandedLayout(layer.format, layer.quantization, layer.in_features).strip_bytes;
    }
}

template <typename T>
struct LayerRows {
    const T* x;
    long count, stride;
};

// Outputs [first, end) of a layer, multiples of sixteen but for the last. A gated layer's bias has the gates' and the ups'.
template <typename T>
inline void compute_outputs(const LinearWeights& layer, const LayerRows<T>& rows, long first, long end, void* out, long out_stride, bool out_is_float) {
    const long each = is_gated(layer.activation) ? 2 : 1, count = end - first;
    const float* bias = layer.bias ? layer.bias + first : nullptr;
    if (bias && each == 2 && count < layer.out_features) {
        static thread_local Aligned<float> scratch;
        float* both = scratch.at_least(2 * count);
        std::memcpy(both, bias, count * sizeof(float));
        std::memcpy(both + count, bias + layer.out_features, count * sizeof(float));
        bias = both;
    }
    const char* packed = static_cast<const char*>(layer.packed) + first / STRIP * each * strip_bytes<T>(layer);
    char* to = static_cast<char*>(out) + first * static_cast<long>(out_is_float ? sizeof(float) : sizeof(T));
    linear(Linear<T>{rows.x, rows.count, layer.in_features, rows.stride, reinterpret_cast<const T*>(packed), count, bias, to,
                     out_stride, out_is_float, layer.activation, layer.format, layer.quantization});
}

}  // namespace quire::ISA
