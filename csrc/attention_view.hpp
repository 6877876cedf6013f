// The keys and values of one KV head in one partition, as rows that vectors and tiles can be loaded from.
//
// If a group of 16 tokens' keys (or of 16 rows of values) is in one block and live from end to end, it is read in place.
// Else it is gathered into the thread's scratch: parts of several small blocks side by side, zeros for values that no
// query of the tile sees (0 x NaN is NaN), widths padded to whole registers and tiles.
#pragma once

#include <algorithm>

#include "attention_work.hpp"
#include "cache_layout.hpp"
#include "vec.hpp"

namespace quire::ISA {

constexpr long GROUP = 16;
constexpr long LINE = 64;  // bytes
constexpr int INTO_L2 = 2;  // 32 KiB ahead: the first-level cache holds the scores

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

template <typename T>
class PartitionView {
public:
    static constexpr long KEY_GROUPS = PARTITION / GROUP;
    static constexpr long VALUE_TOKENS = GROUP * PAIR<T>;  // 16 rows of values
    static constexpr long VALUE_GROUPS = PARTITION / VALUE_TOKENS;

    Rows<T> keys[KEY_GROUPS];      // of head_dim / PAIR rows, 16 columns of PAIR elements; live or not, safe to read
    Rows<T> values[VALUE_GROUPS];  // of 16 rows, head_dim columns of PAIR elements, padded to 16; only where any is live

    // The rows of a key group are padded with zeros to a multiple of `key_rows`.
    PartitionView(const Attention<T>& op, long key_rows, T* scratch)
        : layout_{op.num_kv_heads, op.head_dim, op.block_size}, op_(op),
          key_rows_(rounded_up(op.head_dim / PAIR<T>, key_rows)), scratch_(scratch) {}

    static long scratch_elements(long head_dim) { return 2 * PARTITION * rounded_up(head_dim, 2 * GROUP); }

    // Look at the keys of a partition's live tokens.
    void look_at_keys(const TokenRange& live) {
        const long start = live.begin / PARTITION * PARTITION;
        const long first = (live.begin - start) / GROUP, end = (live.end - 1 - start) / GROUP + 1;
        T* scratch = scratch_;
        for (long i = first; i < end; i++) keys[i] = key_rows_of(live, start + i * GROUP, scratch);
        std::fill(keys, keys + first, keys[first]);
        std::fill(keys + end, keys + KEY_GROUPS, keys[first]);
    }

    // And at their values; `meanwhile` is called for each group.
    template <typename Meanwhile>
    void look_at_values(const TokenRange& live, Meanwhile& meanwhile) {
        const long start = live.begin / PARTITION * PARTITION;
        T* scratch = scratch_ + scratch_elements(layout_.head_dim) / 2;
        for (long i = (live.begin - start) / VALUE_TOKENS; i <= (live.end - 1 - start) / VALUE_TOKENS; i++) {
            values[i] = value_rows(live, start + i * VALUE_TOKENS, scratch);
            meanwhile();
        }
    }

    // Ask for the blocks that hold a range, a share at each call, so that memory is never idle and never in the way.
    class Prefetch {
    public:
        Prefetch(const PartitionView& view, const T* cache, const TokenRange& live, long calls)
            : view_(view), cache_(cache), live_(live), calls_(live.begin < live.end ? calls : 0) {}

        void operator()() {
            if (call_ < calls_) view_.prefetch(cache_, live_, call_, calls_);
            call_++;
        }

    private:
        const PartitionView& view_;
        const T* cache_;
        const TokenRange& live_;
        long calls_, call_ = 0;
    };

    Prefetch prefetch_keys(const TokenRange& live, long calls) const { return {*this, op_.key_cache, live, calls}; }
    Prefetch prefetch_values(const TokenRange& live, long calls) const { return {*this, op_.value_cache, live, calls}; }

private:
    CacheLayout<T> layout_;
    const Attention<T>& op_;
    long key_rows_;
    T* scratch_;

    long place(const TokenRange& live, long token) const {
        return layout_.head_in_cache(live.table[token / layout_.block_size], live.kv_head);
    }

