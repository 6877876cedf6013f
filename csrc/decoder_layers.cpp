#include "decoder_layers.hpp"

#include <algorithm>

#include "aligned.hpp"
#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long TOKENS_AT_ONCE = 8;  // whose heads a thread normalizes

template <template <typename> class Op, typename T>
void call(const ForBoth<Op>& kernel, const Op<T>& op) {
    if constexpr (sizeof(T) == sizeof(bf16))
        kernel.bf16(op);
    else
        kernel.float32(op);
}

template <typename T>
void norm(const NormWeights& norm, T* x, T* residual, long num_rows, long width) {
    call(norm.is_layer_norm ? chosen->layer_norm : chosen->rms_norm,
         Norm<T>{x, residual, residual, x, num_rows, width, static_cast<const T*>(norm.weight),
                 static_cast<const T*>(norm.bias), width, norm.eps});
}

template <typename T>
void linear(const LinearWeights& layer, const T* x, long num_rows, T* out) {
    call(chosen->linear,
         Linear<T>{x, num_rows, layer.in_features, layer.in_features, static_cast<const T*>(layer.packed), layer.out_features,
                   layer.bias, out, layer.out_features, sizeof(T) == sizeof(float), layer.activation, layer.format});
}

}  // namespace

// A step's activations; the memory is kept from step to step.
template <typename T>
struct DecoderLayers<T>::Activations {
    T *qkv, *attended, *wide;
    long qkv_width;

    Activations(const LayerWeights& layer, long num_tokens) : qkv_width(layer.qkv.out_features) {
        static thread_local ISA::Aligned<T> memory;
        const auto size = [&](long width) { return rounded_up(num_tokens * width, 64 / sizeof(T)); };  // in whole cache lines
        const long qkv_size = size(qkv_width), attended_size = size(layer.out.in_features);
        qkv = memory.at_least(qkv_size + attended_size + size(layer.up.out_features));
        attended = qkv + qkv_size;
        wide = attended + attended_size;
    }
};

// Normalize queries and keys per head where the family does so, turn them by their positions, fill the cache.
template <typename T>
void DecoderLayers<T>::place(const LayersStep<T>& step, const Activations& to, std::size_t index) const {
    const LayerWeights& layer = layers_[index];
    T *keys = to.qkv + num_heads_ * head_dim_, *values = keys + num_kv_heads_ * head_dim_;
    if (layer.query_norm.weight)
        share_range(step.num_tokens, TOKENS_AT_ONCE, [&](long begin, long end) {
            for (long token = begin; token < end; token++) {
                norm<T>(layer.query_norm, to.qkv + token * to.qkv_width, nullptr, num_heads_, head_dim_);
                norm<T>(layer.key_norm, keys + token * to.qkv_width, nullptr, num_kv_heads_, head_dim_);
            }
        });
    call(chosen->kv_write,
         KVWrite<T>{to.qkv, to.qkv_width, keys, values, to.qkv_width, to.qkv_width, step.positions, step.slots, layer.cos_sin,
                    keys_[index], values_[index], step.num_tokens, num_heads_, num_kv_heads_, head_dim_, block_size_,
                    layer.rotary_dim});
}

template <typename T>
void DecoderLayers<T>::attend(const LayersStep<T>& step, const Activations& to, std::size_t index) const {
    call(chosen->attention,
         Attention<T>{to.qkv, to.qkv_width, keys_[index], values_[index], to.attended, num_heads_ * head_dim_,
                      step.block_tables, step.query_starts, step.context_lens, step.table_stride, step.num_seqs, num_heads_,
                      num_kv_heads_, head_dim_, block_size_, layers_[index].scale, layers_[index].window});
}

// Norms are in place. Before the first layer x is the stream itself, later it is to be added to the residual.
template <typename T>
void DecoderLayers<T>::run(const LayersStep<T>& step) const {
    const long num_tokens = step.num_tokens;
    const Activations to(layers_.front(), num_tokens);
    std::copy(step.x, step.x + num_tokens * width_, step.residual);
    for (std::size_t i = 0; i < layers_.size(); i++) {
        const LayerWeights& layer = layers_[i];
        norm<T>(layer.attention_norm, step.x, i > 0 ? step.residual : nullptr, num_tokens, width_);
        linear(layer.qkv, step.x, num_tokens, to.qkv);
        place(step, to, i);
        attend(step, to, i);
        linear(layer.out, to.attended, num_tokens, step.x);
        norm<T>(layer.feed_forward_norm, step.x, step.residual, num_tokens, width_);
        linear(layer.up, step.x, num_tokens, to.wide);
        linear(layer.down, to.wide, num_tokens, step.x);
        *step.progress = *step.progress + 1;
    }
}

template class DecoderLayers<bf16>;
template class DecoderLayers<float>;

}  // namespace quire
