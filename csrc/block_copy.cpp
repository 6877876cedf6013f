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

void copy_blocks(const std::vector<char*>& caches, long block_bytes, const std::int64_t* src, const std::int64_t* dst,
                 long num_copies) {
    const long num_caches = static_cast<long>(caches.size());
    if (!reads_what_it_overwrites(src, dst, num_copies)) {
        share_range(num_caches * num_copies, 1, [&](long job, long) {
            char* cache = caches[job / num_copies];
            const long i = job % num_copies;
            std::memcpy(cache + dst[i] * block_bytes, cache + src[i] * block_bytes, block_bytes);
        });
        return;
    }
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
