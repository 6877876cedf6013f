// Digests of memory and of files, at the speed at which they are read: they find damage, not forgery.
//
// A change within one 8-byte word changes the digest for certain, any other with a probability of 1 - 2^-64. Memory is
// cut into pieces of 1 MiB, which all threads share, and the digest is that of the digests of the pieces.
#pragma once

#include <cstdint>

namespace quire {

std::uint64_t digest(const void* memory, long num_bytes);

// Read bytes of a file, beginning at `offset`, and return the digest of what is in memory then. std::runtime_error if the
// file ends before, or cannot be read.
std::uint64_t read_file(int file, long offset, void* memory, long num_bytes);

}  // namespace quire
