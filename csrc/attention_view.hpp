// The keys and values of one KV head in one partition, as rows that vectors and tiles can be loaded from.
//
// If a group of 16 tokens' keys (or of 16 rows of values) is in one block and live from end to end, it is read in place.
// Else it is gathered into the thread's scratch: parts of several small blocks side by side, zeros for values that no
// query of the tile sees (0 x NaN is NaN), widths padded to whole registers and tiles. Elements of 8 bits are widened into the
// scratch, except int8 where products are of floats: there the kernels widen them in registers. Values that are the
// first dimensions of keys are transposed into the scratch, once for all rows of a tile.
#pragma once

#include <algorithm>
#include <array>

#include "attention_work.hpp"
#include "kv_quantization.hpp"
#include "quantized_products.hpp"

namespace quire::ISA {

// int8 of models in bfloat16 is multiplied as it is, in integers.
#if defined(__AVX512VNNI__) && !defined(__AMX_BF16__)
#define USES_INTEGER_ATTENTION
#endif

constexpr long GROUP = 16;
constexpr long LINE = 64;  // bytes
// Hint of prefetches. The first-level cache holds the scores; without matrix units loads are fewer, and a line at a time
// may go there: 22 GB/s instead of 18.
#ifdef __AMX_BF16__
constexpr int LOCALITY = 2;  // the second-level cache
#else
constexpr int LOCALITY = 3;  // the first-level cache
#endif

template <typename T>
struct Rows {
    const T* at;
    long stride;  // elements

