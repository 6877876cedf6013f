// Products of unsigned weights, four inputs of an output in each lane, and int8 activations. Sums are int32 and exact, so
// each instruction set takes the way that is its fastest: four products a lane at once, or pairs of int16.
#pragma once

#include "packing.hpp"
#include "products.hpp"

namespace quire::ISA {

template <int rows, int columns>
using IntegerSums = Sums<rows, columns, RegisterIntegers>;

struct Byte { std::uint8_t bits; };  // a weight of 8 bits

// Two weights of 4 bits, of quads of inputs that are half a tile, so many quads, apart.
template <int quads>
struct Nibbles { std::uint8_t bits; };

}  // namespace quire::ISA

namespace quire {

template <>
inline constexpr long PAIR<ISA::Byte> = 4;  // bytes of a word
template <int quads>
inline constexpr long PAIR<ISA::Nibbles<quads>> = 4;

}  // namespace quire

namespace quire::ISA {

template <typename W>
inline RegisterWords load_quads(const W* quads) {
    RegisterWords words;
    std::memcpy(&words, quads, sizeof words);
    return words;
}

template <typename X>
inline RegisterIntegers splat_word(const X* x) {
    std::int32_t word;
    std::memcpy(&word, x, sizeof word);
    return word - RegisterIntegers{};
}

// The sums of two products of int16, lane by lane.
inline RegisterIntegers multiply_pairs(RegisterIntegers a, RegisterIntegers b) {
#if defined(__AVX512BW__)
    return (RegisterIntegers)_mm512_madd_epi16((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (RegisterIntegers)_mm256_madd_epi16((__m256i)a, (__m256i)b);
#elif defined(__SSE2__)
    return (RegisterIntegers)_mm_madd_epi16((__m128i)a, (__m128i)b);
#else
    return (a << 16 >> 16) * (b << 16 >> 16) + (a >> 16) * (b >> 16);
#endif
}

// a + b of int32 and of int16. With AVX2's sixteen registers gcc 12 forms many products before it adds them, and keeps sums
// in memory: half the speed. An addition that it cannot look into stays where it stands.
inline RegisterIntegers add_words(RegisterIntegers a, RegisterIntegers b) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    __asm__("vpaddd %1, %0, %0" : "+x"(a) : "x"(b));
    return a;
#else
    return a + b;
#endif
}

#if defined(__AVX2__)
inline RegisterIntegers add_shorts(RegisterIntegers a, RegisterIntegers b) {
#if defined(__AVX512BW__)
    return (RegisterIntegers)_mm512_add_epi16((__m512i)a, (__m512i)b);
#else
    __asm__("vpaddw %1, %0, %0" : "+x"(a) : "x"(b));
    return a;
#endif
}

// Sums of two products beside each other, of unsigned bytes and signed ones, as int16.
inline RegisterIntegers multiply_bytes(RegisterIntegers a, RegisterIntegers b) {
#if defined(__AVX512BW__)
    return (RegisterIntegers)_mm512_maddubs_epi16((__m512i)a, (__m512i)b);
#else
    return (RegisterIntegers)_mm256_maddubs_epi16((__m256i)a, (__m256i)b);
#endif
}
#endif

// The even or the odd bytes of four, as int16.
inline RegisterWords pair_of(RegisterWords quads, bool is_odd) {
    typedef std::uint16_t Pairs __attribute__((vector_size(4 * REGISTER_LANES)));
    return is_odd ? (RegisterWords)((Pairs)quads >> 8) : quads & 0x00ff00ffu;
}

#if defined(__AVX512VNNI__)
template <>
struct Multiplier<Byte> {
    using X = std::int8_t;
    static constexpr int TURNS = 1;

    static RegisterIntegers values(const Byte* quads, int) { return (RegisterIntegers)load_quads(quads); }
    static RegisterIntegers factor(const X* x, int) { return splat_word(x); }
    static RegisterIntegers add(RegisterIntegers values, RegisterIntegers factor, RegisterIntegers sums) {
        return (RegisterIntegers)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)values, (__m512i)factor);
    }
};
#else
template <>
struct Multiplier<Byte> {
    using X = std::int16_t;  // even ones of four inputs come first
    static constexpr int TURNS = 2;

