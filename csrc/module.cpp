// The Python module: addresses, shapes and strides in, nothing out. quire/kernels/cpu checks what is passed here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "block_copy.hpp"
#include "decoder_layers_module.hpp"
#include "isa.hpp"
#include "kernels.hpp"
#include "packing.hpp"
#include "sampling.hpp"

namespace nb = nanobind;
using Address = std::uintptr_t;

namespace quire {

const Kernels* chosen = &portable::kernels;

namespace {

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void use_isa(const std::string& name) {
    for (const std::string& usable : usable_isas())
        if (usable == name) {
#ifdef HAS_X86_KERNELS
            chosen = name == "amx" ? &amx::kernels : name == "avx512" ? &avx512::kernels : &portable::kernels;
#endif
            return;
        }
    throw std::invalid_argument("the instruction set " + name + " was not built, or this CPU does not have it");
}

template <typename T>
void pack(Address weight, long stride, long out_features, long in_features, Address packed, long every) {
    pack_linear(at<const T>(weight), stride, out_features, in_features, at<T>(packed), every);
}

template <typename T>
bool are_finite(Address values, long count) {
    return all_finite(at<const T>(values), count);
}

// The chosen instruction set's kernel for bf16 or float.
template <template <typename> class Op, typename T>
auto pick(const ForBoth<Op>& both, const T*) {
    if constexpr (sizeof(T) == sizeof(bf16))
        return both.bf16;
    else
        return both.float32;
}

template <typename T>
void run_linear(Address x, long num_rows, long in_features, long x_stride, Address packed, long out_features, Address bias,
                Address out, long out_stride, bool out_is_float, Activation activation) {
    pick(chosen->linear, (T*)nullptr)({at<const T>(x), num_rows, in_features, x_stride, at<const T>(packed), out_features,
                                       at<const float>(bias), at<void>(out), out_stride, out_is_float,
                                       activation});
}

template <typename T, ForBoth<Norm> Kernels::*norm>
void run_norm(Address x, Address residual, Address summed, Address out, long num_rows, long x_stride, Address weight,
              Address bias, long width, float eps) {
    pick(chosen->*norm, (T*)nullptr)({at<const T>(x), at<const T>(residual), at<T>(summed), at<T>(out), num_rows, x_stride,
                                      at<const T>(weight), at<const T>(bias), width, eps});
}

void check_rows(const std::int64_t* rows, long count, long num_rows) {
    for (long i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= num_rows)
            throw std::out_of_range("row " + std::to_string(rows[i]) + " of a table of " + std::to_string(num_rows));
}

template <typename T>
void run_embedding(Address table, long num_rows, Address rows, Address more, long num_more_rows, Address more_rows,
                   Address out, long num_tokens, long width) {
    using Ints = const std::int64_t;
    check_rows(at<Ints>(rows), num_tokens, num_rows);
    if (more) check_rows(at<Ints>(more_rows), num_tokens, num_more_rows);
    pick(chosen->embedding, (T*)nullptr)({at<const T>(table), at<Ints>(rows), at<const T>(more), at<Ints>(more_rows),
                                          at<T>(out), num_tokens, width});
}

template <typename T>
void run_attention(Address query, long query_stride, Address key_cache, Address value_cache, Address out, long out_stride,
                   Address block_tables, Address query_starts, Address context_lens, long table_stride, long num_seqs,
                   long num_heads, long num_kv_heads, long head_dim, long block_size, float scale, long window) {
    using Ints = const std::int32_t;
    pick(chosen->attention, (T*)nullptr)({at<const T>(query), query_stride, at<const T>(key_cache), at<const T>(value_cache),
                                          at<T>(out), out_stride, at<Ints>(block_tables), at<Ints>(query_starts),
                                          at<Ints>(context_lens), table_stride, num_seqs, num_heads, num_kv_heads,
                                          head_dim, block_size, scale, window});
}

template <typename T>
void run_kv_write(Address query, long query_stride, Address key, Address value, long key_stride, long value_stride,
                  Address positions, Address slots, Address cos_sin, Address key_cache, Address value_cache,
                  long num_tokens, long num_heads, long num_kv_heads, long head_dim, long block_size, long rotary_dim) {
    using Ints = const std::int64_t;
    pick(chosen->kv_write, (T*)nullptr)({at<T>(query), query_stride, at<const T>(key), at<const T>(value), key_stride,
                                         value_stride, at<Ints>(positions), at<Ints>(slots), at<const float>(cos_sin),
                                         at<T>(key_cache), at<T>(value_cache), num_tokens, num_heads, num_kv_heads,
                                         head_dim, block_size, rotary_dim});
}

std::vector<char*> all_at(const std::vector<Address>& caches) {
    std::vector<char*> addresses;
    for (Address cache : caches) addresses.push_back(at<char>(cache));
    return addresses;
}

void run_copy_blocks(const std::vector<Address>& caches, long block_bytes, Address src, Address dst, long num_copies) {
    using Ints = const std::int64_t;
    copy_blocks(all_at(caches), block_bytes, at<Ints>(src), at<Ints>(dst), num_copies);
}

void run_swap_blocks(const std::vector<Address>& sources, const std::vector<Address>& destinations, long block_bytes,
                     Address src, Address dst, long num_copies) {
    using Ints = const std::int64_t;
    swap_blocks(all_at(sources), all_at(destinations), block_bytes, at<Ints>(src), at<Ints>(dst), num_copies);
}

void run_choose_tokens(Address logits, long num_rows, long vocab_size, long stride, Address temperatures,
                       Address log_min_ps, Address top_ks, Address top_ps, Address uniforms, Address tokens) {
    chosen->choose_tokens({{at<const float>(logits), num_rows, vocab_size, stride}, at<const float>(temperatures),
                           at<const float>(log_min_ps), at<const std::int32_t>(top_ks), at<const double>(top_ps),
                           at<const double>(uniforms), at<std::int64_t>(tokens)});
}

void run_top_logprobs(Address logits, long vocab_size, long stride, long num_rows, Address rows, Address tokens,
                      Address counts, long width, Address ids, Address logprobs, Address ranks) {
    using Ints = const std::int64_t;
    chosen->top_logprobs({{at<const float>(logits), num_rows, vocab_size, stride}, num_rows, at<Ints>(rows),
                          at<Ints>(tokens), at<Ints>(counts), width, at<std::int64_t>(ids), at<float>(logprobs),
                          at<std::int64_t>(ranks)});
}

void run_penalize(Address logits, long stride, long vocab_size, Address token_ids, long token_stride, long num_entries,
                  Address logit_rows, Address token_rows, Address num_tokens, Address num_prompt_tokens,
                  Address repetition, Address presence, Address frequency) {
    using Ints = const std::int64_t;
    penalize({at<float>(logits), stride, vocab_size, at<const std::int32_t>(token_ids), token_stride, num_entries,
              at<Ints>(logit_rows), at<Ints>(token_rows), at<Ints>(num_tokens), at<Ints>(num_prompt_tokens),
              at<const float>(repetition), at<const float>(presence), at<const float>(frequency)});
}

void run_draw_uniforms(Address seeds, Address indices, long count, Address numbers) {
    draw_uniforms(at<const std::uint64_t>(seeds), at<const std::int64_t>(indices), count, at<double>(numbers));
}

}  // namespace
}  // namespace quire

