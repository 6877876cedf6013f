// Layout of a cache of latents in 8 bits, the same for every instruction set.
//
// A block holds its KV heads one after the other. A head's run of it is the latents' elements, [latent_dim][block_size], what is
// rotated beside them in bfloat16, pairs of dimensions as in a cache of 16 bits, [(head_dim - latent_dim) / 2][block_size][2],
// and scales, float [groups][block_size]: one for each token and GROUP_DIMS dimensions of its latent. Where one scale serves
// the layer, all is elements, [head_dim][block_size].
#pragma once

#include "cache_layout.hpp"

namespace quire {

struct LatentLayout {
    static constexpr long GROUP_DIMS = 128;

    long num_kv_heads, head_dim, latent_dim, block_size;
    bool has_scales;

    long num_groups() const { return has_scales ? (latent_dim + GROUP_DIMS - 1) / GROUP_DIMS : 0; }
    long byte_dims() const { return has_scales ? latent_dim : head_dim; }  // dimensions that are stored in 8 bits
    long head_bytes() const { return scale(0, num_groups()); }
    char* head(void* cache, long block, long kv_head) const {
        return static_cast<char*>(cache) + (block * num_kv_heads + kv_head) * head_bytes();
    }
    const char* head(const void* cache, long block, long kv_head) const { return head(const_cast<void*>(cache), block, kv_head); }

    // Bytes from a head's run on; dim: from the first rotated one on, an even number.
    long element(long token, long dim) const { return dim * block_size + token; }
    long rotated(long token, long dim) const {
        return byte_dims() * block_size + (dim * block_size + 2 * token) * static_cast<long>(sizeof(bf16));
    }
    long scale(long token, long group) const {
        return rotated(0, head_dim - byte_dims()) + (group * block_size + token) * static_cast<long>(sizeof(float));
    }
};

}  // namespace quire