    static RegisterIntegers values(const Byte* quads, int turn) { return (RegisterIntegers)pair_of(load_quads(quads), turn); }
    static RegisterIntegers factor(const X* x, int turn) { return splat_word(x + 2 * turn); }
    static RegisterIntegers add(RegisterIntegers values, RegisterIntegers factor, RegisterIntegers sums) {
        return add_words(sums, multiply_pairs(values, factor));
    }
};
#endif

// Low nibbles first, then high ones, whose inputs come half a tile later; each as bytes.
template <int quads>
struct Multiplier<Nibbles<quads>> {
    using Each = Multiplier<Byte>;
    using X = typename Each::X;
    static constexpr int TURNS = 2 * Each::TURNS;

    static RegisterWords bytes(const Nibbles<quads>* words, bool is_high) {
        const RegisterWords both = load_quads(words);
        return (is_high ? both >> 4 : both) & 0x0f0f0f0fu;
    }
    static RegisterIntegers values(const Nibbles<quads>* words, int turn) {
        const RegisterWords of_turn = bytes(words, turn >= Each::TURNS);
        return (RegisterIntegers)(Each::TURNS == 1 ? of_turn : pair_of(of_turn, turn % Each::TURNS));
    }
    static RegisterIntegers factor(const X* x, int turn) { return Each::factor(x + (turn >= Each::TURNS ? 4 * quads : 0), turn % Each::TURNS); }
    static RegisterIntegers add(RegisterIntegers values, RegisterIntegers factor, RegisterIntegers sums) { return Each::add(values, factor, sums); }
};

// Sums of one strip, several of each output: of few rows, a product would wait for the one before it.
template <int rows>
struct Chains {
#if defined(__AVX512VNNI__)
    static constexpr int COUNT = rows > 2 ? 2 : 4;
#else
    static constexpr int COUNT = 1;  // only the last addition of several instructions would wait
#endif
    RegisterIntegers parts[COUNT][rows][PARTS] = {};

    // Add a word's products to the chains from `chain` on, those of each turn to one of them.
    template <typename W>
    void add(int chain, const W* words, const Factor<W>* factors, long stride) {
        using Each = Multiplier<W>;
#pragma GCC unroll 4
        for (int turn = 0; turn < Each::TURNS; turn++)
            for (int p = 0; p < PARTS; p++) {
                const RegisterIntegers lanes = Each::values(words + p * REGISTER_LANES * 4, turn);
                for (int r = 0; r < rows; r++) {
                    RegisterIntegers& sum = parts[(chain + turn) % COUNT][r][p];
                    sum = Each::add(lanes, Each::factor(factors + r * stride, turn), sum);
                }
            }
    }

    // Add the products of `count` words, a multiple of four.
    template <typename W, long ahead>
    void add_all(const W* words, const Factor<W>* factors, long stride, long count) {
        for (long i = 0; i < count; i += 4)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                __builtin_prefetch(words + (i + j) * 4 * STRIP + ahead);
                add(j * Multiplier<W>::TURNS, words + (i + j) * 4 * STRIP, factors + (i + j) * 4, stride);
            }
    }
    void add_to(IntegerSums<rows, 1>& sums) const {
        for (int r = 0; r < rows; r++)
            for (int p = 0; p < PARTS; p++)
                for (int c = 0; c < COUNT; c++) sums.parts[r][p] += parts[c][r][p];
    }
};

// The products of some tiles, tiles of `tile_quads` quads; X are the factors.
template <typename W>
struct TileProducts;

template <>
struct TileProducts<Byte> {
    using X = Factor<Byte>;

