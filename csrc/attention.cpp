// Attention of a flat batch over paged keys and values (Kwon et al. 2023, section 4.1): one kernel for decode rows
// and for chunks of prompts.
//
// A thread computes one query tile under one KV head at a time: all query heads of the group times some tokens are the
// rows that are multiplied with the head's keys and values. It walks through the context in partitions. Of a partition it
// computes, for up to 32 rows at once: scores (32 KiB, first-level cache), their softmax in place, weighted values. The
// result of a partition, per row the highest score, the sum of weights and the weighted sum, is merged into the row's
// running result. Partitions begin at fixed absolute positions and are merged in ascending order, by one thread or, where
// several share a long context, from a list when all are computed: the same operations on the same numbers. Bytes moved:
// a decode row's keys and values once from memory; a tile of 256 rows reads them once for 36 tokens of 7 heads.
#include <stdexcept>

#include "aligned.hpp"
#include "attention_integers.hpp"
#include "attention_latents.hpp"
#include "attention_scores.hpp"
#include "attention_tiles.hpp"
#include "attention_vectors.hpp"
#include "thread_pool.hpp"

namespace quire::ISA {
namespace {

template <typename E>
struct ProductsOf {
    using Type = ByVectors<E>;
};
#ifdef __AMX_BF16__
template <>
struct ProductsOf<bf16> {
    using Type = ByTiles;
};
#endif
#ifdef USES_INTEGER_ATTENTION
template <>
struct ProductsOf<Byte> {
    using Type = ByIntegers;
};
#endif
template <typename E>
using Products = typename ProductsOf<E>::Type;

// Results of rows over some of their context, [rows] and [rows][width]: highest score; weighted values, and in the last
// LANES of a row its sum of weights, in each.
struct Results {
    float *highest, *weighted;
    long width;

    static long floats(long rows, long width) { return rounded_up(rows, LANES) * (1 + width); }
    Results(float* memory, long rows, long width)
        : highest(memory), weighted(memory + rounded_up(rows, LANES)), width(width) {}

    Results from(long row) const {  // a multiple of LANES
        Results rest = *this;
        rest.highest += row;
        rest.weighted += row * width;
        return rest;
    }
};

void clear(Results results, long rows) {
    std::fill(results.highest, results.highest + rounded_up(rows, LANES), LOWEST);
    std::memset(results.weighted, 0, rows * results.width * sizeof(float));
}

// Merge a later partition into the running results; one that a row does not see leaves the row's bits unchanged.
void merge_partials(Results running, Results later, long rows, Floats scale) {
    for (long first = 0; first < rows; first += LANES) {
        const Floats before = load(running.highest + first), after = load(later.highest + first);
        const Floats highest = maximum(before, after);
        const Floats keep = power(before - highest, scale), take = power(after - highest, scale);
        store(running.highest + first, highest);
        for (long row = first; row < std::min(rows, first + LANES); row++) {
            const Floats kept = splat(keep[row - first]), taken = splat(take[row - first]);
            float *values = running.weighted + row * running.width, *others = later.weighted + row * later.width;
            for (long i = 0; i < running.width; i += LANES)
                store(values + i, multiply_add(load(values + i), kept, load(others + i) * taken));
        }
    }
}

// Results of partitions whose tile is shared by several threads.
struct KeptResults {
    float* memory;
    long stride;
};

// A thread's scratch; none of it grows with the context. E: the elements of the products.
template <typename E>
struct Scratch {
    Aligned<typename Products<E>::Query> query;
    Aligned<E> gathered;
    Aligned<float> scores, running, partition;
    Aligned<long> positions;
};

// One past the last token that the token at a position of a tile's sequence sees.
template <typename T>
long end_of_seen(const Attention<T>& op, const QueryTile& tile, long position) {
    if (op.seen_ends) return op.seen_ends[tile.first_token + position - tile.first_position];
    return std::min<long>(position + 1 + op.num_ahead(), op.context_lens[tile.sequence]);
}

// The tokens of a partition that some row of a tile sees.
template <typename T>
TokenRange live(const Attention<T>& op, const QueryTile& tile, long partition, long head) {
    const long first = op.window ? tile.first_position - op.window + 1 : 0, start = partition * PARTITION;
    return {op.block_tables + tile.sequence * op.table_stride, tile.kv_head + head, std::max(first, start),
            std::min(end_of_seen(op, tile, tile.first_position + tile.num_tokens - 1), start + PARTITION)};
}

// One query tile, computed by one thread, over a cache that stores S.
template <typename T, typename S>
class TileWork {
    using View = CacheView<T, S>;
    using E = typename View::E;

public:
    TileWork(const Attention<T>& op, const QueryTile& tile, Scratch<E>& scratch, TokenRange next = {})
        : op_(op), tile_(tile), scratch_(scratch), group_(op.num_heads / op.num_kv_heads),
          rows_(tile.num_tokens * group_), row_stride_(rounded_up(rows_, LANES)), padded_(rounded_up(op.output_dim(), GROUP)), width_(padded_ + LANES),
          key_rows_(rounded_up(op.head_dim / PAIR<E>, P::KEY_ROWS)), query_stride_(P::query_stride(key_rows_)),
          scale_(op.scale * LOG2_E), positions_(scratch.positions.at_least(rows_)), next_(next),
          view_(op, P::KEY_ROWS, scratch.gathered.at_least(View::scratch_elements(op.head_dim))) {
        scratch.scores.at_least(BLOCK_ROWS * SCORE_STRIDE);
        scratch.partition.at_least(Results::floats(BLOCK_ROWS, width_));
        pack_query();
    }

