// Layout of the paged KV cache: the offset of each element, the same for every instruction set.
//
// A cache holds blocks, a block its KV heads one after the other, and what a head keeps of a block is one run of
// block_size x head_dim elements, laid out so that a kernel reads whole registers and whole tiles from it:
//   keys    [head_dim / PAIR][block_size][PAIR]    a row is a dimension (a pair of them), its columns are tokens
//   values  [block_size / PAIR][head_dim][PAIR]    a row is a token (a pair of them), its columns are dimensions
// A matrix tile multiplies pairs of bfloat16: PAIR is 2 for bfloat16 and 1 for float.
#pragma once

#include "kernels.hpp"

namespace quire {

template <typename T>
constexpr long PAIR = 4 / sizeof(T);

constexpr long MAX_HEAD_DIM = 512;

template <typename T>
struct CacheLayout {
    long num_kv_heads, head_dim, block_size;

    long head_elements() const { return head_dim * block_size; }
    long head_in_cache(long block, long kv_head) const { return (block * num_kv_heads + kv_head) * head_elements(); }
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
