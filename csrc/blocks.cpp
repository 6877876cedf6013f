#include "blocks.hpp"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <stdexcept>

#include "convert.hpp"
#include "packing.hpp"
#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long ELEMENTS_AT_ONCE = 1 << 18;  // read by a thread
constexpr long MAX_GROUPS = 16;             // groups of a block
constexpr long MAX_ELEMENTS = 256;

constexpr float IQ4_VALUES[16] = {-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113};
constexpr float E2M1_VALUES[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};  // twice the numbers of 4 bits

float half(const std::uint8_t* place) { return float_of_half(static_cast<std::uint16_t>(place[0] | place[1] << 8)); }

// The low halves of `count` bytes, then their high halves.
void nibbles(const std::uint8_t* packed, long count, std::uint8_t* elements) {
    for (long i = 0; i < count; i++) elements[i] = packed[i] & 15;
    for (long i = 0; i < count; i++) elements[count + i] = packed[i] >> 4;
}

void nibbles_in_chunks(const std::uint8_t* packed, long num_bytes, long chunk, std::uint8_t* elements) {
    for (long i = 0; i < num_bytes; i += chunk) nibbles(packed + i, chunk, elements + 2 * i);
}

// The fifth bits of 32 elements, the lowest of four bytes first.
void add_fifth_bits(const std::uint8_t* bits, std::uint8_t* elements) {
    for (long i = 0; i < 32; i++) elements[i] |= (bits[i / 8] >> i % 8 & 1) << 4;
}

// Scales and minimums of the 8 groups of a Q4_K or Q5_K block. Bytes 4 to 15: the low 6 bits of the first and second four bytes are scales and
// minimums of groups 0 to 3; the last four bytes have the low 4 bits of those of groups 4 to 7, and the high 2 bits are at the
// top of the first eight.
void scales_and_minimums(const std::uint8_t* block, float* scales, float* minimums) {
    const float scale = half(block), minimum = half(block + 2);
    const std::uint8_t *first = block + 4, *second = block + 8, *last = block + 12;
    for (long i = 0; i < 4; i++) {
        scales[i] = scale * static_cast<float>(first[i] & 63);
        minimums[i] = minimum * static_cast<float>(second[i] & 63);
        scales[4 + i] = scale * static_cast<float>((last[i] & 15) | first[i] >> 6 << 4);
        minimums[4 + i] = minimum * static_cast<float>(last[i] >> 4 | second[i] >> 6 << 4);
    }
}

// A type: the sizes of a block, how a value is made of an element, and the parts of a block.
template <long bytes, long elements, long groups = 1>
struct Integers {
    static constexpr long BYTES = bytes, ELEMENTS = elements, GROUPS = groups;
    static constexpr bool HAS_MINIMUMS = false;
    static constexpr const float* CODEBOOK = nullptr;
    static constexpr int ZERO_POINT = 0;
    static constexpr float LARGEST = 256;
};

struct Q4_0 : Integers<18, 32> {
    static constexpr int ZERO_POINT = 8;
    static constexpr float LARGEST = 16;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float*) {
        scales[0] = half(block);
        nibbles(block + 2, 16, elements);
    }
};

struct Q4_1 : Integers<20, 32> {
    static constexpr bool HAS_MINIMUMS = true;
    static constexpr float LARGEST = 16;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float* minimums) {
        scales[0] = half(block);
        minimums[0] = -half(block + 2);
        nibbles(block + 4, 16, elements);
    }
};

struct Q5_0 : Integers<22, 32> {
    static constexpr int ZERO_POINT = 16;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float*) {
        scales[0] = half(block);
        nibbles(block + 6, 16, elements);
        add_fifth_bits(block + 2, elements);
    }
};

struct Q5_1 : Integers<24, 32> {
    static constexpr bool HAS_MINIMUMS = true;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float* minimums) {
        scales[0] = half(block);
        minimums[0] = -half(block + 2);
        nibbles(block + 8, 16, elements);
        add_fifth_bits(block + 4, elements);
    }
};

struct Q8_0 : Integers<34, 32> {
    static constexpr int ZERO_POINT = 128;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float*) {
        scales[0] = half(block);
        for (long i = 0; i < 32; i++) elements[i] = block[2 + i] ^ 0x80;
    }
};

