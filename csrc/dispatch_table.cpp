#include "kernels.hpp"

namespace quire::ISA {

template <typename T>
void linear(const Linear<T>&);
template <typename T>
void rms_norm(const Norm<T>&);
template <typename T>
void attention(const Attention<T>&);
template <typename T>
void kv_write(const KVWrite<T>&);
void choose_tokens(const TokenChoice&);
void mask_logits(const TokenMasks&);
void top_logprobs(const TopLogprobs&);
template <typename T>
void layer_norm(const Norm<T>&);
template <typename T>
void embedding(const Embedding<T>&);
template <typename T>
void sum(const Sum<T>&);
template <typename T>
void experts(const Experts<T>&);
template <typename T>
void low_rank_product(const LowRankProduct<T>&);
template <typename T>
void head_linear(const HeadLinear<T>&);
template <typename T>
void short_conv(const ShortConv<T>&);
template <typename T>
void delta_net(const DeltaNet<T>&);
template <typename T>
void gate(const Gate<T>&);
template <typename T>
void mamba(const Mamba<T>&);

const Kernels kernels = {
    {linear<bf16>, linear<float>},
    {rms_norm<bf16>, rms_norm<float>},
    {attention<bf16>, attention<float>},
    {kv_write<bf16>, kv_write<float>},
    choose_tokens,
    mask_logits,
    top_logprobs,
    {layer_norm<bf16>, layer_norm<float>},
    {embedding<bf16>, embedding<float>},
    {sum<bf16>, sum<float>},
    {experts<bf16>, experts<float>},
    {low_rank_product<bf16>, low_rank_product<float>},
    {head_linear<bf16>, head_linear<float>},
    {short_conv<bf16>, short_conv<float>},
    {delta_net<bf16>, delta_net<float>},
    {gate<bf16>, gate<float>},
    {mamba<bf16>, mamba<float>},
};

}  // namespace quire::ISA