    // All of the context.
    void attend() {
        const Results running = clear_running(), block(scratch_.partition.data(), BLOCK_ROWS, width_);
        for (long i = tile_.first_partition; i < tile_.end_partition; i++)
            each_block(i, tile_.end_partition, [&](long head, long row, long rows, const TokenRange& next) {
                compute(i, head, row, rows, block, next);
                merge_partials(running.from(head * row_stride_ + row), block, rows, splat(scale_));
            });
        finish(running);
    }

    // Some partitions, whose results are kept.
    void attend_part(const WorkItem& item, const KeptResults& results) {
        for (long i = item.first_partition; i < item.end_partition; i++)
            each_block(i, item.end_partition, [&](long head, long row, long rows, const TokenRange& next) {
                compute(i, head, row, rows, result(results, i, head).from(row), next);
            });
    }

    void merge(const KeptResults& results) {
        const Results running = clear_running();
        for (long i = tile_.first_partition; i < tile_.end_partition; i++)
            for (long head = 0; head < tile_.num_kv_heads; head++)
                merge_partials(running.from(head * row_stride_), result(results, i, head), rows_, splat(scale_));
        finish(running);
    }

private:
    using P = Products<E>;
    const Attention<T>& op_;
    const QueryTile& tile_;
    Scratch<E>& scratch_;
    long group_, rows_, row_stride_, padded_, width_, key_rows_, query_stride_;  // rows: of one KV head
    float scale_;
    long* positions_;  // positions of the rows' tokens
    TokenRange next_, live_;  // what this thread reads after this tile; what of the partition some row sees
    bool has_values_;      // whether the view of the partition has its values
    View view_;

    Results result(const KeptResults& results, long partition, long head) const {
        const long index = tile_.results + (partition - tile_.first_partition) * tile_.num_kv_heads + head;
        return {results.memory + index * results.stride, rows_, width_};
    }

    Results clear_running() {
        const long rows = tile_.num_kv_heads * row_stride_;
        const Results running(scratch_.running.at_least(Results::floats(rows, width_)), rows, width_);
        clear(running, rows);
        if (op_.sinks)  // what has been merged before the first partition: a key of weight 1 without values
            each_row([&](long head, long row, long, long query_head) {
                const long at = head * row_stride_ + row;
                running.highest[at] = std::clamp(op_.sinks[query_head] / op_.scale, LOWEST, -LOWEST);
                store(running.weighted + at * width_ + padded_, splat(1.0f));
            });
        return running;
    }

    // Visit a tile's rows: head, row under it, place in the flat batch.
    template <typename Visit>
    void each_row(Visit visit) const {
        for (long head = 0; head < tile_.num_kv_heads; head++)
            for (long row = 0; row < rows_; row++)
                visit(head, row, tile_.first_token + row / group_, (tile_.kv_head + head) * group_ + row % group_);
    }

    // Rows end to end, padded with zeros to the keys' rows and to whole blocks.
    void pack_query() {
        const long elements = tile_.num_kv_heads * row_stride_ * query_stride_;
        auto* out = scratch_.query.at_least(elements);
        std::memset(out, 0, elements * sizeof *out);
        each_row([&](long head, long row, long token, long query_head) {
            positions_[row] = tile_.first_position + token - tile_.first_token;
            const T* query = op_.query + token * op_.query_stride + query_head * op_.head_dim;
            P::pack_row(query, op_.head_dim, out + (head * row_stride_ + row) * query_stride_, query_stride_);
        });
    }

    // Columns of a partition that any of the rows [row, end) sees.
    Columns seen(long partition, long row, long end) const {
        const long start = partition * PARTITION;
        const long begin = op_.window ? positions_[row] - op_.window + 1 - start : 0;
        return {std::clamp(begin, 0L, PARTITION), std::clamp(end_of_seen(op_, tile_, positions_[end - 1]) - start, 0L, PARTITION)};
    }

    template <typename Compute>
    void each_block(long partition, long end, Compute compute) {
        for (long head = 0; head < tile_.num_kv_heads; head++) {
            const TokenRange next = head + 1 < tile_.num_kv_heads ? live(op_, tile_, partition, head + 1)
                                 : partition + 1 < end         ? live(op_, tile_, partition + 1, 0)
                                                               : next_;
            live_ = live(op_, tile_, partition, head);
            view_.look_at_keys(live_);
            has_values_ = false;
            for (long row = 0; row < rows_; row += BLOCK_ROWS) compute(head, row, std::min(BLOCK_ROWS, rows_ - row), next);
        }
    }

