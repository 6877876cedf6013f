// The two products of attention by vectors, in float: sixteen tokens in the lanes of scores, sixteen dimensions in the
// lanes of weighted values. A lane is one sum, over dimensions or over tokens in ascending order.
#pragma once

#include "attention_scores.hpp"

namespace quire::ISA {

inline void add_product(const float* rows, const float* factors, long factor_stride, int num_factors, Floats* sums) {
    const Floats values = load(rows);
    for (int r = 0; r < num_factors; r++) sums[r] = multiply_add(values, splat(factors[r * factor_stride]), sums[r]);
}

inline void add_product(const bf16* rows, const float* factors, long factor_stride, int num_factors, Floats* sums) {
    Words pairs;
    std::memcpy(&pairs, rows, sizeof pairs);
    const Floats even = as_floats(pairs << 16), odd = as_floats(pairs & 0xffff0000u);
    for (int r = 0; r < num_factors; r++) {
        sums[r] = multiply_add(even, splat(factors[r * factor_stride]), sums[r]);
        sums[r] = multiply_add(odd, splat(factors[r * factor_stride + 1]), sums[r]);
    }
}

template <typename T>
struct ByVectors {
    using Query = float;
    static constexpr long KEY_ROWS = 1;  // the number of rows of keys is a multiple of this
    static constexpr int ROWS = 4, COLUMNS = 2;  // of registers that hold sums: 4 x 2 x 16 lanes

    struct Session {
        explicit Session(long) {}
    };

    template <typename Meanwhile>
    static void scores(const float* query, long query_stride, long rows, const PartitionView<T>& view, long key_rows,
                       Columns computed, float* scores, Meanwhile& meanwhile) {
        for (long i = computed.first(); i < computed.last(); i += COLUMNS * GROUP) {
            meanwhile();
            for (long r = 0; r < rows; r += ROWS) {
                const auto* keys = view.keys + i / GROUP;
                const float* q = query + r * query_stride;
                float* out = scores + r * SCORE_STRIDE + i;
                switch (std::min<long>(rows - r, ROWS)) {
                    case 1: score<1>(q, query_stride, keys, key_rows, out); break;
                    case 2: score<2>(q, query_stride, keys, key_rows, out); break;
                    case 3: score<3>(q, query_stride, keys, key_rows, out); break;
                    default: score<4>(q, query_stride, keys, key_rows, out);
                }
            }
        }
    }

    // Scores become weights, and these the weighted values, with the sums of weights behind them.
    template <typename Meanwhile>
    static void weigh(float* scores, const float* highest, float scale, long rows, const PartitionView<T>& view, long padded,
                      Columns computed, float* out, Meanwhile& meanwhile) {
        const long width = padded + LANES;
        for (long r = 0; r < rows; r++) {
            meanwhile();
            store(out + r * width + padded, splat(weigh_scores(scores + r * SCORE_STRIDE, computed, splat(highest[r]), splat(scale))));
        }
        for (long i = 0; i < padded; i += GROUP) {
            meanwhile();
            for (long r = 0; r < rows; r += ROWS) {
                const float* w = scores + r * SCORE_STRIDE;
                float* to = out + r * width + i;
                switch (std::min<long>(rows - r, ROWS)) {
                    case 1: mean<1>(w, view, i, width, computed, to); break;
                    case 2: mean<2>(w, view, i, width, computed, to); break;
                    case 3: mean<3>(w, view, i, width, computed, to); break;
                    default: mean<4>(w, view, i, width, computed, to);
                }
            }
        }
    }

private:
    template <int rows>
    static void score(const float* query, long query_stride, const Rows<T>* keys, long key_rows, float* out) {
        Floats sums[COLUMNS][rows] = {};
        for (long row = 0; row < key_rows; row++)
            for (int c = 0; c < COLUMNS; c++)
                add_product(keys[c].row(row), query + row * PAIR<T>, query_stride, rows, sums[c]);
        for (int r = 0; r < rows; r++)
            for (int c = 0; c < COLUMNS; c++) store(out + r * SCORE_STRIDE + c * GROUP, sums[c][r]);
    }

    template <int rows>
    static void mean(const float* weights, const PartitionView<T>& view, long dim, long width, Columns computed, float* out) {
        Floats sums[rows] = {};
        constexpr long tokens = PartitionView<T>::VALUE_TOKENS;
        for (long i = computed.begin / tokens; i < (computed.end + tokens - 1) / tokens; i++)
            for (long row = 0; row < GROUP; row++)
                add_product(view.values[i].row(row) + dim * PAIR<T>, weights + i * tokens + row * PAIR<T>, SCORE_STRIDE,
                            rows, sums);
        for (int r = 0; r < rows; r++) store(out + r * width, sums[r]);
    }
};

}  // namespace quire::ISA