    const T* row(long index) const { return at + index * stride; }
};

// Tokens [begin, end) of a sequence, all in one partition, that some query sees.
struct TokenRange {
    const std::int32_t* table;  // the sequence's blocks
    long kv_head, begin, end;
};

// What products of a model in T read of a cache that stores S: elements of this type.
template <typename T, typename S>
struct ReadAs {
    using Element = std::conditional_t<sizeof(S) != 1 || (std::is_same_v<S, std::int8_t> && std::is_same_v<Factor<T>, float>), S, T>;
};
#ifdef USES_INTEGER_ATTENTION
template <>
struct ReadAs<bf16, std::int8_t> {
    using Element = Byte;
};
#endif
template <typename T, typename S>
using ReadElement = typename ReadAs<T, S>::Element;

#ifdef USES_INTEGER_ATTENTION
// Up to sixteen words of a byte from each of four rows, `next` apart.
inline void store_quads(const std::int8_t* row, long next, long count, std::uint32_t flipped, Byte* out) {
    alignas(64) static constexpr std::uint32_t same_columns[] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    alignas(64) static constexpr auto turned = [] {  // a byte of each row, in each quarter of a register
        std::array<std::uint8_t, 64> places{};
        for (int i = 0; i < 64; i++) places[i] = i % 4 * 4 + i / 4 % 4;
        return places;
    }();
    __m512i rows = _mm512_castsi128_si512((__m128i)load_bytes(row, count));
    rows = _mm512_inserti32x4(rows, (__m128i)load_bytes(row + next, count), 1);
    rows = _mm512_inserti32x4(rows, (__m128i)load_bytes(row + 2 * next, count), 2);
    rows = _mm512_inserti32x4(rows, (__m128i)load_bytes(row + 3 * next, count), 3);
    const __m512i mixed = _mm512_permutexvar_epi32(_mm512_load_si512(same_columns), rows);
    const RegisterWords quads = (RegisterWords)_mm512_shuffle_epi8(mixed, _mm512_load_si512(turned.data())) ^ flipped;
    if (count >= LANES)
        std::memcpy(out, &quads, sizeof quads);
    else
        std::memcpy(out, &quads, count * sizeof(std::uint32_t));
}
#endif

typedef std::uint64_t Quad __attribute__((vector_size(32)));  // four times the numbers of 2 tokens x 2 dimensions, or 1 x 2

// Rows [4][4] into columns.
inline void transpose_quads(const Quad (&rows)[4], Quad (&columns)[4]) {
    const Quad even_top = __builtin_shufflevector(rows[0], rows[1], 0, 4, 2, 6), odd_top = __builtin_shufflevector(rows[0], rows[1], 1, 5, 3, 7);
    const Quad even_low = __builtin_shufflevector(rows[2], rows[3], 0, 4, 2, 6), odd_low = __builtin_shufflevector(rows[2], rows[3], 1, 5, 3, 7);
    columns[0] = __builtin_shufflevector(even_top, even_low, 0, 1, 4, 5);
    columns[1] = __builtin_shufflevector(odd_top, odd_low, 0, 1, 4, 5);
    columns[2] = __builtin_shufflevector(even_top, even_low, 2, 3, 6, 7);
    columns[3] = __builtin_shufflevector(odd_top, odd_low, 2, 3, 6, 7);
}

// The first `dims` dimensions, a multiple of 8, of sixteen tokens' keys as rows of values, `stride` apart.
inline void keys_as_values(const Rows<bf16>& keys, long dims, bf16* out, long stride) {
    for (long tokens = 0; tokens < GROUP; tokens += 8)
        for (long dim = 0; dim < dims; dim += 8) {
            Quad rows[4], columns[4];
            for (long i = 0; i < 4; i++) {  // pairs of dimensions become pairs of tokens
                Halves row;
                std::memcpy(&row, keys.row(dim / 2 + i) + 2 * tokens, sizeof row);
                rows[i] = (Quad)__builtin_shufflevector(row, row, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
            }
            transpose_quads(rows, columns);
            for (long i = 0; i < 4; i++) std::memcpy(out + (tokens / 2 + i) * stride + 2 * dim, &columns[i], sizeof(Quad));
        }
}

inline void keys_as_values(const Rows<float>& keys, long dims, float* out, long stride) {
    typedef float Half __attribute__((vector_size(32)));
    static constexpr long even_tokens[] = {0, 1, 4, 5}, odd_tokens[] = {2, 3, 6, 7};
    for (long tokens = 0; tokens < GROUP; tokens += 8)
        for (long dim = 0; dim < dims; dim += 8) {
            Quad even[4], odd[4], columns[4];
            for (long i = 0; i < 4; i++) {
                Half first, second;
                std::memcpy(&first, keys.row(dim + 2 * i) + tokens, sizeof first);
                std::memcpy(&second, keys.row(dim + 2 * i + 1) + tokens, sizeof second);
                even[i] = (Quad)__builtin_shufflevector(first, second, 0, 8, 1, 9, 4, 12, 5, 13);
                odd[i] = (Quad)__builtin_shufflevector(first, second, 2, 10, 3, 11, 6, 14, 7, 15);
            }
            const auto store = [&](const long (&places)[4]) {
                for (long i = 0; i < 4; i++) std::memcpy(out + (tokens + places[i]) * stride + dim, &columns[i], sizeof(Quad));
            };
            transpose_quads(even, columns);
            store(even_tokens);
            transpose_quads(odd, columns);
            store(odd_tokens);
        }
}

template <typename E>
struct PartitionView {
    static constexpr long KEY_GROUPS = PARTITION / GROUP;
#ifdef __AMX_BF16__
    static constexpr long VALUE_ROWS = GROUP;  // a matrix tile has 16 rows of pairs
#else
    static constexpr long VALUE_ROWS = GROUP / PAIR<E>;
#endif
    static constexpr long VALUE_TOKENS = VALUE_ROWS * PAIR<E>;
    static constexpr long VALUE_GROUPS = PARTITION / VALUE_TOKENS;

    Rows<E> keys[KEY_GROUPS];      // head_dim / PAIR rows, 16 columns of PAIR elements; live or not, safe to read
    Rows<E> values[VALUE_GROUPS];  // VALUE_ROWS rows, head_dim columns of PAIR elements, padded to 16; only where any is live

    static long scratch_elements(long head_dim) { return 2 * PARTITION * rounded_up(head_dim, 2 * GROUP); }

protected:
    // View the keys of a partition's live tokens; group_at(token) is the view of a group.
    template <typename GroupAt>
    void view_keys(const TokenRange& live, GroupAt group_at) {
        const long start = live.begin / PARTITION * PARTITION;
        const long first = (live.begin - start) / GROUP, end = (live.end - 1 - start) / GROUP + 1;
        for (long i = first; i < end; i++) keys[i] = group_at(start + i * GROUP);
        std::fill(keys, keys + first, keys[first]);
        std::fill(keys + end, keys + KEY_GROUPS, keys[first]);
    }

    // And their values; `meanwhile` is called for each group.
    template <typename GroupAt, typename Meanwhile>
    void view_values(const TokenRange& live, GroupAt group_at, Meanwhile& meanwhile) {
        const long start = live.begin / PARTITION * PARTITION;
        for (long i = (live.begin - start) / VALUE_TOKENS; i <= (live.end - 1 - start) / VALUE_TOKENS; i++) {
            values[i] = group_at(start + i * VALUE_TOKENS);
            meanwhile();
        }
    }

    // Values of some tokens, transposed into the scratch from keys that are in view.
    Rows<E> transposed_keys(const TokenRange& live, long token, long value_dim, E*& scratch) const {
        const long padded = rounded_up(value_dim, GROUP) * PAIR<E>;
        E* out = scratch;
        scratch += VALUE_ROWS * padded;
        for (long i = 0; i < VALUE_TOKENS; i += GROUP)
            keys_as_values(keys[(token + i) % PARTITION / GROUP], value_dim, out + i / PAIR<E> * padded, padded);
        if (token < live.begin || token + VALUE_TOKENS > live.end) clear_values(out, padded, live.begin - token, live.end - token);
        return {out, padded};
    }

    // Zero what lies outside of tokens [begin, end): whole rows, and of a pair that is seen by halves the other half.
    static void clear_values(E* out, long padded, long begin, long end) {
        for (long row = 0; row < VALUE_ROWS; row++) {
            const long first = row * PAIR<E>, last = first + PAIR<E>;
            if (last <= begin || first >= end) {
                std::memset(out + row * padded, 0, padded * sizeof(E));
                continue;
            }
            for (long token = first; token < last; token++)
                for (long i = token - first; i < padded && (token < begin || token >= end); i += PAIR<E>) out[row * padded + i] = E{};
        }
    }
};

// Requests of the blocks that hold a range, a share at each call, so that memory is never idle and never in the way.
template <typename Layout>
class Prefetch {
public:
    Prefetch(const Layout& layout, const void* cache, const TokenRange& live, long calls)
        : layout_(layout), cache_(cache), live_(live), lines_((layout.head_bytes() + LINE - 1) / LINE) {
        if (live.begin >= live.end || calls <= 0) return;
        block_ = live.begin / layout_.block_size;
        left_ = ((live.end - 1) / layout_.block_size + 1 - block_) * lines_;
        share_ = (left_ + calls - 1) / calls;
    }

    // Inlined, for the callers have their sums in registers.
    [[gnu::always_inline]] void operator()() {
        const long share = std::min(share_, left_);
        left_ -= share;
        for (long i = 0; i < share; i++, at_ += LINE) {
            if (of_block_ == 0) {
                at_ = reinterpret_cast<const char*>(layout_.head(cache_, live_.table[block_++], live_.kv_head));
                of_block_ = lines_;
            }
            of_block_--;
            __builtin_prefetch(at_, 0, LOCALITY);
        }
    }

private:
    const Layout layout_;
    const void* cache_;
    const TokenRange& live_;
    long lines_, block_ = 0, of_block_ = 0, left_ = 0, share_ = 0;  // of_block_: lines of a block still to ask for
    const char* at_ = nullptr;
};

template <typename T, typename S>
class CacheView : public PartitionView<ReadElement<T, S>> {
public:
    using E = ReadElement<T, S>;
    static constexpr bool IS_QUANTIZED = sizeof(S) == 1;
    using PartitionView<E>::KEY_GROUPS, PartitionView<E>::VALUE_ROWS, PartitionView<E>::VALUE_TOKENS, PartitionView<E>::keys, PartitionView<E>::values;

    float key_scales[IS_QUANTIZED ? PARTITION : 1];  // live tokens, else 0
    float value_scales[IS_QUANTIZED ? PARTITION : 1];

    // The rows of a key group are padded with zeros to a multiple of `key_rows`.
    CacheView(const Attention<T>& op, long key_rows, E* scratch)
        : layout_{op.num_kv_heads, op.head_dim, op.block_size, op.cache.has_scales()}, cache_(op.cache),
          key_rows_(rounded_up(op.head_dim / PAIR<E>, key_rows)), value_dim_(op.value_dim), scratch_(scratch) {}

    // Look at the keys of a partition's live tokens.
    void look_at_keys(const TokenRange& live) {
        E* scratch = scratch_;
        this->view_keys(live, [&](long token) { return key_rows_of(live, token, scratch); });
        if constexpr (IS_QUANTIZED) read_scales(cache_.keys, live, cache_.key_scale, key_scales);
    }

    // And at their values.
    template <typename Meanwhile>
    void look_at_values(const TokenRange& live, Meanwhile& meanwhile) {
        E* scratch = scratch_ + this->scratch_elements(layout_.head_dim) / 2;
        const auto group_at = [&](long token) {
            if constexpr (!IS_QUANTIZED)
                if (value_dim_) return this->transposed_keys(live, token, value_dim_, scratch);
            return value_rows(live, token, scratch);
        };
        this->view_values(live, group_at, meanwhile);
        if constexpr (IS_QUANTIZED) read_scales(cache_.values, live, cache_.value_scale, value_scales);
    }

    Prefetch<CacheLayout<S>> prefetch_keys(const TokenRange& live, long calls) const { return {layout_, cache_.keys, live, calls}; }
    Prefetch<CacheLayout<S>> prefetch_values(const TokenRange& live, long calls) const { return {layout_, cache_.values, live, calls}; }

private:
    static constexpr bool IS_WIDENED = !std::is_same_v<E, S>;
    static constexpr bool IS_QUADS = std::is_same_v<E, Byte>;  // the weights of what no query sees are 0, and no byte is NaN
    static constexpr std::uint32_t TOP_BITS = 0x80808080u;     // flipped, they turn signed bytes into unsigned ones
    CacheLayout<S> layout_;
    const LayerCache& cache_;
    long key_rows_, value_dim_;
    E* scratch_;

    // The head's elements in the block of a token.
    const S* place(const void* cache, const TokenRange& live, long token) const {
        return layout_.head(cache, live.table[token / layout_.block_size], live.kv_head);
    }
    const S* key_place(const TokenRange& live, long token) const {
        return place(cache_.keys, live, token) + layout_.key_element(token % layout_.block_size, 0);
    }
    const S* value_place(const TokenRange& live, long token) const {
        return place(cache_.values, live, token) + layout_.value_element(token % layout_.block_size, 0);
    }

    void read_scales(const void* cache, const TokenRange& live, float constant, float* scales) const {
        const long start = live.begin / PARTITION * PARTITION;
        std::fill(scales, scales + PARTITION, 0.0f);
        for (long token = live.begin, count; token < live.end; token += count) {
            const long offset = token % layout_.block_size;
            count = std::min(layout_.block_size - offset, live.end - token);
            float* out = scales + token - start;
            if (layout_.has_scales)
                std::memcpy(out, place(cache, live, token) + layout_.head_elements() + offset * sizeof *out, count * sizeof *out);
            else
                std::fill(out, out + count, constant);
        }
    }

    // `count` elements of a row, or of PAIR rows in turn, `next` apart; widened numbers are bfloat16 to the bit, bytes are
    // stored with `flipped` bits.
    static void widen(const S* row, long next, long count, E* out, [[maybe_unused]] std::uint32_t flipped = 0) {
#ifdef USES_INTEGER_ATTENTION
        if constexpr (std::is_same_v<E, Byte>) return store_quads(row, next, count, flipped, out);
#endif
        const Floats first = widened(row, count);
        if constexpr (PAIR<E> == 1) return store_some(out, first, count);
        const Words pairs = (Words)first >> 16 | ((Words)widened(row + next, count) & 0xffff0000u);
        if (count >= LANES)
            std::memcpy(out, &pairs, sizeof pairs);
        else
            std::memcpy(out, &pairs, count * sizeof(std::uint32_t));
    }

    Rows<E> key_rows_of(const TokenRange& live, long token, E*& scratch) {
        const long rows = layout_.head_dim / PAIR<E>, width = std::min(GROUP, layout_.block_size);
        if constexpr (!IS_WIDENED)
            if (width == GROUP && rows == key_rows_) return {key_place(live, token), layout_.key_stride()};
        E* out = scratch;
        constexpr long stride = GROUP * PAIR<E>;
        scratch += key_rows_ * stride;
        for (long i = 0; i < GROUP; i += width) {
            if (token + i >= live.end || token + i + width <= live.begin) continue;
            const S* from = key_place(live, token + i);
            for (long row = 0; row < rows; row++) {
                E* to = out + row * stride + i * PAIR<E>;
                if constexpr (IS_WIDENED)
                    widen(from + row * PAIR<E> * layout_.key_stride(), layout_.key_stride(), width, to, TOP_BITS);
                else
                    std::memcpy(to, from + row * layout_.key_stride(), width * PAIR<E> * sizeof(E));
            }
        }
        std::memset(out + rows * stride, 0, (key_rows_ - rows) * stride * sizeof(E));
        return {out, stride};
    }

    Rows<E> value_rows(const TokenRange& live, long token, E*& scratch) {
        const bool is_live = token >= live.begin && token + VALUE_TOKENS <= live.end;
        const long width = layout_.head_dim * PAIR<E>, padded = rounded_up(layout_.head_dim, GROUP) * PAIR<E>;
        if constexpr (!IS_WIDENED)
            if (is_live && layout_.block_size >= VALUE_TOKENS && width == padded) return {value_place(live, token), width};
        E* out = scratch;
        scratch += VALUE_ROWS * padded;
        for (long row = 0; row < VALUE_ROWS;) {
            const long at = token + row * PAIR<E>, offset = at % layout_.block_size;
            const long rows = std::min(VALUE_ROWS - row, (layout_.block_size - offset) / PAIR<E>);  // rows of the same block
            if (at < live.end && at + rows * PAIR<E> > live.begin) copy_values(value_place(live, at), rows, width, padded, out + row * padded);
            row += rows;
        }
        if (!is_live && !IS_QUADS) this->clear_values(out, padded, live.begin - token, live.end - token);
        return {out, padded};
    }

    void copy_values(const S* from, long rows, long width, long padded, E* out) const {
        if constexpr (IS_WIDENED) {
            const long dims = layout_.head_dim;
            for (long row = 0; row < rows; row++)
                for (long dim = 0; dim < dims; dim += GROUP)
                    widen(from + row * width + dim, dims, std::min(GROUP, dims - dim), out + row * padded + dim * PAIR<E>);
        } else if (width == padded) {
            std::memcpy(out, from, rows * width * sizeof(E));
        } else {
            for (long row = 0; row < rows; row++) std::memcpy(out + row * padded, from + row * width, width * sizeof(E));
        }
    }
};

}  // namespace quire::ISA
