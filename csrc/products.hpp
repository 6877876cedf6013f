// Matrix products by vectors, for linear layers and for both products of attention: rows of factors times columns of sixteen
// packed values, with sums in registers. Each sum is one lane and adds in ascending order, whatever the number of rows
// and columns beside it.
#pragma once

#include <type_traits>
#include <utility>

#include "cache_layout.hpp"
#include "vec.hpp"

namespace quire::ISA {

// How sixteen words of packed values, a word one float or a pair of bfloat16, are multiplied: in `TURNS`, by factors X.
template <typename T>
struct Multiplier {
    using X = float;
    static constexpr int TURNS = PAIR<T>;

    static Register values(const T* words, int turn) {
        RegisterWords bits;
        std::memcpy(&bits, words, sizeof bits);
        if constexpr (TURNS == 1) return (Register)bits;
        return (Register)(turn == 0 ? bits << 16 : bits & 0xffff0000u);
    }
    static Register factor(const X* x, int turn) { return x[turn] - Register{}; }
    static Register add(Register values, Register factor, Register sums) { return multiply_add(values, factor, sums); }
};

// A word is one int8, which is widened as it is read.
template <>
struct Multiplier<std::int8_t> {
    using X = float;
    static constexpr int TURNS = 1;

    static Register values(const std::int8_t* p, int) {
#if defined(__AVX512F__)
        return (Register)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#elif defined(__FMA__)
        return (Register)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
#else
        typedef std::int32_t Word __attribute__((vector_size(16)));  // four bytes each, the highest one of which counts
        typedef std::uint8_t Bytes __attribute__((vector_size(16)));
        typedef std::uint16_t Pairs __attribute__((vector_size(16)));
        std::int32_t four;
        std::memcpy(&four, p, sizeof four);
        const Bytes bytes = (Bytes)Word{four};
        const Pairs twice = (Pairs)__builtin_shufflevector(bytes, bytes, 0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
        return __builtin_convertvector((Word)__builtin_shufflevector(twice, twice, 0, 0, 1, 1, 2, 2, 3, 3) >> 24, Register);
#endif
    }
    static Register factor(const X* x, int) { return *x - Register{}; }
    static Register add(Register values, Register factor, Register sums) { return multiply_add(values, factor, sums); }
};

#ifdef __AVX512BF16__
// Both products of a pair at once, at twice the rate. Subnormal numbers count as zeros.
template <>
struct Multiplier<bf16> {
    using X = bf16;
    static constexpr int TURNS = 1;

    static Register values(const bf16* words, int) { return (Register)_mm512_loadu_si512(words); }
    static Register factor(const X* x, int) {
        std::int32_t pair;
        std::memcpy(&pair, x, sizeof pair);
        return (Register)_mm512_set1_epi32(pair);
    }
    static Register add(Register values, Register factor, Register sums) {
        return (Register)_mm512_dpbf16_ps((__m512)sums, (__m512bh)values, (__m512bh)factor);
    }
};
#endif

template <typename T>
using Factor = typename Multiplier<T>::X;

// Sums that are in registers at once, so that weights and a factor find room beside them.
#if defined(__AVX512F__)
constexpr int SUM_REGISTERS = 24, MAX_ROWS = 6;
#elif defined(__FMA__)
constexpr int SUM_REGISTERS = 10, MAX_ROWS = 5;
#else
constexpr int SUM_REGISTERS = 8, MAX_ROWS = 2;
#endif

constexpr long STEPS_BETWEEN = 8;  // products between two calls of what is done meanwhile

struct Nothing {
    void operator()() const {}
};

// rows x columns x sixteen sums, of float or of int32.
template <int rows, int columns, typename Part = Register>
struct Sums {
    Part parts[rows][columns * PARTS] = {};

    // Sums are sixteen to a column, rows `stride` apart.
    // Register by register: gcc copies whole arrays by way of the stack.
    void load(const float* from, long stride) {
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns * PARTS; c++) std::memcpy(&parts[r][c], from + r * stride + c * REGISTER_LANES, sizeof(Part));
    }
    void store(float* to, long stride) const {
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < columns * PARTS; c++) std::memcpy(to + r * stride + c * REGISTER_LANES, &parts[r][c], sizeof(Part));
    }

    // Add `steps` words of each column, `step` elements apart, times as many words of each row's factors, end to end.
    // `meanwhile` is called before every STEPS_BETWEEN of them.
    template <typename T, long ahead = 0, typename Meanwhile = Nothing>
    void add(const T* const (&values)[columns], long step, const Factor<T>* factors, long stride, long steps,
             Meanwhile&& meanwhile = {}) {
        if constexpr (std::is_same_v<std::remove_cvref_t<Meanwhile>, Nothing>) {
            add_steps<T, ahead>(values, step, factors, stride, 0, steps);
        } else {
            for (long i = 0; i < steps; i += STEPS_BETWEEN) {
                meanwhile();
                add_steps<T, ahead>(values, step, factors, stride, i, i + STEPS_BETWEEN < steps ? i + STEPS_BETWEEN : steps);
            }
        }
    }

private:
    template <typename T, long ahead>
    [[gnu::always_inline]] void add_steps(const T* const (&values)[columns], long step, const Factor<T>* factors, long stride,
                                          long first, long end) {
        using Each = Multiplier<T>;
        for (long i = first; i < end; i++) {
            if constexpr (ahead > 0) __builtin_prefetch(values[0] + i * step + ahead / sizeof(T));
            for (int turn = 0; turn < Each::TURNS; turn++) {
                Part lanes[columns * PARTS];
                for (int c = 0; c < columns * PARTS; c++)
                    lanes[c] = Each::values(values[c / PARTS] + i * step + c % PARTS * REGISTER_LANES * PAIR<T>, turn);
                for (int r = 0; r < rows; r++) {
                    const Part factor = Each::factor(factors + r * stride + i * PAIR<T>, turn);
                    for (int c = 0; c < columns * PARTS; c++) parts[r][c] = Each::add(lanes[c], factor, parts[r][c]);
                }
            }
        }
    }
};

// Cut rows into groups of up to `most`, as equal as can be; call work(how many, as a constant; the first of them).
template <int most, typename Work>
inline void in_groups(long rows, Work&& work) {
    const long groups = (rows + most - 1) / most;
    for (long i = 0, first = 0, end; i < groups; i++, first = end) {
        end = rows * (i + 1) / groups;
        [&]<int... fewer>(std::integer_sequence<int, fewer...>) {
            ((end - first == fewer + 1 ? work(std::integral_constant<int, fewer + 1>(), first) : void()), ...);
        }(std::make_integer_sequence<int, most>());
    }
}

}  // namespace quire::ISA
