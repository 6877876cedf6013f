// Digests of memory and of files; digest.hpp says what they find.
#include "digest.hpp"

#include <unistd.h>

#include <bit>
#include <cerrno>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long PIECE_BYTES = 1 << 20;  // stays in a core's cache between reading and digesting
constexpr int LANES = 8;               // products at once: one depends on the last of its lane alone
constexpr std::uint64_t PRIME = 0x9E3779B185EBCA87;

std::uint64_t mixed(std::uint64_t sum, std::uint64_t word) { return std::rotl(sum ^ word, 29) * PRIME; }

// Each step can be undone, given the other words, so no change of one word is lost. The rotation brings the highest
// bits down, which a product would leave where they are.
std::uint64_t digest_of_piece(const char* bytes, long count) {
    std::uint64_t lanes[LANES];
    for (int lane = 0; lane < LANES; lane++) lanes[lane] = PRIME + lane;
    std::uint64_t words[LANES];
    for (; count >= static_cast<long>(sizeof words); bytes += sizeof words, count -= sizeof words) {
        std::memcpy(words, bytes, sizeof words);
        for (int lane = 0; lane < LANES; lane++) lanes[lane] = mixed(lanes[lane], words[lane]);
    }
    std::memset(words, 0, sizeof words);
    std::memcpy(words, bytes, count);
    std::uint64_t sum = count;
    for (int lane = 0; lane < LANES; lane++) sum = mixed(sum, mixed(lanes[lane], words[lane]));
    return mixed(sum, sum >> 32);
}

template <typename Fill>
std::uint64_t digest_of_pieces(char* memory, long num_bytes, Fill&& fill) {
    std::vector<std::uint64_t> digests((num_bytes + PIECE_BYTES - 1) / PIECE_BYTES);
    share_range(num_bytes, PIECE_BYTES, [&](long begin, long end) {
        fill(memory + begin, begin, end - begin);
        digests[begin / PIECE_BYTES] = digest_of_piece(memory + begin, end - begin);
    });
    return digest_of_piece(reinterpret_cast<const char*>(digests.data()), digests.size() * sizeof digests[0]);
}

void read_piece(int file, char* memory, long offset, long count) {
    while (count > 0) {
        const ssize_t found = pread(file, memory, count, offset);
        if (found < 0 && errno == EINTR) continue;
        if (found < 0) throw std::runtime_error(std::string("cannot be read: ") + std::strerror(errno));
        if (found == 0) throw std::runtime_error("ends at byte " + std::to_string(offset));
        memory += found, offset += found, count -= found;
    }
}

}  // namespace

std::uint64_t digest(const void* memory, long num_bytes) {
    return digest_of_pieces(static_cast<char*>(const_cast<void*>(memory)), num_bytes, [](char*, long, long) {});
}

std::uint64_t read_file(int file, long offset, void* memory, long num_bytes) {
    return digest_of_pieces(static_cast<char*>(memory), num_bytes, [=](char* piece, long begin, long count) {
        read_piece(file, piece, offset + begin, count);
    });
}

}  // namespace quire