    void prefetch(const T* cache, const TokenRange& live, long step, long steps) const {
        const long lines = layout_.head_elements() * static_cast<long>(sizeof(T)) / LINE;  // of a block
        const long first = live.begin / layout_.block_size, blocks = (live.end - 1) / layout_.block_size + 1 - first;
        const long end = blocks * lines * (step + 1) / steps;
        for (long line = blocks * lines * step / steps; line < end;) {
            const char* run = reinterpret_cast<const char*>(cache + place(live, (first + line / lines) * layout_.block_size));
            const long stop = std::min(end, (line / lines + 1) * lines);
            for (const char* at = run + line % lines * LINE; line < stop; line++, at += LINE) {
                __builtin_prefetch(at, 0, INTO_L2);
                __asm__ volatile("");  // gcc drops calls of a function that does nothing but prefetch
            }
        }
    }

    Rows<T> key_rows_of(const TokenRange& live, long token, T*& scratch) {
        const long rows = layout_.head_dim / PAIR<T>, width = std::min(GROUP, layout_.block_size);
        if (width == GROUP && rows == key_rows_)
            return {op_.key_cache + place(live, token) + layout_.key_element(token % layout_.block_size, 0),
                    layout_.key_stride()};
        T* out = scratch;
        constexpr long stride = GROUP * PAIR<T>;
        scratch += key_rows_ * stride;
        for (long i = 0; i < GROUP; i += width) {
            if (token + i >= live.end || token + i + width <= live.begin) continue;
            const long offset = (token + i) % layout_.block_size;
            const T* from = op_.key_cache + place(live, token + i) + layout_.key_element(offset, 0);
            for (long row = 0; row < rows; row++)
                std::memcpy(out + row * stride + i * PAIR<T>, from + row * layout_.key_stride(), width * PAIR<T> * sizeof(T));
        }
        std::memset(out + rows * stride, 0, (key_rows_ - rows) * stride * sizeof(T));
        return {out, stride};
    }

    Rows<T> value_rows(const TokenRange& live, long token, T*& scratch) {
        const bool is_live = token >= live.begin && token + VALUE_TOKENS <= live.end;
        const long width = layout_.value_stride(), padded = rounded_up(layout_.head_dim, GROUP) * PAIR<T>;
        if (is_live && layout_.block_size >= VALUE_TOKENS && width == padded)
            return {op_.value_cache + place(live, token) + layout_.value_element(token % layout_.block_size, 0), width};
        T* out = scratch;
        scratch += GROUP * padded;
        for (long row = 0; row < GROUP;) {
            const long at = token + row * PAIR<T>, offset = at % layout_.block_size;
            const long rows = std::min(GROUP - row, (layout_.block_size - offset) / PAIR<T>);  // in the same block
            if (at < live.end && at + rows * PAIR<T> > live.begin) {
                const T* from = op_.value_cache + place(live, at) + layout_.value_element(offset, 0);
                copy_values(from, rows, width, padded, out + row * padded);
            }
            row += rows;
        }
        if (!is_live) clear_values(out, padded, live.begin - token, live.end - token);
        return {out, padded};
    }

    static void copy_values(const T* from, long rows, long width, long padded, T* out) {
        if (width == padded) {
            std::memcpy(out, from, rows * width * sizeof(T));
            return;
        }
        for (long row = 0; row < rows; row++) std::memcpy(out + row * padded, from + row * width, width * sizeof(T));
    }

    // Zero what lies outside of tokens [begin, end): whole rows, and of a pair that is seen by halves the other half.
    static void clear_values(T* out, long padded, long begin, long end) {
        for (long row = 0; row < GROUP; row++) {
            const long first = row * PAIR<T>, last = first + PAIR<T>;
            if (last <= begin || first >= end) {
                std::memset(out + row * padded, 0, padded * sizeof(T));
                continue;
            }
            for (long token = first; token < last; token++)
                for (long i = token - first; i < padded && (token < begin || token >= end); i += PAIR<T>) out[row * padded + i] = T{};
        }
    }
};

}  // namespace quire::ISA
