#include "attention_work.hpp"

#include <algorithm>

namespace quire {
namespace {

constexpr long MAX_ROWS = 256;       // rows of a query tile: its running results stay in the second-level cache
constexpr long FEW_ROWS = 32;        // tiles up to this many rows are bound by reading
constexpr long ITEMS_PER_THREAD = 8;
constexpr long READING = 2;          // a partition's keys and values cost as much as this many row tiles' arithmetic

long tokens_per_tile(const AttentionShape& shape, long group, long num_threads) {
    long tokens = std::max(1L, MAX_ROWS / group);
    const long num_tokens = shape.query_starts[shape.num_seqs] - shape.query_starts[0];
    while (tokens > 1 && tokens * group > FEW_ROWS &&
           num_tokens * shape.num_kv_heads < tokens * num_threads * ITEMS_PER_THREAD)
        tokens = (tokens + 1) / 2;
    return tokens;
}

long cost(const QueryTile& tile, long group) {
    const long row_tiles = (tile.num_tokens * group + 15) / 16;
    return (tile.end_partition - tile.first_partition) * tile.num_kv_heads * (READING + row_tiles);
}

void cut_sequence(const AttentionShape& shape, long sequence, long tokens, long group, AttentionWork& work) {
    const long begin = shape.query_starts[sequence], end = shape.query_starts[sequence + 1];
    const long start = shape.context_lens[sequence] - (end - begin);  // position of the first token
    for (long token = begin; token < end; token += tokens) {
        QueryTile tile;
        tile.sequence = sequence;
        tile.first_token = token;
        tile.num_tokens = std::min(tokens, end - token);
        tile.first_position = start + token - begin;
        tile.first_partition = shape.window ? std::max(0L, tile.first_position - shape.window + 1) / PARTITION : 0;
        const long last_seen = shape.seen_ends ? shape.seen_ends[token + tile.num_tokens - 1] - 1
                                               : tile.first_position + tile.num_tokens - 1 + shape.num_ahead();
        tile.end_partition = std::min<long>(last_seen, shape.context_lens[sequence] - 1) / PARTITION + 1;
        tile.num_kv_heads = tile.num_tokens * group <= FEW_ROWS ? shape.num_kv_heads : 1;
        for (tile.kv_head = 0; tile.kv_head < shape.num_kv_heads; tile.kv_head += tile.num_kv_heads) work.tiles.push_back(tile);
    }
}

void cut_tile(QueryTile& tile, long index, long rows, long num_items, AttentionWork& work) {
    const long partitions = tile.end_partition - tile.first_partition;
    num_items = std::min(num_items, partitions);
    if (num_items > 1) {
        tile.results = work.num_results;
        work.num_results += partitions * tile.num_kv_heads;
        work.max_split_rows = std::max(work.max_split_rows, rows);
    }
    for (long i = 0; i < num_items; i++)
        work.items.push_back({index, tile.first_partition + partitions * i / num_items,
                               tile.first_partition + partitions * (i + 1) / num_items});
}

}  // namespace

void cut_work(const AttentionShape& shape, long num_threads, AttentionWork& work) {
    const long group = shape.num_heads / shape.num_kv_heads, tokens = tokens_per_tile(shape, group, num_threads);
    work.tiles.clear();
    work.items.clear();
    work.max_rows = work.num_results = work.max_split_rows = 0;
    for (long sequence = 0; sequence < shape.num_seqs; sequence++) cut_sequence(shape, sequence, tokens, group, work);
    long total = 0;
    for (const QueryTile& tile : work.tiles) total += cost(tile, group);
    const long enough = std::max(1L, total / (num_threads * ITEMS_PER_THREAD));
    for (std::size_t i = 0; i < work.tiles.size(); i++) {
        QueryTile& tile = work.tiles[i];
        const long rows = tile.num_tokens * group;
        work.max_rows = std::max(work.max_rows, rows);
        const bool may_split = num_threads > 1 && (rows <= FEW_ROWS || tile.num_tokens == 1);
        cut_tile(tile, static_cast<long>(i), rows, may_split ? (cost(tile, group) + enough - 1) / enough : 1, work);
    }
    const auto length = [&](const WorkItem& item) {
        const QueryTile& tile = work.tiles[item.tile];
        return cost(tile, group) / (tile.end_partition - tile.first_partition) * (item.end_partition - item.first_partition);
    };
    const auto is_longer = [&](const WorkItem& a, const WorkItem& b) { return length(a) > length(b); };
    std::stable_sort(work.items.begin(), work.items.end(), is_longer);
}

}  // namespace quire
