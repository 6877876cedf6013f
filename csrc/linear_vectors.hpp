// Linear layers by vectors: rows x strips of accumulators, a strip's sixteen outputs in the lanes of one, weights widened
// to float in registers. Weights are read once from memory, by all rows from the second-level cache.
#pragma once

#include "gang.hpp"
#include "linear_output.hpp"

namespace quire::ISA {

// Sums that fill the registers: sixteen of AVX-512's 32; elsewhere a sum is four registers, and four sums were the fastest.
#ifdef __AVX512F__
constexpr int ROWS = 4, STRIPS = 4;
#else
constexpr int ROWS = 2, STRIPS = 2;
#endif

inline long padded_inputs(const Linear<float>& op) { return op.in_features; }
inline long padded_inputs(const Linear<bf16>& op) { return num_tiles(op.in_features) * TILE_INPUTS; }

template <int rows, int strips>
void add_products(const float* w, const float* x, long inputs, Floats (&sums)[rows][strips]) {
    for (long i = 0; i < inputs; i++)
        for (int s = 0; s < strips; s++) {
            const Floats weights = load(w + (s * inputs + i) * STRIP);
            for (int r = 0; r < rows; r++) sums[r][s] = multiply_add(weights, splat(x[r * inputs + i]), sums[r][s]);
        }
}

template <int rows, int strips>
void add_products(const bf16* w, const float* x, long inputs, Floats (&sums)[rows][strips]) {
    for (long i = 0; i < inputs; i += 2)
        for (int s = 0; s < strips; s++) {
            Words pairs;
            std::memcpy(&pairs, w + (s * inputs + i) * STRIP, sizeof pairs);
            const Floats even = as_floats(pairs << 16), odd = as_floats(pairs & 0xffff0000u);
            for (int r = 0; r < rows; r++) {
                sums[r][s] = multiply_add(even, splat(x[r * inputs + i]), sums[r][s]);
                sums[r][s] = multiply_add(odd, splat(x[r * inputs + i + 1]), sums[r][s]);
            }
        }
}

template <typename T, int rows, int strips>
void block(const Linear<T>& op, const float* x, long inputs, long row, long strip) {
    Floats sums[rows][strips] = {};
    add_products(op.packed + strip * STRIP * inputs, x + row * inputs, inputs, sums);
    for (int r = 0; r < rows; r++) {
        if constexpr (strips == 1) finish(op, row + r, strip, sums[r][0]);
        for (int s = 0; s + 1 < strips; s += 2) finish_pair(op, row + r, strip + s, sums[r][s], sums[r][s + 1]);
    }
}

template <int strips, typename T>
void all_rows(const Linear<T>& op, const float* x, long inputs, long strip) {
    long row = 0;
    for (; row + ROWS <= op.num_rows; row += ROWS) block<T, ROWS, strips>(op, x, inputs, row, strip);
    for (; row < op.num_rows; row++) block<T, 1, strips>(op, x, inputs, row, strip);
}

// Rows as floats, end to end, padded with zeros as the weights are.
template <typename T>
void widen_rows(const Linear<T>& op, long inputs, float* x) {
    constexpr long rows_at_once = 16;
    share_range(op.num_rows, rows_at_once, [&](long begin, long end) {
        for (long row = begin; row < end; row++)
            for (long i = 0; i < inputs; i += LANES) {
                const long count = std::min<long>(LANES, inputs - i), there = std::min<long>(count, op.in_features - i);
                store_some(x + row * inputs + i, load_some(op.x + row * op.x_stride + i, std::max(there, 0L)), count);
            }
    });
}

template <typename T>
void linear_by_vectors(const Linear<T>& op) {
    const long inputs = padded_inputs(op), strips = layer_strips(op);
    static thread_local Aligned<float> scratch;
    float* x = scratch.at_least(op.num_rows * inputs);
    widen_rows(op, inputs, x);
    const long piece = rounded_up(strips_at_once(strips, inputs * STRIP * sizeof(T)), STRIPS);
    share_range(strips, piece, [&](long strip, long end) {
        for (; strip + STRIPS <= end; strip += STRIPS) all_rows<STRIPS>(op, x, inputs, strip);
        for (; strip + 2 <= end; strip += 2) all_rows<2>(op, x, inputs, strip);
        if (strip < end) all_rows<1>(op, x, inputs, strip);
    });
}

}  // namespace quire::ISA
