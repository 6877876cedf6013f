// Copy blocks within the caches of all layers at once, or from one pool's caches to another's (Kwon et al. 2023, sections
// 4.5 and 5.1).
#pragma once

#include <cstdint>
#include <vector>

namespace quire {

// Copy block src[i] over block dst[i] in each cache, as if all sources were read before anything is written.
void copy_blocks(const std::vector<char*>& caches, long block_bytes, const std::int64_t* src, const std::int64_t* dst,
                 long num_copies);

// Copy block src[i] of each source over block dst[i] of its destination; the two pools share no memory.
void swap_blocks(const std::vector<char*>& sources, const std::vector<char*>& destinations, long block_bytes,
                 const std::int64_t* src, const std::int64_t* dst, long num_copies);

}  // namespace quire
