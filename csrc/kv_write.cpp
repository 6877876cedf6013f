// Rotary embedding and the write to the paged cache in one pass over a step's new queries, keys and values.
//
// A thread takes tokens; a token's heads are read once and written once. Queries are rotated in place (they are
// the projection's own output), keys on their way into the cache. Turned in float, product by product as `apply_rotary`
// does it, and rounded once: the same bits. A key's dimensions are scattered over the rows of its block, and so are a value's
// where tokens are stored in pairs: in the cache a token is a column, which is what makes it cheap to read, often, later. A
// cache of 8 bits gets elements and scales of the rounded numbers; one without values has latents as its keys.
#include <algorithm>
#include <stdexcept>

#include "kv_quantization.hpp"
#include "latent_layout.hpp"
#include "thread_pool.hpp"
#include "vec.hpp"

namespace quire::ISA {
namespace {

constexpr long PIECE_TOKENS = 8;  // tokens that a thread takes at a time

// out = x turned by an angle per pair (i, half + i). out may be x.
template <typename T>
void turn(const T* x, const float* cos, long half, T* out) {
    const float* sin = cos + half;
    for (long i = 0; i < half; i += LANES) {
        const long count = half - i < LANES ? half - i : LANES;
        const Floats first = load_some(x + i, count), second = load_some(x + half + i, count);
        const Floats c = load_some(cos + i, count), s = load_some(sin + i, count);
        store_some(out + i, first * c - second * s, count);
        store_some(out + half + i, second * c + first * s, count);
    }
}

// The same per pair (2i, 2i + 1).
template <typename T>
[[gnu::noinline]] void turn_interleaved(const T* x, const float* cos, long half, T* out) {
    const float* sin = cos + half;
    for (long i = 0; i < half; i += LANES / 2) {
        const long pairs = std::min<long>(LANES / 2, half - i);
        float values[LANES], swapped[LANES], c[LANES] = {}, s[LANES] = {};
        store(values, load_some(x + 2 * i, 2 * pairs));
        for (long pair = 0; pair < pairs; pair++) {
            swapped[2 * pair] = values[2 * pair + 1], swapped[2 * pair + 1] = values[2 * pair];
            c[2 * pair] = c[2 * pair + 1] = cos[i + pair];
            s[2 * pair] = -sin[i + pair], s[2 * pair + 1] = sin[i + pair];
        }
        store_some(out + 2 * i, load(values) * load(c) + load_some(swapped, 2 * pairs) * load(s), 2 * pairs);
    }
}

// A head turned; what is not among the pairs passes through. out may be x.
template <typename T>
void turn(const KVWrite<T>& op, const T* x, const float* cos, T* out) {
    const long start = op.rotary_start, end = start + op.rotary_dim;
    if (op.is_interleaved)
        turn_interleaved(x + start, cos, op.rotary_dim / 2, out + start);
    else
        turn(x + start, cos, op.rotary_dim / 2, out + start);
    if (out == x) return;
    if (start > 0) std::memcpy(out, x, start * sizeof(T));
    if (end < op.head_dim) std::memcpy(out + end, x + end, (op.head_dim - end) * sizeof(T));
}

// One token's key or value under one head: elements `stride` apart from `to` on, the scale where the head's are.
template <typename S, typename T>
void write_quantized(const T* x, const CacheLayout<S>& layout, float scale, long offset, S* head, long first, long stride) {
    S elements[MAX_HEAD_DIM];
    if (layout.has_scales) {
        scale = quantize(x, layout.head_dim, elements);
        std::memcpy(head + layout.head_elements() + offset * sizeof scale, &scale, sizeof scale);
    } else {
        store_elements(x, layout.head_dim, splat(1.0f / scale), elements);
    }
    for (long dim = 0; dim < layout.head_dim; dim++) head[first + dim * stride] = elements[dim];
}

// One token's latent, each group of dimensions quantized by itself, and what is rotated beside it.
template <typename S, typename T>
void write_latent(const T* x, const LatentLayout& layout, float constant, long offset, char* head) {
    const long dims = layout.byte_dims();
    S elements[MAX_HEAD_DIM];
    bf16 rotated[MAX_HEAD_DIM];
    for (long group = 0; group < layout.num_groups(); group++) {
        const long first = group * layout.GROUP_DIMS, count = std::min(layout.GROUP_DIMS, dims - first);
        const float scale = quantize(x + first, count, elements + first);
        std::memcpy(head + layout.scale(offset, group), &scale, sizeof scale);
    }
    if (!layout.has_scales) store_elements(x, dims, splat(1.0f / constant), elements);
    for (long dim = 0; dim < dims; dim++) head[layout.element(offset, dim)] = static_cast<char>(elements[dim]);
    for (long i = dims; i < layout.head_dim; i += LANES) {
        const long count = std::min<long>(LANES, layout.head_dim - i);
        const Halves halves = lower_halves(rounded_bits(load_some(x + i, count)));
        std::memcpy(rotated + i - dims, &halves, count * sizeof(bf16));
    }
    for (long dim = 0; dim < layout.head_dim - dims; dim += 2)
        std::memcpy(head + layout.rotated(offset, dim), rotated + dim, 2 * sizeof(bf16));
}

template <typename S, typename T>
void write_token(const KVWrite<T>& op, long token, const float* cos, T* turned) {
    const CacheLayout<S> layout{op.num_kv_heads, op.head_dim, op.block_size, op.cache.has_scales()};
    const long slot = op.slots[token], block = slot / op.block_size, offset = slot % op.block_size;
    for (long head = 0; head < op.num_kv_heads; head++) {
        const T* key = op.key + token * op.key_stride + head * op.head_dim;
        if (cos) {
            turn(op, key, cos, turned);
            key = turned;
        }
        if constexpr (sizeof(S) == 1)
            if (!op.cache.values) {
                const LatentLayout latents{op.num_kv_heads, op.head_dim, op.rotary_start, op.block_size, op.cache.has_scales()};
                write_latent<S>(key, latents, op.cache.key_scale, offset, latents.head(op.cache.keys, block, head));
                continue;
            }
        S* keys = layout.head(op.cache.keys, block, head);
        const long key_place = layout.key_element(offset, 0), value_place = layout.value_element(offset, 0);
        if constexpr (sizeof(S) == 1)
            write_quantized(key, layout, op.cache.key_scale, offset, keys, key_place, layout.key_stride());
        else
            for (long row = 0; row < op.head_dim / PAIR<T>; row++)
                std::memcpy(keys + key_place + row * layout.key_stride(), key + row * PAIR<T>, PAIR<T> * sizeof(T));
        if (!op.cache.values) continue;
        const T* value = op.value + token * op.value_stride + head * op.head_dim;
        S* values = layout.head(op.cache.values, block, head);
        if constexpr (sizeof(S) == 1)
            write_quantized(value, layout, op.cache.value_scale, offset, values, value_place, 1);
        else
            for (long dim = 0; dim < op.head_dim; dim++) values[value_place + dim * PAIR<T>] = value[dim];
    }
}

template <typename S, typename T>
void write_all(const KVWrite<T>& op) {
    share_range(op.num_tokens, PIECE_TOKENS, [&](long begin, long end) {
        T turned[MAX_HEAD_DIM];
        for (long token = begin; token < end; token++) {
            const float* cos = op.cos_sin ? op.cos_sin + op.positions[token] * op.rotary_dim : nullptr;
            for (long head = 0; cos && head < op.num_heads; head++) {
                T* query = op.query + token * op.query_stride + head * op.head_dim;
                turn<T>(op, query, cos, query);
            }
            if (op.slots && op.slots[token] >= 0) write_token<S>(op, token, cos, turned);
        }
    });
}

}  // namespace

template <typename T>
void kv_write(const KVWrite<T>& op) {
    switch (op.cache.format) {
        case KVFormat::same: return write_all<T>(op);
        case KVFormat::int8_scaled: return write_all<std::int8_t>(op);
        case KVFormat::e4m3_scaled:
        case KVFormat::e4m3: return write_all<E4M3>(op);
    }
    throw std::invalid_argument("a format of the KV cache that is not served");
}

template void kv_write<bf16>(const KVWrite<bf16>&);
template void kv_write<float>(const KVWrite<float>&);

}  // namespace quire::ISA
