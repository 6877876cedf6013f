// Division of a step's attention into work items. The same for every instruction set; it changes no bit of a result.
//
// A query tile is some consecutive tokens of one sequence with some KV heads and all their query heads: all KV heads where
// the tile is bound by reading, since the heads of a block lie side by side in memory; else one. It reads its context in
// partitions, PARTITION tokens at fixed absolute positions. A work item is what one thread computes
// without a break: a query tile over some of its partitions; over all of them, unless the tile is one of a few and large.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace quire {

constexpr long PARTITION = 256;  // tokens; 64 and 128 decode slower, 512 is no faster

struct QueryTile {
    long sequence, kv_head, num_kv_heads;
    long first_token, num_tokens;           // places in the flat batch
    long first_position;                    // place of the first token in its sequence
    long first_partition, end_partition;
    long results = -1;                      // index of the first partition's result where several items share the tile
};

struct WorkItem {
    long tile, first_partition, end_partition;
};

struct AttentionWork {
    std::vector<QueryTile> tiles;
    std::vector<WorkItem> items;   // the longest first
    long max_rows = 0;                         // token x query head under one KV head, of the highest tile
    long num_results = 0, max_split_rows = 0;  // results to keep, per partition and KV head; rows of their highest tile
};

struct AttentionShape : AttentionParameters {
    const std::int32_t *query_starts, *context_lens, *seen_ends;
    long num_seqs;
};

// Cut a step's attention for so many threads, into vectors that are used again from call to call.
void cut_work(const AttentionShape& shape, long num_threads, AttentionWork& work);

}  // namespace quire