struct Q4_K : Integers<144, 256, 8> {
    static constexpr bool HAS_MINIMUMS = true;
    static constexpr float LARGEST = 16;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float* minimums) {
        scales_and_minimums(block, scales, minimums);
        nibbles_in_chunks(block + 16, 128, 32, elements);
    }
};

struct Q5_K : Integers<176, 256, 8> {
    static constexpr bool HAS_MINIMUMS = true;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float* minimums) {
        scales_and_minimums(block, scales, minimums);
        nibbles_in_chunks(block + 48, 128, 32, elements);
        for (long group = 0; group < 8; group++)
            for (long i = 0; i < 32; i++) elements[32 * group + i] |= (block[16 + i] >> group & 1) << 4;
    }
};

struct Q6_K : Integers<210, 256, 16> {
    static constexpr int ZERO_POINT = 32;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float*) {
        const float scale = half(block + 208);
        for (long i = 0; i < 16; i++) scales[i] = scale * static_cast<float>(static_cast<std::int8_t>(block[192 + i]));
        nibbles_in_chunks(block, 128, 64, elements);
        for (long part = 0; part < 8; part++) {
            const std::uint8_t* high = block + 128 + part / 4 * 32;
            for (long i = 0; i < 32; i++) elements[32 * part + i] |= (high[i] >> 2 * (part % 4) & 3) << 4;
        }
    }
};

struct IQ4_NL : Integers<18, 32> {
    static constexpr const float* CODEBOOK = IQ4_VALUES;
    static constexpr float LARGEST = 127;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float*) {
        scales[0] = half(block);
        nibbles(block + 2, 16, elements);
    }
};

struct IQ4_XS : Integers<136, 256, 8> {
    static constexpr const float* CODEBOOK = IQ4_VALUES;
    static constexpr float LARGEST = 127;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float*) {
        const float scale = half(block);
        for (long i = 0; i < 8; i++) {
            const int low = block[4 + i / 2] >> 4 * (i % 2) & 15, high = block[2 + i / 4] >> 2 * (i % 4) & 3;
            scales[i] = scale * static_cast<float>((low | high << 4) - 32);
        }
        nibbles_in_chunks(block + 8, 128, 16, elements);
    }
};

struct MXFP4 : Integers<17, 32> {
    static constexpr const float* CODEBOOK = E2M1_VALUES;
    static constexpr float LARGEST = 12;
    static void read(const std::uint8_t* block, std::uint8_t* elements, float* scales, float*) {
        const std::uint32_t exponent = block[0];  // the scale is 2 ** (exponent - 128)
        scales[0] = float_of(exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23);
        nibbles(block + 1, 16, elements);
    }
};

// Call visit.operator()<Type>().
template <typename Visit>
auto with_type(BlockType type, Visit&& visit) {
    switch (type) {
        case BlockType::q4_0: return visit.template operator()<Q4_0>();
        case BlockType::q4_1: return visit.template operator()<Q4_1>();
        case BlockType::q5_0: return visit.template operator()<Q5_0>();
        case BlockType::q5_1: return visit.template operator()<Q5_1>();
        case BlockType::q8_0: return visit.template operator()<Q8_0>();
        case BlockType::q4_k: return visit.template operator()<Q4_K>();
        case BlockType::q5_k: return visit.template operator()<Q5_K>();
        case BlockType::q6_k: return visit.template operator()<Q6_K>();
        case BlockType::iq4_nl: return visit.template operator()<IQ4_NL>();
        case BlockType::iq4_xs: return visit.template operator()<IQ4_XS>();
        case BlockType::mxfp4: return visit.template operator()<MXFP4>();
    }
    throw std::invalid_argument("an unknown type of blocks");
}

template <typename Type>
void share_rows(long num_rows, long blocks_per_row, auto&& body) {
    share_range(num_rows, std::max<long>(1, ELEMENTS_AT_ONCE / (blocks_per_row * Type::ELEMENTS)), body);
}

// Whether check(row) is true of all rows. All threads take part.
template <typename Type>
bool all_rows(long num_rows, long blocks_per_row, auto&& check) {
    std::atomic<bool> is_true{true};
    share_rows<Type>(num_rows, blocks_per_row, [&](long begin, long end) {
        bool is_own_true = true;
        for (long row = begin; row < end; row++) is_own_true &= check(row);
        if (!is_own_true) is_true.store(false, std::memory_order_relaxed);
    });
    return is_true.load();
}

