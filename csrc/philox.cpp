// Random numbers without state: a block cipher turns (seed, index) into bits, ten rounds of two products.
#include "sampling.hpp"

namespace quire {
namespace {

using Word = std::uint32_t;

double uniform(std::uint64_t seed, std::uint64_t index) {
    Word words[4] = {Word(index), Word(index >> 32), 0, 0}, keys[2] = {Word(seed), Word(seed >> 32)};
    for (int round = 0; round < 10; round++) {
        const std::uint64_t first = std::uint64_t(words[0]) * 0xD2511F53u, second = std::uint64_t(words[2]) * 0xCD9E8D57u;
        const Word mixed = Word(second >> 32) ^ words[1] ^ keys[0], other = Word(first >> 32) ^ words[3] ^ keys[1];
        words[0] = mixed, words[1] = Word(second), words[2] = other, words[3] = Word(first);
        keys[0] += 0x9E3779B9u, keys[1] += 0xBB67AE85u;
    }
    return static_cast<double>((words[0] | std::uint64_t(words[1]) << 32) >> 11) * 0x1p-53;
}

}  // namespace

void draw_uniforms(const std::uint64_t* seeds, const std::int64_t* indices, long count, double* numbers) {
    for (long i = 0; i < count; i++) numbers[i] = uniform(seeds[i], indices[i]);
}

}  // namespace quire
