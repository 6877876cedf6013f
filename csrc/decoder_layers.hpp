// The layers of a decoder as one call: what quire/model/layers.py composes of single kernels, without a return to the
// interpreter in between, whose code and data the weights have driven out of the cache each time.
#pragma once

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
    WeightFormat format;
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

// What one step computes. x [num_tokens, width] is what the layers are given, afterwards what the last layer has left to
// add to `residual`; the stream is their sum.
template <typename T>
struct LayersStep {
    T *x, *residual;
    long num_tokens;
    const std::int64_t *positions, *slots;
    const std::int32_t *block_tables, *query_starts, *context_lens;
    long table_stride, num_seqs;
    volatile std::int64_t* progress;  // one more after each layer; another thread may look
};

// The layers and the caches that they use, kept between the steps.
template <typename T>
class DecoderLayers {
public:
    DecoderLayers(std::vector<LayerWeights> layers, long width, long num_heads, long num_kv_heads, long head_dim)
        : layers_(std::move(layers)), width_(width), num_heads_(num_heads), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {}

    void use_caches(std::vector<T*> keys, std::vector<T*> values, long block_size) {
        keys_ = std::move(keys), values_ = std::move(values), block_size_ = block_size;
    }

    void run(const LayersStep<T>& step) const;

private:
    std::vector<LayerWeights> layers_;
    long width_, num_heads_, num_kv_heads_, head_dim_, block_size_ = 0;
    std::vector<T*> keys_, values_;

    struct Activations;
    void place(const LayersStep<T>& step, const Activations& to, std::size_t index) const;
    void attend(const LayersStep<T>& step, const Activations& to, std::size_t index) const;
};

}  // namespace quire
