// The view of a partition of latents in 8 bits: keys as the numbers that they stand for, values transposed from them.
//
// Scales belong to groups of dimensions, so that they cannot be multiplied onto scores and weights. A thread multiplies them
// onto the elements as it widens these into its scratch, once for all rows of a tile, and rounds to the model's dtype: a
// cache of 16 bits would hold these numbers as well. Products, and values, are then those of such a cache.
#pragma once

#include "attention_view.hpp"
#include "latent_layout.hpp"

namespace quire::ISA {

template <typename S>
struct Latent {};  // a cache of latents, in elements of S

template <typename T, typename S>
struct ReadAs<T, Latent<S>> {
    using Element = T;
};

// Numbers of two rows in turn, rounded.
inline Words rounded_pairs(Floats first, Floats second) {
#ifdef __AVX512BF16__
    alignas(64) static constexpr std::uint16_t in_turn[2 * LANES] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                                     8,  24, 9,  25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
    const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
    return (Words)_mm512_permutexvar_epi16(_mm512_load_si512(in_turn), halves);
#else
    return rounded_bits(first) | rounded_bits(second) << 16;
#endif
}

template <typename T, typename S>
class CacheView<T, Latent<S>> : public PartitionView<T> {
public:
    using E = T;
    static constexpr bool IS_QUANTIZED = false;  // as the products see it
    static constexpr long STRIDE = GROUP * PAIR<T>;  // numbers from one row of keys to the next
    static constexpr const float *key_scales = nullptr, *value_scales = nullptr;

    // The rows of a key group are padded with zeros to a multiple of `key_rows`.
    CacheView(const Attention<T>& op, long key_rows, T* scratch)
        : layout_{op.num_kv_heads, op.head_dim, op.value_dim, op.block_size, op.cache.has_scales()}, cache_(op.cache),
          key_rows_(rounded_up(op.head_dim / PAIR<T>, key_rows)), scratch_(scratch) {}

    void look_at_keys(const TokenRange& live) {
        T* scratch = scratch_;
        this->view_keys(live, [&](long token) { return key_rows_of(live, token, scratch); });
    }

    template <typename Meanwhile>
    void look_at_values(const TokenRange& live, Meanwhile& meanwhile) {
        T* scratch = scratch_ + this->scratch_elements(layout_.head_dim) / 2;
        this->view_values(live, [&](long token) { return this->transposed_keys(live, token, layout_.latent_dim, scratch); }, meanwhile);
    }

    Prefetch<LatentLayout> prefetch_keys(const TokenRange& live, long calls) const { return {layout_, cache_.keys, live, calls}; }
    Prefetch<LatentLayout> prefetch_values(const TokenRange& live, long) const { return {layout_, cache_.keys, live, 0}; }

private:
    LatentLayout layout_;
    const LayerCache& cache_;
    long key_rows_;
    T* scratch_;

    Rows<T> key_rows_of(const TokenRange& live, long token, T*& scratch) const {
        const long rows = layout_.head_dim / PAIR<T>, width = std::min(GROUP, layout_.block_size);
        T* out = scratch;
        scratch += key_rows_ * STRIDE;
        for (long i = 0; i < GROUP; i += width) {
            const long first = token + i;
            if (first >= live.end || first + width <= live.begin) continue;
            const char* head = layout_.head(cache_.keys, live.table[first / layout_.block_size], live.kv_head);
            widen_elements(head, first % layout_.block_size, width, out + i * PAIR<T>);
            widen_rotated(head, first % layout_.block_size, width, out + layout_.byte_dims() / PAIR<T> * STRIDE + i * PAIR<T>);
        }
        std::memset(out + rows * STRIDE, 0, (key_rows_ - rows) * STRIDE * sizeof(T));
        return {out, STRIDE};
    }

    // The elements of `width` tokens of a block, from the one at `offset` on, PAIR dimensions in a row.
    void widen_elements(const char* head, long offset, long width, T* out) const {
        const long dims = layout_.byte_dims(), step = layout_.has_scales ? layout_.GROUP_DIMS : dims;
        const auto* from = reinterpret_cast<const S*>(head) + layout_.element(offset, 0);
        for (long first = 0; first < dims; first += step) {
            const Floats scales = scales_of(head, offset, width, first / step);
            for (long dim = first; dim < std::min(first + step, dims); dim += PAIR<T>, from += PAIR<T> * layout_.block_size, out += STRIDE) {
                const Floats even = widened(from, width) * scales;
                if constexpr (PAIR<T> == 1)
                    store_some(out, even, width);
                else
                    store_words(out, rounded_pairs(even, widened(from + layout_.block_size, width) * scales), width);
            }
        }
    }

    void widen_rotated(const char* head, long offset, long width, T* out) const {
        for (long dim = 0; dim < layout_.head_dim - layout_.byte_dims(); dim += 2, out += 2 / PAIR<T> * STRIDE) {
            Words pairs = {};
            std::memcpy(&pairs, head + layout_.rotated(offset, dim), width * sizeof(std::uint32_t));
            if constexpr (PAIR<T> == 2) {
                store_words(out, pairs, width);
            } else {
                store_some(out, as_floats(pairs << 16), width);
                store_some(out + STRIDE, as_floats(pairs & 0xffff0000u), width);
            }
        }
    }

    static void store_words(T* out, Words words, long count) { std::memcpy(out, &words, count * sizeof(std::uint32_t)); }

    Floats scales_of(const char* head, long offset, long width, long group) const {
        if (!layout_.has_scales) return splat(cache_.key_scale);
        float scales[LANES] = {};
        std::memcpy(scales, head + layout_.scale(offset, group), width * sizeof(float));
        return load(scales);
    }
};

}  // namespace quire::ISA