    template <long ahead, int rows, int columns>
    static void add(IntegerSums<rows, columns>& sums, const Byte* const (&weights)[columns], const X* x, long stride, long num_quads) {
        if constexpr (columns > 1 || ahead == 0) {
            sums.template add<Byte, ahead>(weights, 4 * STRIP, x, stride, num_quads);
        } else {
            Chains<rows> chains;
            chains.template add_all<Byte, ahead>(weights[0], x, stride, num_quads);
            chains.add_to(sums);
        }
    }
};

#if defined(__AVX2__) && !defined(__AVX512VNNI__)

// Two products of a nibble and a byte are at most 2 * 15 * 127: eight such sums fit int16.
template <int quads>
struct TileProducts<Nibbles<quads>> {
    using X = std::int8_t;
    static constexpr int SUMS_IN_SHORT = 8;

    template <long ahead, int rows, int columns>
    static void add(IntegerSums<rows, columns>& sums, const Nibbles<quads>* const (&weights)[columns], const X* x, long stride, long num_quads) {
        const RegisterIntegers ones = RegisterIntegers{} + 0x00010001;
        for (long tile = 0; tile < num_quads; tile += 2 * quads)
            for (long quad = 0; quad < quads; quad += SUMS_IN_SHORT / 2) {
                RegisterIntegers shorts[rows][columns * PARTS] = {};
                add_few<ahead>(shorts, weights, (tile / 2 + quad) * 4 * STRIP, x + (tile + quad) * 4, stride);
                for (int r = 0; r < rows; r++)
                    for (int c = 0; c < columns * PARTS; c++)
                        sums.parts[r][c] += multiply_pairs(shorts[r][c], ones);
            }
    }

private:
    template <long ahead, int rows, int columns, int parts>
    static void add_few(RegisterIntegers (&shorts)[rows][parts], const Nibbles<quads>* const (&weights)[columns], long at, const X* x, long stride) {
        for (int i = 0; i < SUMS_IN_SHORT / 2; i++) {
            if constexpr (ahead > 0) __builtin_prefetch(weights[0] + at + i * 4 * STRIP + ahead);
            for (int is_high = 0; is_high < 2; is_high++) {
                RegisterIntegers lanes[parts];
                for (int c = 0; c < parts; c++)
                    lanes[c] = (RegisterIntegers)Multiplier<Nibbles<quads>>::bytes(weights[c / PARTS] + at + i * 4 * STRIP + c % PARTS * REGISTER_LANES * 4, is_high);
                for (int r = 0; r < rows; r++) {
                    const RegisterIntegers factor = splat_word(x + r * stride + (i + is_high * quads) * 4);
                    for (int c = 0; c < parts; c++) shorts[r][c] = add_shorts(shorts[r][c], multiply_bytes(lanes[c], factor));
                }
            }
        }
    }
};

#else

template <int quads>
struct TileProducts<Nibbles<quads>> {
    using X = Factor<Nibbles<quads>>;

    template <long ahead, int rows, int columns>
    static void add(IntegerSums<rows, columns>& sums, const Nibbles<quads>* const (&weights)[columns], const X* x, long stride, long num_quads) {
        if constexpr (columns > 1 || ahead == 0) {
            for (long tile = 0; tile < num_quads; tile += 2 * quads) {
                const Nibbles<quads>* of_tile[columns];
                for (int c = 0; c < columns; c++) of_tile[c] = weights[c] + tile / 2 * 4 * STRIP;
                sums.template add<Nibbles<quads>>(of_tile, 4 * STRIP, x + tile * 4, stride, quads);
            }
        } else {
            Chains<rows> chains;
            for (long tile = 0; tile < num_quads; tile += 2 * quads)
                chains.template add_all<Nibbles<quads>, ahead>(weights[0] + tile / 2 * 4 * STRIP, x + tile * 4, stride, quads);
            chains.add_to(sums);
        }
    }
};

#endif

}  // namespace quire::ISA
