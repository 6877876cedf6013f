// Copy blocks within the caches of all layers at once (Kwon et al. 2023, section 5.1).
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

// Copy block src[i] over block dst[i] in each cache, as if all sources were read before anything is written.
void copy_blocks(const std::vector<char*>& caches, long block_bytes, const std::int64_t* src, const std::int64_t* dst,
                 long num_copies);

}  // namespace quire