    // Scores, softmax, weighted values. While keys are multiplied the values are on their way from memory, while the
    // values are multiplied the next partition's keys.
    void compute(long partition, long head, long row, long rows, Results out, const TokenRange& next) {
        const Columns computed = seen(partition, row, row + rows);
        if (computed.begin >= computed.end) return clear(out, rows);
        float* scores = scratch_.scores.data();
        // Memory is kept busy for the first rows: later ones find keys and values in the second-level cache.
        auto values = view_.prefetch_values(live_, has_values_ || op_.value_dim ? 0 : P::score_calls(rows, computed, key_rows_));
        auto keys = view_.prefetch_keys(next, has_values_ ? 0 : P::weigh_calls(rows, computed, padded_));
        P::scores(scratch_.query.data() + (head * row_stride_ + row) * query_stride_, query_stride_, rows, view_, key_rows_,
                  computed, View::IS_QUANTIZED ? view_.key_scales : nullptr, scores, values);
        for (long i = 0; op_.softcap && i < rows; i++) cap_scores(scores + i * SCORE_STRIDE, computed, op_.scale, op_.softcap);
        hide_unseen(partition, row, rows, computed);
        for (long i = 0; i < rows; i++) out.highest[i] = highest_score(scores + i * SCORE_STRIDE, computed);
        if (!has_values_) view_.look_at_values(live_, keys);
        has_values_ = true;
        P::weigh(scores, out.highest, scale_, rows, view_, padded_, computed, View::IS_QUANTIZED ? view_.value_scales : nullptr,
                 out.weighted, keys);
    }

    void hide_unseen(long partition, long row, long rows, Columns computed) {
        const Columns first = seen(partition, row, row + 1), last = seen(partition, row + rows - 1, row + rows);
        if (last.begin <= computed.first() && first.end >= computed.last()) return;  // all rows see all columns
        for (long i = 0; i < rows; i++)
            hide(scratch_.scores.data() + i * SCORE_STRIDE, seen(partition, row + i, row + i + 1), computed);
    }

    void finish(Results running) const {
        each_row([&](long head, long row, long token, long query_head) {
            const long at = head * row_stride_ + row;
            T* out = op_.out + token * op_.out_stride + query_head * op_.output_dim();
            const Floats inverse = splat(1.0f / running.weighted[at * width_ + padded_]);
            for (long i = 0; i < op_.output_dim(); i += LANES)
                store_some(out + i, load(running.weighted + at * width_ + i) * inverse,
                           std::min<long>(LANES, op_.output_dim() - i));
        });
    }
};

template <typename S, typename T>
void attend(const Attention<T>& op) {
    using E = ReadElement<T, S>;
    static thread_local AttentionWork work;
    static thread_local Aligned<float> kept;
    cut_work({op, op.query_starts, op.context_lens, op.seen_ends, op.num_seqs}, num_threads(), work);
    if (work.tiles.empty()) return;
    const AttentionWork& shared = work;
    const long stride = Results::floats(shared.max_split_rows, rounded_up(op.output_dim(), GROUP) + LANES);
    const KeptResults results{kept.at_least(shared.num_results * stride), stride};
    const long num_items = static_cast<long>(shared.items.size());
    share(num_items, [&](Chunks& chunks) {
        static thread_local Scratch<E> scratch;
        const typename Products<E>::Session session(shared.max_rows);
        for (long i = chunks.take(), after; i < num_items; i = after) {
            after = chunks.take();
            const WorkItem &item = shared.items[i], &then = shared.items[std::min(after, num_items - 1)];
            TileWork<T, S> tile(op, shared.tiles[item.tile], scratch, live(op, shared.tiles[then.tile], then.first_partition, 0));
            if (shared.tiles[item.tile].results < 0)
                tile.attend();
            else
                tile.attend_part(item, results);
        }
    });
    if (shared.num_results)
        share(static_cast<long>(shared.tiles.size()), [&](Chunks& chunks) {
            static thread_local Scratch<E> scratch;
            for (long i; (i = chunks.take()) < chunks.count();)
                if (shared.tiles[i].results >= 0) TileWork<T, S>(op, shared.tiles[i], scratch).merge(results);
        });
}

template <typename S, typename T>
void attend_bytes(const Attention<T>& op) {
    if (op.value_dim) return attend<Latent<S>>(op);
    attend<S>(op);
}

}  // namespace

template <typename T>
void attention(const Attention<T>& op) {
    switch (op.cache.format) {
        case KVFormat::same: return attend<T>(op);
        case KVFormat::int8_scaled: return attend_bytes<std::int8_t>(op);
        case KVFormat::e4m3_scaled:
        case KVFormat::e4m3: return attend_bytes<E4M3>(op);
    }
    throw std::invalid_argument("a format of the KV cache that is not served");
}

template void attention<bf16>(const Attention<bf16>&);
template void attention<float>(const Attention<float>&);

}  // namespace quire::ISA
