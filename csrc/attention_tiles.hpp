// The two products of attention on the matrix unit: bfloat16 tiles, sums in float.
//
// Scores: 16 rows of queries x 16 tokens, 32 dimensions at a time. Weighted values: 16 rows of weights x 16 dimensions,
// 32 tokens at a time, summed in the tile over the whole partition; a tile of ones beside the values sums the weights as
// they are multiplied: rounded, for what the rounding has in common then cancels in the mean. Both add in the same order
// for every row, whatever the other rows hold: a row's sums depend on the row of the first factor alone, and 32 tokens
// are at fixed absolute positions. Weights of 0 add nothing: not even a sign changes.
//
// The unit takes 16 cycles a product, and the core computes on meanwhile, as far as it looks ahead: a hundred instructions
// that wait. So the products of 32 tokens are issued between the exponentials of the next 32, a few at a time. Keys and
// values pass by the first-level cache (stream loads), which the scores fill.
#pragma once

#include <array>

#include "attention_scores.hpp"
#include "tiles.hpp"

#ifdef __AMX_BF16__

namespace quire::ISA {

struct ByTiles {
    using Query = bf16;
    static constexpr long KEY_ROWS = TILE_ROWS;  // pairs of dimensions in a tile

    // The thread's tiles, for as many rows as there are.
    struct Session {
        explicit Session(long max_rows) { shape_tiles(std::min(max_rows, TILE_ROWS)); }
        ~Session() { _tile_release(); }
    };

    static long query_stride(long key_rows) { return key_rows * PAIR<bf16>; }

    template <typename E>
    static void pack_row(const E* query, long head_dim, Query* out, long) {
        pack_query(query, head_dim, out);
    }

    // Calls of `meanwhile` by `scores` and by `weigh`, about.
    static long score_calls(long, Columns computed, long) { return (computed.last() - computed.first()) / (2 * GROUP); }
    static long weigh_calls(long, Columns computed, long) { return (computed.last() - computed.first()) / GROUP; }

    template <typename Meanwhile>
    static void scores(const bf16* query, long query_stride, long rows, const PartitionView<bf16>& view, long key_rows,
                       Columns computed, const float* key_scales, float* scores, Meanwhile& meanwhile) {
        for (long i = computed.first(); i < computed.last(); i += GROUP) {
            if (i % (2 * GROUP) == 0) meanwhile();
            if (rows > TILE_ROWS)
                score<2>(query, query_stride, view.keys[i / GROUP], key_rows, scores + i);
            else
                score<1>(query, query_stride, view.keys[i / GROUP], key_rows, scores + i);
        }
        scale_scores(scores, rows, computed, key_scales);
    }

    // Scores become weights, and these the weighted values, with the sums of weights behind them. With scales of values
    // (null for none) the sums are not those of what is multiplied: they are added up beside the exponentials, and all of
    // these come before the products.
    template <typename Meanwhile>
    static void weigh(float* scores, const float* highest, float scale, long rows, const PartitionView<bf16>& view, long padded,
                      Columns computed, const float* value_scales, float* out, Meanwhile& meanwhile) {
        const long width = padded + LANES;
        for (long r = 0; value_scales && r < rows; r++) {
            float* row = scores + r * SCORE_STRIDE;
            const float sum = weigh_scores(row, computed, highest[r], scale, value_scales, reinterpret_cast<bf16*>(row));
            store(out + r * width + padded, splat(sum));
        }
        for (long row = 0; row < rows; row += TILE_ROWS) {
            const Rows16 tile(scores + row * SCORE_STRIDE, highest + row, scale, std::min(TILE_ROWS, rows - row),
                              out + row * width, width);
            const auto first = [&](auto columns) { mean<columns, true>(tile, view, 0, computed, meanwhile); };
            const auto later = [&](long dim) {
                return [&, dim](auto columns) { mean<columns, false>(tile, view, dim, computed, meanwhile); };
            };
            if (value_scales)
                with_columns(padded, later(0));
            else
                with_columns(padded, first);
            for (long dim = MAX_COLUMNS * GROUP; dim < padded; dim += MAX_COLUMNS * GROUP) with_columns(padded - dim, later(dim));
        }
    }

private:
    static constexpr long WEIGHT_STRIDE = 2 * SCORE_STRIDE;  // weights take the first half of a row of scores
    static constexpr long TOKENS = PartitionView<bf16>::VALUE_TOKENS;
    static constexpr long MAX_COLUMNS = 4;  // tiles of sums at once

    // Up to 16 rows: where their scores are, then their weights, then their means.
    struct Rows16 {
        float* scores;
        float offsets[TILE_ROWS];
        Floats scale;
        long rows;
        float* out;
        long width;

        Rows16(float* scores, const float* highest, float scale, long rows, float* out, long width)
            : scores(scores), scale(splat(scale)), rows(rows), out(out), width(width) {
            for (long i = 0; i < rows; i++) offsets[i] = score_offset(highest[i], scale);
        }

        const bf16* weights() const { return reinterpret_cast<const bf16*>(scores); }

