// Kernel interface of an instruction set. Every source of kernels is compiled once per instruction set, with ISA defined
// as the name of the namespace that it fills. Pointers, shapes and strides only: no torch, no Python.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "sampling.hpp"

namespace quire {

using bf16 = std::uint16_t;  // the upper half of a float

inline long rounded_up(long count, long multiple) { return (count + multiple - 1) / multiple * multiple; }

// Activation of a linear layer's sums: none, an activation, or silu, gelu or gelu_tanh of a gate times an up, of two sums
// (Shazeer 2020), or gpt-oss's of two sums, clamped.
enum class Activation {
    none, gelu_tanh, gelu, relu, relu2, quick_gelu, silu_and_mul, gelu_and_mul, gelu_tanh_and_mul, clamped_silu_and_mul
};

constexpr bool is_gated(Activation activation) { return activation >= Activation::silu_and_mul; }

// How the packed weight of a linear layer is stored, and how it is multiplied. dense: elements of T. int8_a8, int4_a8:
// unsigned integers of 8 or 4 bits times activations rounded to int8, with exact sums (quantized_linear.cpp). The others:
// unsigned integers, e4m3fn floats and elements of a codebook, which are expanded to T and then multiplied (packed_words.hpp).
enum class WeightFormat : std::uint8_t { dense, int8_a8, int4_a8, int8, int4, fp8, codebook4 };

// What is taken off the elements of a quantized weight, or off their multiples of the scale: one zero point, a zero point
// of each output and group, or a minimum of each.
enum class Offsets : std::uint8_t { zero_point, zero_points, minimums };

struct Quantization {
    long group_size = 0;  // inputs that share a scale, of the weight and of int8 activations; at most in_features
    Offsets offsets = Offsets::zero_point;
    long zero_point = 0;
    const std::int32_t* order = nullptr;  // input i of the packed weight is x's input order[i]; null: input i
    // Weights that are expanded:
    const std::int32_t* groups = nullptr;  // each input's group; null: groups of consecutive inputs
    const float* codebook = nullptr;       // 16 values
};

// B of outputs [first_output, first_output + num_outputs) of a linear layer (Hu et al. 2021), of the `rank` outputs of A from
// `first_input` on. Packed as float weights are, of words: a float, or a pair of bfloat16, the last of which has a zero where
// the rank is odd.
struct LowRankPart {
    const void* packed;
    long first_input, rank, first_output, num_outputs;
};

// What an adapter adds to the sums of its rows, `rows` [num_rows] in ascending order: B times `inner` [num_rows, rank], which the
// layer's kernel computes, A x rounded to T. A, `down` [rank, in_features], is dense and packed, of all parts together.
template <typename T>
struct LowRankRows {
    const std::int32_t* rows;
    long num_rows;
    const T* down;
    long rank;
    const LowRankPart* parts;
    long num_parts;
    T* inner;
};

// The adapters of a layer's rows, for one call of its kernel, and how far its threads have come with A x.
template <typename T>
struct LowRank {
    const LowRankRows<T>* adapters;
    long num_adapters;
    // Set by the kernel: the rows as it multiplies them, and pieces of A x, the next one to take and those not finished.
    const void* x = nullptr;
    long x_stride = 0;
    std::atomic<long> next_piece{0}, num_left{0};

    const LowRankRows<T>* begin() const { return adapters; }
    const LowRankRows<T>* end() const { return adapters + num_adapters; }
};

// A linear layer: out = activation(x W^T + addend + bias), x [num_rows, in_features] and out [num_rows, out_features], rows
// `stride` elements apart. Packed weights as packing.hpp says; those of a gated activation are two layers, a
// strip of gates and a strip of ups in turn. bias is float32 or null, of a gated one the gates' and then the ups'. The addend
// is float32 [num_rows, as many as bias has] or null, and what adapters add to their rows, or null. A format that is not
// served is a std::invalid_argument.
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
    Activation activation;
    WeightFormat format = WeightFormat::dense;
    Quantization quantization = {};
    const float* addend = nullptr;
    long addend_stride = 0;
    LowRank<T>* low_rank = nullptr;