NB_MODULE(_kernels, module) {
    using namespace quire;
    nb::enum_<Activation>(module, "Activation")
        .value("none", Activation::none)
        .value("silu_and_mul", Activation::silu_and_mul)
        .value("gelu_tanh", Activation::gelu_tanh)
        .value("gelu", Activation::gelu)
        .value("relu", Activation::relu);
    bind_decoder_layers(module);
    module.def("usable_isas", usable_isas);
    module.def("use_isa", use_isa);
    module.def("packed_size_bf16", [](long outs, long ins) { return packed_size(outs, ins, (const bf16*)nullptr); });
    module.def("packed_size_float", [](long outs, long ins) { return packed_size(outs, ins, (const float*)nullptr); });
    module.def("pack_bf16", pack<bf16>, nb::call_guard<nb::gil_scoped_release>());
    module.def("pack_float", pack<float>, nb::call_guard<nb::gil_scoped_release>());
    module.def("all_finite_bf16", are_finite<bf16>, nb::call_guard<nb::gil_scoped_release>());
    module.def("all_finite_float", are_finite<float>, nb::call_guard<nb::gil_scoped_release>());
    module.def("linear_bf16", run_linear<bf16>);
    module.def("linear_float", run_linear<float>);
    module.def("rms_norm_bf16", run_norm<bf16, &Kernels::rms_norm>);
    module.def("rms_norm_float", run_norm<float, &Kernels::rms_norm>);
    module.def("layer_norm_bf16", run_norm<bf16, &Kernels::layer_norm>);
    module.def("layer_norm_float", run_norm<float, &Kernels::layer_norm>);
    module.def("embedding_bf16", run_embedding<bf16>);
    module.def("embedding_float", run_embedding<float>);
    module.def("attention_bf16", run_attention<bf16>);
    module.def("attention_float", run_attention<float>);
    module.def("kv_write_bf16", run_kv_write<bf16>);
    module.def("kv_write_float", run_kv_write<float>);
    module.def("copy_blocks", run_copy_blocks);
    module.def("swap_blocks", run_swap_blocks);
    module.def("choose_tokens", run_choose_tokens);
    module.def("top_logprobs", run_top_logprobs);
    module.def("penalize", run_penalize);
    module.def("draw_uniforms", run_draw_uniforms);
}
