// Layout of the paged KV cache: the offset of each element, the same for every instruction set.
//
// A cache holds blocks, a block its KV heads one after the other, and what a head keeps of a block is one run of
// block_size x head_dim elements, laid out so that a kernel reads whole registers and whole tiles from it:
//   keys    [head_dim / PAIR][block_size][PAIR]    a row is a dimension (a pair of them), its columns are tokens
//   values  [block_size / PAIR][head_dim][PAIR]    a row is a token (a pair of them), its columns are dimensions
// A matrix tile multiplies pairs of bfloat16: PAIR is 2 for bfloat16 and 1 for float. Elements of 8 bits are not paired:
// they are widened as they are read. Behind them stand the scales of the block's tokens, float [block_size], if the cache
// has scales. A cache of latents has keys alone: the first dimensions of a key are its value.
#pragma once

#include "kernels.hpp"

namespace quire {

enum class E4M3 : std::uint8_t {};  // 8 bits of floating point: a sign, 4 bits of exponent, 3 of mantissa

template <typename T>
constexpr long PAIR = sizeof(T) == 2 ? 2 : 1;

constexpr long MAX_HEAD_DIM = 576;  // a latent of 512 dimensions and the rotary part beside it (DeepSeek-AI 2024)

template <typename T>
struct CacheLayout {
    long num_kv_heads, head_dim, block_size;
    bool has_scales;

    long head_elements() const { return head_dim * block_size; }
    long head_bytes() const { return head_elements() * sizeof(T) + (has_scales ? block_size * sizeof(float) : 0); }
    T* head(void* cache, long block, long kv_head) const {
        return reinterpret_cast<T*>(static_cast<char*>(cache) + (block * num_kv_heads + kv_head) * head_bytes());
    }
    const T* head(const void* cache, long block, long kv_head) const { return head(const_cast<void*>(cache), block, kv_head); }
    long key_stride() const { return block_size * PAIR<T>; }    // from row to row
    long value_stride() const { return head_dim * PAIR<T>; }

    // Within a head's run.
    long key_element(long token, long dim) const {
        return dim / PAIR<T> * key_stride() + token * PAIR<T> + dim % PAIR<T>;
    }
    long value_element(long token, long dim) const {
        return token / PAIR<T> * value_stride() + dim * PAIR<T> + token % PAIR<T>;
    }
};

}  // namespace quire
