// One memcpy per copy and cache, shared among the threads: a block is one run of bytes. Bytes moved: each block once in,
// once out. Only where a step both reads and overwrites a block do the blocks of a cache pass through a buffer.
#include "block_copy.hpp"

#include <cstring>
#include <unordered_set>

#include "gang.hpp"

namespace quire {
namespace {

bool reads_what_it_overwrites(const std::int64_t* src, const std::int64_t* dst, long num_copies) {
    const std::unordered_set<std::int64_t> overwritten(dst, dst + num_copies);
    for (long i = 0; i < num_copies; i++)
        if (overwritten.count(src[i])) return true;
    return false;
}

}  // namespace

void swap_blocks(const std::vector<char*>& sources, const std::vector<char*>& destinations, long block_bytes,
                 const std::int64_t* src, const std::int64_t* dst, long num_copies) {
    share_range(static_cast<long>(sources.size()) * num_copies, 1, [&](long job, long) {
        const long cache = job / num_copies, i = job % num_copies;
        std::memcpy(destinations[cache] + dst[i] * block_bytes, sources[cache] + src[i] * block_bytes, block_bytes);
    });
}

void copy_blocks(const std::vector<char*>& caches, long block_bytes, const std::int64_t* src, const std::int64_t* dst,
                 long num_copies) {
    const long num_caches = static_cast<long>(caches.size());
    if (!reads_what_it_overwrites(src, dst, num_copies))
        return swap_blocks(caches, caches, block_bytes, src, dst, num_copies);
    share(num_caches, [&](Chunks& chunks) {
        std::vector<char> read(num_copies * block_bytes);
        for (long cache; (cache = chunks.take()) < num_caches;) {
            for (long i = 0; i < num_copies; i++)
                std::memcpy(&read[i * block_bytes], caches[cache] + src[i] * block_bytes, block_bytes);
            for (long i = 0; i < num_copies; i++)
                std::memcpy(caches[cache] + dst[i] * block_bytes, &read[i * block_bytes], block_bytes);
        }
    });
}

}  // namespace quire
