#include "decoder_layers.hpp"

#include <algorithm>
#include <memory>

#include "gang.hpp"

namespace quire {
namespace {

constexpr long TOKENS_AT_ONCE = 8;  // whose heads a thread normalizes

// A step's activations; the memory is kept from step to step.
template <typename T>
struct Activations {
    T *qkv, *attended, *wide;

    static Activations take(long num_tokens, long qkv_width, long attended_width, long wide) {
        static thread_local std::unique_ptr<T[]> memory;
        static thread_local long room = 0;
        const long line = 64 / sizeof(T), widths[] = {qkv_width, attended_width, wide};
        long starts[3], size = 0;
        for (int i = 0; i < 3; i++) {
            starts[i] = size;
            size += rounded_up(num_tokens * widths[i], line) + line;
        }
        if (size > room) {
            memory.reset(new T[size + line]);
            room = size;
        }
        T* first = memory.get() + (-reinterpret_cast<std::uintptr_t>(memory.get()) & 63) / sizeof(T);
        return {first + starts[0], first + starts[1], first + starts[2]};
    }
};

template <template <typename> class Op, typename T>
void call(const ForBoth<Op>& kernel, const Op<T>& op) {
    if constexpr (sizeof(T) == sizeof(bf16))
        kernel.bf16(op);
    else
        kernel.float32(op);
}

template <typename T>
class Runner {
public:
    Runner(const Kernels& kernels, const LayersRun<T>& run, const LayerWeights& first)
        : kernels_(kernels), run_(run),
          to_(Activations<T>::take(run.num_tokens, first.qkv.out_features, first.out.in_features,
                                   first.up.out_features)) {}

    // `has_residual`: x is to be added to the residual; before the first layer x is the stream itself. Norms are in place.
    void layer(const LayerWeights& weights, T* keys, T* values, bool has_residual) const {
        if (!has_residual) std::copy(run_.x, run_.x + run_.num_tokens * run_.width, run_.residual);
        norm(weights.attention_norm, run_.x, has_residual ? run_.residual : nullptr, run_.num_tokens, run_.width);
        linear(weights.qkv, run_.x, to_.qkv);
        place(weights, keys, values);
        attend(weights, keys, values);
        linear(weights.out, to_.attended, run_.x);
        norm(weights.feed_forward_norm, run_.x, run_.residual, run_.num_tokens, run_.width);
        linear(weights.up, run_.x, to_.wide);
        linear(weights.down, to_.wide, run_.x);
    }

private:
    const Kernels& kernels_;
    const LayersRun<T>& run_;
    const Activations<T> to_;

    long qkv_width() const { return (run_.num_heads + 2 * run_.num_kv_heads) * run_.head_dim; }
    T* key() const { return to_.qkv + run_.num_heads * run_.head_dim; }
    T* value() const { return key() + run_.num_kv_heads * run_.head_dim; }

    void norm(const NormWeights& norm, T* x, T* residual, long num_rows, long width) const {
        call(norm.is_layer_norm ? kernels_.layer_norm : kernels_.rms_norm,
             Norm<T>{x, residual, residual, x, num_rows, width, static_cast<const T*>(norm.weight),
                     static_cast<const T*>(norm.bias), width, norm.eps});
    }

    void linear(const LinearWeights& layer, const T* x, T* out) const {
        call(kernels_.linear,
             Linear<T>{x, run_.num_tokens, layer.in_features, layer.in_features, static_cast<const T*>(layer.packed),
                       layer.out_features, layer.bias, out, layer.out_features, sizeof(T) == sizeof(float), layer.activation});
    }

    // Normalize queries and keys per head where the family does so, turn them by their positions, fill the cache.
    void place(const LayerWeights& weights, T* keys, T* values) const {
        if (weights.query_norm.weight)
            share_range(run_.num_tokens, TOKENS_AT_ONCE, [&](long begin, long end) {
                for (long token = begin; token < end; token++) {
                    T *query = to_.qkv + token * qkv_width(), *key = this->key() + token * qkv_width();
                    norm(weights.query_norm, query, nullptr, run_.num_heads, run_.head_dim);
                    norm(weights.key_norm, key, nullptr, run_.num_kv_heads, run_.head_dim);
                }
            });
        call(kernels_.kv_write,
             KVWrite<T>{to_.qkv, qkv_width(), key(), value(), qkv_width(), qkv_width(), run_.positions, run_.slots,
                        weights.cos_sin, keys, values, run_.num_tokens, run_.num_heads, run_.num_kv_heads, run_.head_dim,
                        run_.block_size, weights.rotary_dim});
    }

    void attend(const LayerWeights& weights, const T* keys, const T* values) const {
        call(kernels_.attention,
             Attention<T>{to_.qkv, qkv_width(), keys, values, to_.attended, run_.num_heads * run_.head_dim,
                          run_.block_tables, run_.query_starts, run_.context_lens, run_.table_stride, run_.num_seqs,
                          run_.num_heads, run_.num_kv_heads, run_.head_dim, run_.block_size, weights.scale, weights.window});
    }
};

}  // namespace

template <typename T>
void run_layers(const Kernels& kernels, const std::vector<LayerWeights>& layers, const LayersRun<T>& run) {
    const Runner<T> runner(kernels, run, layers.front());
    for (std::size_t i = 0; i < layers.size(); i++) {
        runner.layer(layers[i], run.keys[i], run.values[i], i > 0);
        *run.progress = *run.progress + 1;
    }
}

template void run_layers(const Kernels&, const std::vector<LayerWeights>&, const LayersRun<bf16>&);
template void run_layers(const Kernels&, const std::vector<LayerWeights>&, const LayersRun<float>&);

}  // namespace quire