    bool has_addends() const { return addend || low_rank; }
    bool is_gated() const { return quire::is_gated(activation); }
};

// out = inner B^T, float32 [num_rows, num_outputs]: what a part of an adapter adds to the sums of a linear layer, to the bit.
// inner [num_rows, rank], and `packed` as in LowRankPart.
template <typename T>
struct LowRankProduct {
    const T* inner;
    long num_rows, rank, inner_stride;
    const T* packed;
    long num_outputs;
    float* out;
    long out_stride;
};

// What a layer keeps between calls, as in Linear.
struct LinearWeights {
    const void* packed;
    const float* bias;
    long in_features, out_features;
    Activation activation;
    WeightFormat format;
    Quantization quantization;
};

// A linear layer of each head: out[head] = W[head] x[head], and behind a head's outputs the `passed` elements behind its inputs.
// x [num_rows, heads, in_features + passed] and out [num_rows, heads, out_features + passed], rows `stride` elements apart, in
// different memory. The layers are of one size.
template <typename T>
struct HeadLinear {
    const T* x;
    long num_rows, x_stride;
    T* out;
    long out_stride, passed;
    const std::vector<LinearWeights>& heads;
};

// An exchange between the ranks of tensor parallelism: each has computed some columns, own [num_rows, its columns], and gets
// all, rows [num_rows, all columns]; both without gaps. gather null: one rank has all columns.
struct ColumnExchange {
    void (*gather)(void* context, const void* own, void* rows, long num_rows, long element_bytes);
    void* context;

    void operator()(const void* own, void* rows, long num_rows, long element_bytes) const {
        gather(context, own, rows, num_rows, element_bytes);
    }
};

// A sum over the ranks of tensor parallelism: each has partial sums, own [num_rows, width], and gets those of all in the
// order of the ranks, rounded to float or bf16 once; both without gaps. sum null: the sums are whole.
struct SumExchange {
    void (*sum)(void* context, const float* own, void* out, long num_rows, bool out_is_float);
    void* context;

    void operator()(const float* own, void* out, long num_rows, bool out_is_float) const {
        sum(context, own, out, num_rows, out_is_float);
    }
};

// The choice of a row's experts and their weights: `Routing` of kernels/layers.py says what each field means. bias: of each
// expert that may be chosen, or null; scales: of each one's weight, or null.
struct Routing {
    long num_chosen;
    bool is_normalized, has_shared, is_sigmoid, is_shared_scored;
    float factor;
    long num_groups, num_kept_groups, num_group_keys;
    const float *bias, *scales;

    bool is_by_score() const { return !is_sigmoid && !bias && num_groups == 1; }
};

// A mixture of experts (Shazeer et al. 2017). The router has one score for each expert, but for a shared one that is not
// scored, which is the last. The inner width of all others is the same.
// A rank has some outputs of each layer but the router's: `in` makes some of the inner columns, which the ranks exchange. Or
// `out` has these inputs alone, and the ranks add up their parts of a row's results.
struct ExpertWeights {
    LinearWeights router;
    std::vector<LinearWeights> in, out;  // each expert: to its inner width, activated, and back
    Routing routing;
    ColumnExchange routed_exchange, shared_exchange;  // inner columns of the chosen experts, and of the shared one
    SumExchange result_exchange;                      // results of all rows
};

// out = sum of the results of a row's experts times their weights, in float32, the highest score first and the shared
// expert last, rounded to T once; of a rank, its columns of it. Of equal scores that of the lower number counts as higher.
// Rows `stride` elements apart, those of a sum over ranks without gaps; out may be x's memory. scored [num_rows, width]: what
// the router scores, which may be x.
template <typename T>
struct Experts {
    const T* x;
    long num_rows, x_stride;
    const T* scored;
    long scored_stride;
    T* out;
    long out_stride;
    const ExpertWeights& weights;
};