        // A quarter of the rows, a group of tokens.
        void weigh(long quarter, long group) const {
            constexpr long quarter_rows = TILE_ROWS / 4;
            for (long r = quarter * quarter_rows; r < std::min(rows, (quarter + 1) * quarter_rows); r++)
                weigh_scores(scores + r * SCORE_STRIDE + group * TOKENS, offsets[r], scale,
                             reinterpret_cast<bf16*>(scores + r * SCORE_STRIDE) + group * TOKENS);
        }
    };

    template <typename Compute>
    static void with_columns(long dims, Compute compute) {
        switch (dims / GROUP) {
            case 1: return compute(std::integral_constant<long, 1>());
            case 2: return compute(std::integral_constant<long, 2>());
            case 3: return compute(std::integral_constant<long, 3>());
            default: return compute(std::integral_constant<long, 4>());
        }
    }

    // 16 x row_tiles rows x 16 tokens. Stores are kept apart: back to back they would stall the unit.
    template <int row_tiles>
    static void score(const bf16* query, long query_stride, const Rows<bf16>& keys, long key_rows, float* out) {
        const long stride = query_stride * sizeof(bf16), key_stride = keys.stride * sizeof(bf16);
        const bf16* below = query + TILE_ROWS * query_stride;
        _tile_zero(0);
        if constexpr (row_tiles == 2) _tile_zero(1);
        for (long row = 0; row < key_rows; row += 2 * TILE_ROWS) {
            const bool is_pair = row + TILE_ROWS < key_rows;
            _tile_stream_loadd(6, keys.row(row), key_stride);
            _tile_loadd(4, query + row * 2, stride);
            _tile_dpbf16ps(0, 4, 6);
            if (is_pair) {
                _tile_stream_loadd(7, keys.row(row + TILE_ROWS), key_stride);
                _tile_loadd(5, query + (row + TILE_ROWS) * 2, stride);
                _tile_dpbf16ps(0, 5, 7);
            }
            if constexpr (row_tiles == 2) {
                _tile_loadd(4, below + row * 2, stride);
                _tile_dpbf16ps(1, 4, 6);
                if (is_pair) {
                    _tile_loadd(5, below + (row + TILE_ROWS) * 2, stride);
                    _tile_dpbf16ps(1, 5, 7);
                }
            }
        }
        _tile_stored(0, out, SCORE_STRIDE * sizeof(float));
        if constexpr (row_tiles == 2) _tile_stored(1, out + TILE_ROWS * SCORE_STRIDE, SCORE_STRIDE * sizeof(float));
    }

    // 16 rows x 16 x columns dimensions, at first with the softmax and the sums of weights.
    template <long columns, bool is_first, typename Meanwhile>
    static void mean(const Rows16& tile, const PartitionView<bf16>& view, long dim, Columns computed, Meanwhile& meanwhile) {
        alignas(64) static constexpr auto ones = [] {
            std::array<bf16, TILE_ROWS * TOKENS> ones{};
            ones.fill(0x3f80);
            return ones;
        }();
        zero<columns>();
        if constexpr (is_first) {
            _tile_zero(4);
            _tile_loadd(7, ones.data(), TOKENS * sizeof(bf16));
        }
        const long first = computed.first() / TOKENS, end = computed.last() / TOKENS;
        if constexpr (is_first)
            for (long quarter = 0; quarter < 4; quarter++) tile.weigh(quarter, first);
        for (long i = first; i < end; i++) {
            meanwhile();
            const auto softmax = [&](long quarter) {
                if (is_first && i + 1 < end) tile.weigh(quarter, i + 1);
            };
            const bf16* values = view.values[i].at + dim * 2;
            const long stride = view.values[i].stride * sizeof(bf16);
            constexpr long next = 2 * GROUP;  // elements from one tile of dimensions to the next
            softmax(0);
            _tile_loadd(5, tile.weights() + i * TOKENS, WEIGHT_STRIDE * sizeof(bf16));
            _tile_stream_loadd(6, values, stride);
            _tile_dpbf16ps(0, 5, 6);
            softmax(1);
            if constexpr (columns > 1) {
                _tile_stream_loadd(6, values + next, stride);
                _tile_dpbf16ps(1, 5, 6);
            }
            softmax(2);
            if constexpr (columns > 2) {
                _tile_stream_loadd(6, values + 2 * next, stride);
                _tile_dpbf16ps(2, 5, 6);
            }
            softmax(3);
            if constexpr (columns > 3) {
                _tile_stream_loadd(6, values + 3 * next, stride);
                _tile_dpbf16ps(3, 5, 6);
            }
            if constexpr (is_first) _tile_dpbf16ps(4, 5, 7);
        }
        float* out = tile.out + dim;
        const long stride = tile.width * sizeof(float);
        _tile_stored(0, out, stride);
        if constexpr (columns > 1) _tile_stored(1, out + GROUP, stride);
        if constexpr (columns > 2) _tile_stored(2, out + 2 * GROUP, stride);
        if constexpr (columns > 3) _tile_stored(3, out + 3 * GROUP, stride);
        if constexpr (is_first) _tile_stored(4, tile.out + tile.width - GROUP, stride);
    }

    template <long tiles>
    static void zero() {
        _tile_zero(0);
        if constexpr (tiles > 1) _tile_zero(1);
        if constexpr (tiles > 2) _tile_zero(2);
        if constexpr (tiles > 3) _tile_zero(3);
    }
};

}  // namespace quire::ISA

#endif
