// The layers of a decoder as one call: what quire/model/layers.py composes of single kernels, without a return to the
// interpreter in between, whose code and data the weights have driven out of the cache each time.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace quire {

struct NormWeights {
    const void *weight = nullptr, *bias = nullptr;  // no weight: no norm
    float eps = 0;
    bool is_layer_norm = false;  // else RMSNorm
};

struct LinearWeights {
    const void* packed;
    const float* bias;
    long in_features, out_features;
    Activation activation;
};

// Norm, attention, add; norm, feed-forward, add.
struct LayerWeights {
    NormWeights attention_norm, feed_forward_norm, query_norm, key_norm;  // the last two over each head
    LinearWeights qkv, out, up, down;
    const float* cos_sin;  // null: nothing is turned by its position
    long rotary_dim;
    float scale;
    long window;           // 0: none
};

// What one step computes, and where. x [num_tokens, width] is what the layers are given, afterwards what the last layer
// has left to add to `residual`; the stream is their sum.
template <typename T>
struct LayersRun {
    T *x, *residual;
    long num_tokens, width, num_heads, num_kv_heads, head_dim, block_size;
    const std::int64_t *positions, *slots;
    const std::int32_t *block_tables, *query_starts, *context_lens;
    long table_stride, num_seqs;
    const std::vector<T*>&keys, &values;  // the caches, of each layer
    volatile std::int64_t* progress;      // one more after each layer; another thread may look
};

template <typename T>
void run_layers(const Kernels& kernels, const std::vector<LayerWeights>& layers, const LayersRun<T>& run);

}  // namespace quire
