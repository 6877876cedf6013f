// One memcpy per copy and cache, shared among the threads: a block is one run of bytes. Bytes moved: each block once in,
// once out.
#include <cstring>

#include "thread_pool.hpp"
#include "kernels.hpp"

namespace quire {

void swap_blocks(const std::vector<std::uintptr_t>& sources, const std::vector<std::uintptr_t>& destinations,
                 long block_bytes, const std::int64_t* src, const std::int64_t* dst, long num_copies) {
    share_range(static_cast<long>(sources.size()) * num_copies, 1, [&](long job, long) {
        const long cache = job / num_copies, i = job % num_copies;
        std::memcpy(reinterpret_cast<char*>(destinations[cache]) + dst[i] * block_bytes,
                    reinterpret_cast<const char*>(sources[cache]) + src[i] * block_bytes, block_bytes);
    });
}

}  // namespace quire
