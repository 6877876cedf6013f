// The part of the Python module that runs all layers in one call.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include "decoder_layers.hpp"
#include "decoder_layers_module.hpp"

namespace nb = nanobind;
using Address = std::uintptr_t;

namespace quire {
namespace {

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

// Layers and the caches that they use, kept between the steps.
template <typename T>
class DecoderLayers {
public:
    DecoderLayers(std::vector<LayerWeights> layers, long width, long num_heads, long num_kv_heads, long head_dim)
        : layers_(std::move(layers)), width_(width), num_heads_(num_heads), num_kv_heads_(num_kv_heads), head_dim_(head_dim) {}

    void use_caches(const std::vector<Address>& keys, const std::vector<Address>& values, long block_size) {
        keys_.clear();
        values_.clear();
        for (Address key : keys) keys_.push_back(at<T>(key));
        for (Address value : values) values_.push_back(at<T>(value));
        block_size_ = block_size;
    }

    void run(Address x, Address residual, long num_tokens, Address positions, Address slots, Address block_tables,
             Address query_starts, Address context_lens, long table_stride, long num_seqs, Address progress) const {
        run_layers<T>(*chosen, layers_,
                      {at<T>(x), at<T>(residual), num_tokens, width_, num_heads_, num_kv_heads_, head_dim_, block_size_,
                       at<const std::int64_t>(positions), at<const std::int64_t>(slots), at<const std::int32_t>(block_tables),
                       at<const std::int32_t>(query_starts), at<const std::int32_t>(context_lens), table_stride, num_seqs,
                       keys_, values_, at<std::int64_t>(progress)});
    }

private:
    std::vector<LayerWeights> layers_;
    long width_, num_heads_, num_kv_heads_, head_dim_, block_size_ = 0;
    std::vector<T*> keys_, values_;
};

template <typename T>
void bind(nb::module_& module, const char* name) {
    using Layers = DecoderLayers<T>;
    nb::class_<Layers>(module, name)
        .def(nb::init<std::vector<LayerWeights>, long, long, long, long>())
        .def("use_caches", &Layers::use_caches)
        .def("run", &Layers::run, nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace

void bind_decoder_layers(nb::module_& module) {
    nb::class_<NormWeights>(module, "NormWeights")
        .def("__init__", [](NormWeights* self, Address weight, Address bias, float eps, bool is_layer_norm) {
            new (self) NormWeights{at<void>(weight), at<void>(bias), eps, is_layer_norm};
        });
    nb::class_<LinearWeights>(module, "LinearWeights")
        .def("__init__", [](LinearWeights* self, Address packed, Address bias, long in_features, long out_features,
                            Activation activation) {
            new (self) LinearWeights{at<void>(packed), at<float>(bias), in_features, out_features, activation};
        });
    nb::class_<LayerWeights>(module, "LayerWeights")
        .def("__init__", [](LayerWeights* self, const NormWeights& attention_norm, const NormWeights& feed_forward_norm,
                            const NormWeights& query_norm, const NormWeights& key_norm, const LinearWeights& qkv,
                            const LinearWeights& out, const LinearWeights& up, const LinearWeights& down, Address cos_sin,
                            long rotary_dim, float scale, long window) {
            new (self) LayerWeights{attention_norm, feed_forward_norm, query_norm, key_norm,   qkv,   out,
                                    up,             down,              at<float>(cos_sin), rotary_dim, scale, window};
        });
    bind<bf16>(module, "DecoderLayers_bf16");
    bind<float>(module, "DecoderLayers_float");
}

}  // namespace quire