template <typename Type>
bool has_finite_values(const float* scales, const float* minimums) {
    bool is_finite = true;
    for (long group = 0; group < Type::GROUPS; group++) {
        float greatest = std::fabs(scales[group]) * Type::LARGEST;
        if constexpr (Type::HAS_MINIMUMS) greatest += std::fabs(minimums[group]);
        is_finite &= greatest < INFINITY;  // NaN is not
    }
    return is_finite;
}

template <typename Type>
void write_values(const std::uint8_t* elements, const float* scales, const float* minimums, float* values) {
    constexpr long size = Type::ELEMENTS / Type::GROUPS;
    for (long group = 0; group < Type::GROUPS; group++)
        for (long i = group * size; i < (group + 1) * size; i++) {
            if constexpr (Type::CODEBOOK != nullptr)
                values[i] = Type::CODEBOOK[elements[i]] * scales[group];
            else if constexpr (Type::HAS_MINIMUMS)
                values[i] = static_cast<float>(elements[i]) * scales[group] - minimums[group];
            else
                values[i] = static_cast<float>(elements[i] - Type::ZERO_POINT) * scales[group];
        }
}

template <typename Type>
void read_row(const std::uint8_t* blocks, long num_blocks, float* values) {
    std::uint8_t elements[MAX_ELEMENTS];
    float scales[MAX_GROUPS], minimums[MAX_GROUPS];
    for (long i = 0; i < num_blocks; i++) {
        Type::read(blocks + i * Type::BYTES, elements, scales, minimums);
        write_values<Type>(elements, scales, minimums, values + i * Type::ELEMENTS);
    }
}

}  // namespace

bool read_blocks(BlockType type, const std::uint8_t* rows, long stride, long num_rows, long blocks_per_row,
                 std::uint8_t* elements, float* scales, float* minimums) {
    return with_type(type, [&]<typename Type>() {
        return all_rows<Type>(num_rows, blocks_per_row, [&](long row) {
            bool is_finite = true;
            for (long i = 0; i < blocks_per_row; i++) {
                const long place = row * blocks_per_row + i;
                float* own_scales = scales + place * Type::GROUPS;
                float* own_minimums = Type::HAS_MINIMUMS ? minimums + place * Type::GROUPS : nullptr;
                Type::read(rows + row * stride + i * Type::BYTES, elements + place * Type::ELEMENTS, own_scales, own_minimums);
                is_finite &= has_finite_values<Type>(own_scales, own_minimums);
            }
            return is_finite;
        });
    });
}

bool copy_blocks(BlockType type, const std::uint8_t* rows, long stride, long num_rows, long blocks_per_row, std::uint8_t* copy) {
    return with_type(type, [&]<typename Type>() {
        return all_rows<Type>(num_rows, blocks_per_row, [&](long row) {
            std::uint8_t elements[MAX_ELEMENTS];
            float scales[MAX_GROUPS], minimums[MAX_GROUPS];
            const std::uint8_t* blocks = rows + row * stride;
            bool is_finite = true;
            for (long i = 0; i < blocks_per_row; i++) {
                Type::read(blocks + i * Type::BYTES, elements, scales, minimums);
                is_finite &= has_finite_values<Type>(scales, minimums);
            }
            std::memcpy(copy + row * blocks_per_row * Type::BYTES, blocks, blocks_per_row * Type::BYTES);
            return is_finite;
        });
    });
}

void read_block_values(BlockType type, const std::uint8_t* rows, long stride, long num_rows, long blocks_per_row, float* values) {
    with_type(type, [&]<typename Type>() {
        share_rows<Type>(num_rows, blocks_per_row, [&](long begin, long end) {
            for (long row = begin; row < end; row++)
                read_row<Type>(rows + row * stride, blocks_per_row, values + row * blocks_per_row * Type::ELEMENTS);
        });
    });
}

void look_up_blocks(BlockType type, const std::uint8_t* table, long num_rows, long blocks_per_row, const std::int64_t* row_ids,
                    long num_ids, float* values) {
    require_rows(row_ids, num_ids, num_rows);
    with_type(type, [&]<typename Type>() {
        share_rows<Type>(num_ids, blocks_per_row, [&](long begin, long end) {
            for (long i = begin; i < end; i++)
                read_row<Type>(table + row_ids[i] * blocks_per_row * Type::BYTES, blocks_per_row,
                               values + i * blocks_per_row * Type::ELEMENTS);
        });
    });
}

}  // namespace quire
