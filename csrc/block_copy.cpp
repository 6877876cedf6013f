// One memcpy per copy and cache, shared among the threads: a block is one run of bytes. Bytes moved: each block once in,
// once out. Only where a step both reads and overwrites a block do the blocks of a cache pass through a buffer.
#include "block_copy.hpp"

#include <cstring>
#include <unordered_set>

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
#pragma omp parallel for collapse(2) schedule(static)
        for (long cache = 0; cache < num_caches; cache++)
            for (long i = 0; i < num_copies; i++)
                std::memcpy(caches[cache] + dst[i] * block_bytes, caches[cache] + src[i] * block_bytes, block_bytes);
        return;
    }
#pragma omp parallel
    {
        std::vector<char> read(num_copies * block_bytes);
#pragma omp for schedule(static)
        for (long cache = 0; cache < num_caches; cache++) {
            for (long i = 0; i < num_copies; i++)
                std::memcpy(&read[i * block_bytes], caches[cache] + src[i] * block_bytes, block_bytes);
            for (long i = 0; i < num_copies; i++)
                std::memcpy(caches[cache] + dst[i] * block_bytes, &read[i * block_bytes], block_bytes);
        }
    }
}

}  // namespace quire