// summed = x + residual (x itself where residual is null: summed is not written); out = norm(summed) * weight + bias.
// x rows are x_stride elements apart; everything else is [num_rows, width] without gaps, weight and bias [width], or
// [num_heads, width] for rows that are heads of tokens; bias null for none, and for RMSNorm. summed may be residual's
// memory, and out may be x's where x has no gaps. An RMSNorm rounds to T before it applies the weight; with is_wide it
// multiplies with weight + offset in float32 and rounds once.
template <typename T>
struct Norm {
    const T *x, *residual;
    T *summed, *out;
    long num_rows, x_stride;
    const T *weight, *bias;
    long width;
    float eps;
    bool is_wide = false;
    float offset = 0;
    long num_heads = 1;  // row i has weights and bias i % num_heads

    long parameters_of(long row) const { return row % num_heads * width; }  // where they begin
};

// out = x * factor, rounded to T, + y, where y is not null, clipped to [-limit, limit] if limit is above 0; all without
// gaps. out may be x's or y's memory.
template <typename T>
struct Sum {
    const T *x, *y;
    T* out;
    long num_elements;
    float factor, limit = 0;
};

// out[i] = table[rows[i]], plus more[more_rows[i]] where more is not null: embeddings, learned positions. Rows of `width`
// elements without gaps. A row outside of its table is a std::out_of_range.
template <typename T>
struct Embedding {
    const T* table;
    long num_rows;
    const std::int64_t* rows;
    const T* more;
    long num_more_rows;
    const std::int64_t* more_rows;
    T* out;
    long num_tokens, width;
};

// How the paged cache stores its elements. same: as T. Else in 8 bits: an element stands for itself times a scale, which
// is stored for each token and KV head, or is one for a layer's keys and one for its values.
enum class KVFormat : std::uint8_t { same, int8_scaled, e4m3_scaled, e4m3 };

// A layer's part of the cache; values null: they are the first dimensions of keys. The scales are those of e4m3; others have 1.
struct LayerCache {
    void *keys, *values;
    KVFormat format;
    float key_scale, value_scale;

    bool has_scales() const { return format == KVFormat::int8_scaled || format == KVFormat::e4m3_scaled; }
};

struct Heads {
    long num_heads, num_kv_heads, head_dim;
};

// Attention of a layer: the fields of AttentionSpec (quire/kernels/paged_attention.py) but for the cache's scales, in their
// order. window: tokens that a token sees, itself and those before it; 0: all. softcap: scores, times the scale, become
// softcap * tanh(score / softcap); 0: they stay. sinks [num_heads]: the score of one more key, with a value of zeros, for
// each query head; null: none. A token that is not causal sees as many tokens after itself as before, if its context has them.
// value_dim: a value is the first so many dimensions of its key, and the cache has no others; 0: values are in the cache, as
// wide as keys.
struct AttentionParameters : Heads {
    float scale;
    long window;
    float softcap;
    const float* sinks;
    bool is_causal;
    long value_dim;

    long output_dim() const { return value_dim ? value_dim : head_dim; }
    long num_ahead() const { return is_causal ? 0 : window ? window - 1 : 1L << 31; }  // beyond every context
};

// Attention of a flat batch over the paged cache (cache_layout.hpp). query [num_tokens, num_heads, head_dim], out
// [num_tokens, num_heads, output_dim]: a token's heads have no gaps, tokens `stride` elements apart. Sequence s owns the tokens from
// query_starts[s] to query_starts[s + 1], the last ones of a context of context_lens[s] tokens; its blocks are row s of
// block_tables. seen_ends [num_tokens]: one past the last position that each token sees, within its context, in place of its own
// and num_ahead; within a sequence none is below that of the token before it. null: by position.
template <typename T>
struct Attention : AttentionParameters {
    const T* query;
    long query_stride;
    LayerCache cache;
    T* out;
    long out_stride;
    const std::int32_t *block_tables, *query_starts, *context_lens, *seen_ends;
    long table_stride, num_seqs, block_size;
};

