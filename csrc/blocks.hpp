// Blocks of GGUF tensors (ggml's structures of these names), read into elements of a byte each with the scales of groups.
// quire.formats.gguf.blocks says what they mean.
#pragma once

#include <cstdint>

namespace quire {

enum class BlockType : std::uint8_t { q4_0, q4_1, q5_0, q5_1, q8_0, q4_k, q5_k, q6_k, iq4_nl, iq4_xs, mxfp4 };

// Read rows of blocks, `stride` bytes apart. Write elements [num_rows, inputs], and scales and, if the type has them, minimums [num_rows, groups], all without gaps.
// Return whether all values are finite. All threads take part.
bool read_blocks(BlockType type, const std::uint8_t* rows, long stride, long num_rows, long blocks_per_row,
                 std::uint8_t* elements, float* scales, float* minimums);

// Copy rows of blocks, `stride` bytes apart, without gaps. Return whether all values are finite. All threads take part.
bool copy_blocks(BlockType type, const std::uint8_t* rows, long stride, long num_rows, long blocks_per_row, std::uint8_t* copy);

// Write the values [num_rows, inputs], without gaps. All threads take part.
void read_block_values(BlockType type, const std::uint8_t* rows, long stride, long num_rows, long blocks_per_row, float* values);

// Write the values [num_ids, inputs] of some rows of a table without gaps. A row outside of it is a std::out_of_range. All
// threads take part.
void look_up_blocks(BlockType type, const std::uint8_t* table, long num_rows, long blocks_per_row, const std::int64_t* row_ids,
                    long num_ids, float* values);

}  // namespace quire
