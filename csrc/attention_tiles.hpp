// The two products of attention on the matrix unit: bfloat16 tiles, sums in float.
//
// Scores: 16 rows of queries x 16 tokens, 32 dimensions at a time. Weighted values: 16 rows of weights x 16 dimensions,
// 32 tokens at a time, summed in the tile over the whole partition. Both add in the same order for every row, whatever
// the other rows hold: a row's sums depend on the row of the first factor alone, and 32 tokens stand at fixed absolute
// positions. Weights of 0 add nothing: not even a sign changes.
#pragma once

#include "attention_scores.hpp"
#include "tiles.hpp"

#ifdef __AMX_BF16__

namespace quire::ISA {

struct ByTiles {
    using Query = bf16;
    using Weight = bf16;
    static constexpr long KEY_ROWS = TILE_ROWS;  // pairs of dimensions in a tile

    // The thread's tiles, for as many rows as there are.
    struct Session {
        explicit Session(long max_rows) { shape_tiles(std::min(max_rows, TILE_ROWS)); }
        ~Session() { _tile_release(); }
    };

    template <typename Meanwhile>
    static void scores(const bf16* query, long query_stride, long rows, const PartitionView<bf16>& view, long key_rows,
                       Columns computed, float* scores, Meanwhile& meanwhile) {
        for (long i = computed.first(); i < computed.last(); i += 2 * GROUP) {
            meanwhile();
            const Rows<bf16>* keys = view.keys + i / GROUP;
            if (rows > TILE_ROWS)
                score<2>(query, query_stride, keys, key_rows, scores + i);
            else
                score<1>(query, query_stride, keys, key_rows, scores + i);
        }
    }

    template <typename Meanwhile>
    static void weigh(const bf16* weights, long rows, const PartitionView<bf16>& view, long padded, Columns seen, float* out,
                      Meanwhile& meanwhile) {
        const long step = rows > TILE_ROWS ? 2 * GROUP : 4 * GROUP;  // four tiles of sums
        for (long dim = 0; dim < padded; dim += step) {
            const long columns = std::min(step, padded - dim) / GROUP;
            if (rows > TILE_ROWS)
                switch (columns) {
                    case 1: mean<2, 1>(weights, view, dim, padded, seen, out, meanwhile); break;
                    default: mean<2, 2>(weights, view, dim, padded, seen, out, meanwhile);
                }
            else
                switch (columns) {
                    case 1: mean<1, 1>(weights, view, dim, padded, seen, out, meanwhile); break;
                    case 2: mean<1, 2>(weights, view, dim, padded, seen, out, meanwhile); break;
                    case 3: mean<1, 3>(weights, view, dim, padded, seen, out, meanwhile); break;
                    default: mean<1, 4>(weights, view, dim, padded, seen, out, meanwhile);
                }
        }
    }

private:
    static constexpr long WEIGHT_STRIDE = 2 * SCORE_STRIDE;  // weights take the first half of a row of scores
    static constexpr long TOKENS = PartitionView<bf16>::VALUE_TOKENS;

    // 16 x row_tiles rows x 32 tokens.
    template <int row_tiles>
    static void score(const bf16* query, long query_stride, const Rows<bf16>* keys, long key_rows, float* out) {
        zero<2 * row_tiles>();
        for (long row = 0; row < key_rows; row += TILE_ROWS) {
            _tile_loadd(6, keys[0].row(row), keys[0].stride * sizeof(bf16));
            _tile_loadd(4, query + row * 2, query_stride * sizeof(bf16));
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, keys[1].row(row), keys[1].stride * sizeof(bf16));
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (row_tiles == 2) {
                _tile_loadd(5, query + TILE_ROWS * query_stride + row * 2, query_stride * sizeof(bf16));
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        }
        constexpr long stride = SCORE_STRIDE * sizeof(float);
        _tile_stored(0, out, stride);
        _tile_stored(1, out + GROUP, stride);
        if constexpr (row_tiles == 2) {
            _tile_stored(2, out + TILE_ROWS * SCORE_STRIDE, stride);
            _tile_stored(3, out + TILE_ROWS * SCORE_STRIDE + GROUP, stride);
        }
    }

    // 16 x row_tiles rows x 16 x columns dimensions.
    template <int row_tiles, int columns, typename Meanwhile>
    static void mean(const bf16* weights, const PartitionView<bf16>& view, long dim, long padded, Columns seen, float* out,
                     Meanwhile& meanwhile) {
        zero<row_tiles == 2 ? 4 : columns>();
        for (long i = seen.begin / TOKENS; i < (seen.end + TOKENS - 1) / TOKENS; i++) {
            meanwhile();
            const bf16* values = view.values[i].at + dim * 2;
            const long stride = view.values[i].stride * sizeof(bf16);
            constexpr long next = 2 * GROUP;  // elements from one tile of dimensions to the next
            _tile_loadd(4, weights + i * TOKENS, WEIGHT_STRIDE * sizeof(bf16));
            _tile_loadd(6, values, stride);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (columns > 1) {
                _tile_loadd(7, values + next, stride);
                _tile_dpbf16ps(1, 4, 7);
            }
            if constexpr (columns > 2) {
                _tile_loadd(6, values + 2 * next, stride);
                _tile_dpbf16ps(2, 4, 6);
            }
            if constexpr (columns > 3) {
                _tile_loadd(7, values + 3 * next, stride);
                _tile_dpbf16ps(3, 4, 7);
            }
            if constexpr (row_tiles > 1) {
                _tile_loadd(5, weights + TILE_ROWS * WEIGHT_STRIDE + i * TOKENS, WEIGHT_STRIDE * sizeof(bf16));
                _tile_dpbf16ps(2, 5, 6);
                if constexpr (columns > 1) _tile_dpbf16ps(3, 5, 7);
            }
        }
        float* to = out + dim;
        const long stride = padded * sizeof(float);
        _tile_stored(0, to, stride);
        if constexpr (columns > 1) _tile_stored(1, to + GROUP, stride);
        if constexpr (columns > 2) _tile_stored(2, to + 2 * GROUP, stride);
        if constexpr (columns > 3) _tile_stored(3, to + 3 * GROUP, stride);
        if constexpr (row_tiles > 1) {
            _tile_stored(2, to + TILE_ROWS * padded, stride);
            if constexpr (columns > 1) _tile_stored(3, to + TILE_ROWS * padded + GROUP, stride);
        }
    }

    template <int tiles>
    static void zero() {
        _tile_zero(0);
        if constexpr (tiles > 1) _tile_zero(1);
        if constexpr (tiles > 2) _tile_zero(2);
        if constexpr (tiles > 3) _tile_zero(3);
    }
};

}  // namespace quire::ISA

#endif