// Rotation of a layer's queries and keys by their positions. cos_sin [positions, rotary_dim] as in `rotary_table`; null:
// nothing is turned. Dimensions from rotary_start on are turned; pairs of them are (i, rotary_dim / 2 + i), or (2i, 2i + 1) if
// is_interleaved.
struct RotaryParameters : Heads {
    const float* cos_sin;
    long rotary_dim;
    bool is_interleaved;
    long rotary_start;
};

// Turn queries (in place) and keys, write keys and values to their slots of the paged cache. query, key and value
// [num_tokens, their heads, head_dim], tokens `stride` elements apart; query may be null where nothing is turned,
// value where the cache has none. A slot of -1: nothing is written; slots null: nothing at all, and keys are not read.
template <typename T>
struct KVWrite : RotaryParameters {
    T* query;
    long query_stride;
    const T *key, *value;
    long key_stride, value_stride;
    const std::int64_t *positions, *slots;
    LayerCache cache;
    long num_tokens, block_size;
};

// A causal convolution of each channel over the last `taps` tokens, gated on both sides (LFM2): x [num_tokens, 3 * width] has
// gates g, gates h and values v in turn; out = h * (bias + sum over taps of weight[tap] * u of a token), u = g * v rounded to T,
// the oldest token first; before a sequence there are zeros. weight [taps, width]; bias null for none. Rows `stride` elements
// apart. tails [num_blocks, length, width], or [num_blocks, block_size, width] if length is more, has u of the last tokens of
// each block of the paged cache, at their offset % length: tokens before the step are read from it, those of the step are
// written, but where the slot is -1.
template <typename T>
struct ShortConv {
    const T* x;
    long x_stride;
    T* out;
    long out_stride;
    const float *weight, *bias;
    long taps, width;
    T* tails;
    long length;
    const std::int64_t *positions, *slots;
    const std::int32_t *block_tables, *query_starts;
    long table_stride, num_seqs, block_size;
};

// A gated delta net's sizes and weights: DeltaNetSpec (quire/kernels/delta_net.py). conv_weight [taps, channels], rate
// [num_value_heads], rate_bias [num_value_heads] or, with a decay of each row of S, [num_value_heads, key_dim], norm_weight
// [value_dim]; length: tokens in a slot's ring. max_share: of a token's value in S.
struct DeltaNetWeights {
    long num_key_heads, num_value_heads, key_dim, value_dim;
    bool has_row_decays;
    long taps, length;
    const float *conv_weight, *rate, *rate_bias, *norm_weight;
    float norm_eps, max_share;
    bool is_tiled;  // value head i reads key head i % num_key_heads, else i / (num_value_heads / num_key_heads)
    bool is_gate_sigmoid;  // results are times sigmoids of gates, not times silu of them
};

// x [num_tokens, channels] of queries, keys and values, gates [num_tokens, width], shares [num_tokens, num_value_heads],
// decays like them or [num_tokens, num_value_heads * key_dim], out [num_tokens, width], rows `stride` elements apart.
// states: the layer's part of all slots, StateShape.num_bytes each. context_lens and query_starts as in Attention; behind
// them the arrays of StateRows, [num_seqs] but for snapshots [num_seqs, 2, 2].
template <typename T>
struct DeltaNet : DeltaNetWeights {
    const T* x;
    long x_stride;
    const T* gates;
    long gates_stride;
    const T* shares;
    long shares_stride;
    const T* decays;
    long decays_stride;
    T* out;
    long out_stride;
    void* states;
    const std::int32_t *context_lens, *query_starts, *read, *committed, *write, *commit_to, *snapshots;
    long num_seqs;
};

