// The two products of attention by vectors: sixteen tokens in the lanes of scores, sixteen dimensions in the lanes of
// weighted values. A lane is one sum, over dimensions or over tokens in ascending order.
#pragma once

#include "attention_scores.hpp"
#include "products.hpp"

namespace quire::ISA {

template <typename T>
struct ByVectors {
    using Query = Factor<T>;
    static constexpr long KEY_ROWS = 1;  // the number of rows of keys is a multiple of this

    struct Session {
        explicit Session(long) {}
    };

    static long query_stride(long key_rows) { return key_rows * PAIR<T>; }

    template <typename E>
    static void pack_row(const E* query, long head_dim, Query* out, long) {
        pack_query(query, head_dim, out);
    }

    // Calls of `meanwhile` by `scores` and by `weigh`, about.
    static long score_calls(long rows, Columns computed, long key_rows) {
        return num_groups(rows) * ((computed.last() - computed.first()) / (COLUMNS * GROUP)) * (key_rows / STEPS_BETWEEN);
    }
    static long weigh_calls(long rows, Columns computed, long padded) {
        return rows + num_groups(rows) * (padded / (COLUMNS * GROUP)) * ((computed.end - computed.begin) / PAIR<T> / STEPS_BETWEEN);
    }

    // key_scales, value_scales: null for none.
    template <typename Meanwhile>
    static void scores(const Query* query, long query_stride, long rows, const PartitionView<T>& view, long key_rows,
                       Columns computed, const float* key_scales, float* scores, Meanwhile& meanwhile) {
        for (long i = computed.first(); i < computed.last(); i += COLUMNS * GROUP) {
            const T* keys[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) keys[c] = view.keys[i / GROUP + c].at;
            in_groups<ROWS>(rows, [&](auto count, long r) {
                Sums<count, COLUMNS> sums;
                sums.template add<T>(keys, view.keys[i / GROUP].stride, query + r * query_stride, query_stride, key_rows, meanwhile);
                sums.store(scores + r * SCORE_STRIDE + i, SCORE_STRIDE);
            });
        }
        scale_scores(scores, rows, computed, key_scales);
    }

    // Scores become weights, and these the weighted values, with the sums of weights behind them.
    template <typename Meanwhile>
    static void weigh(float* scores, const float* highest, float scale, long rows, const PartitionView<T>& view, long padded,
                      Columns computed, const float* value_scales, float* out, Meanwhile& meanwhile) {
        const long width = padded + LANES;
        for (long r = 0; r < rows; r++) {
            meanwhile();
            Query* weights = reinterpret_cast<Query*>(scores + r * SCORE_STRIDE);
            const float* row = scores + r * SCORE_STRIDE;
            const float sum = value_scales ? weigh_scores(row, computed, highest[r], scale, value_scales, weights)
                                           : weigh_scores(row, computed, highest[r], scale, weights);
            store(out + r * width + padded, splat(sum));
        }
        const Query* weights = reinterpret_cast<const Query*>(scores);
        for (long dim = 0; dim < padded; dim += COLUMNS * GROUP)
            in_groups<ROWS>(rows, [&](auto count, long r) {
                float* to = out + r * width + dim;
                if (dim + COLUMNS * GROUP <= padded)
                    mean<count, COLUMNS>(weights + r * WEIGHT_STRIDE, view, dim, computed, meanwhile).store(to, width);
                else
                    mean<count, 1>(weights + r * WEIGHT_STRIDE, view, dim, computed, meanwhile).store(to, width);
            });
    }

private:
    static constexpr int ROWS = PARTS == 1 ? 8 : MAX_ROWS, COLUMNS = PARTS == 1 ? 2 : 1;  // sums at once
    static constexpr long num_groups(long rows) { return (rows + ROWS - 1) / ROWS; }
    static constexpr long WEIGHT_STRIDE = SCORE_STRIDE * sizeof(float) / sizeof(Query);

    template <int rows, int columns, typename Meanwhile>
    static Sums<rows, columns> mean(const Query* weights, const PartitionView<T>& view, long dim, Columns computed,
                                    Meanwhile& meanwhile) {
        Sums<rows, columns> sums;
        constexpr long tokens = PartitionView<T>::VALUE_TOKENS;
        for (long i = computed.begin / tokens; i < (computed.end + tokens - 1) / tokens; i++) {
            const T* values[columns];
            for (int c = 0; c < columns; c++) values[c] = view.values[i].at + (dim + c * GROUP) * PAIR<T>;
            sums.template add<T>(values, view.values[i].stride, weights + i * tokens, WEIGHT_STRIDE, PartitionView<T>::VALUE_ROWS, meanwhile);
        }
        return sums;
    }
};

}  // namespace quire::ISA