// A norm over groups of columns of which each rank of tensor parallelism has some: NormSpan (quire/kernels/mamba.py).
struct NormSpan {
    SumExchange sum;  // adds the squares of rows, [num_rows, num_groups]; sum null: this rank has whole groups
    long num_groups, first_group, width;
};

// A Mamba-2's sizes and weights: MambaSpec (quire/kernels/mamba.py). Groups are key heads; conv_weight [taps, channels], conv_bias
// [channels] or null, rate, rate_bias and skip [num_value_heads], norm_weight [num_value_heads * value_dim], or null for no norm.
struct MambaWeights {
    long num_key_heads, num_value_heads, key_dim, value_dim, taps, length;
    const float *conv_weight, *conv_bias, *rate, *rate_bias, *skip, *norm_weight;
    float norm_eps, gate_factor, rate_factor;  // factors on inputs
    bool is_norm_first;  // the gate comes behind the norm
    NormSpan span;
};

// x [num_tokens, width + channels + num_value_heads] of gates, values, keys, queries and rates, the rest as in DeltaNet.
template <typename T>
struct Mamba : MambaWeights {
    const T* x;
    long x_stride;
    T* out;
    long out_stride;
    void* states;
    const std::int32_t *context_lens, *query_starts, *read, *committed, *write, *commit_to, *snapshots;
    long num_seqs;
};

// x = x * sigmoid(gate), or x * gate, [num_rows, width] each, rows `stride` elements apart; the sigmoid is rounded to T.
template <typename T>
struct Gate {
    T* x;
    long x_stride;
    const T* gate;
    long gate_stride, num_rows, width;
    bool is_sigmoid;
};

template <template <typename> class Op>
struct ForBoth {
    void (*bf16)(const Op<quire::bf16>&);
    void (*float32)(const Op<float>&);
};

struct Kernels {
    ForBoth<Linear> linear;
    ForBoth<Norm> rms_norm;
    ForBoth<Attention> attention;
    ForBoth<KVWrite> kv_write;
    void (*choose_tokens)(const TokenChoice&);
    void (*mask_logits)(const TokenMasks&);
    void (*top_logprobs)(const TopLogprobs&);
    ForBoth<Norm> layer_norm;
    ForBoth<Embedding> embedding;
    ForBoth<Sum> sum;
    ForBoth<Experts> experts;
    ForBoth<LowRankProduct> low_rank_product;
    ForBoth<HeadLinear> head_linear;
    ForBoth<ShortConv> short_conv;
    ForBoth<DeltaNet> delta_net;
    ForBoth<Gate> gate;
    ForBoth<Mamba> mamba;
};

namespace portable { extern const Kernels kernels; }
namespace avx2 { extern const Kernels kernels; }
namespace avx512 { extern const Kernels kernels; }
namespace avx512_vnni { extern const Kernels kernels; }
namespace avx512_bf16 { extern const Kernels kernels; }
namespace amx { extern const Kernels kernels; }

extern const Kernels* chosen;  // the instruction set in use

// Names of the instruction sets that were built and can run here, the best first: amx, avx512_bf16, avx512_vnni, avx512,
// avx2, portable; on Intel's CPUs avx512_vnni comes before avx512_bf16, as `vdpbf16ps` has half the rate of float32 there.
std::vector<std::string> usable_isas();

// Choose one of them, for the whole process; std::invalid_argument for any other.
void use_isa(const std::string& name);

// Copy block src[i] of each source over block dst[i] of its destination: within the caches of all layers at once, or from
// one pool's to another's (Kwon et al. 2023, sections 4.5 and 5.1). Caches are addresses; no block is read and written.
void swap_blocks(const std::vector<std::uintptr_t>& sources, const std::vector<std::uintptr_t>& destinations,
                 long block_bytes, const std::int64_t* src, const std::int64_t* dst, long num_copies);

}  // namespace quire
