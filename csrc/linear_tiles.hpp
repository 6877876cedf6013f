// Linear layers on the matrix unit: bfloat16 tiles, 16 rows x 16 outputs of float sums, 32 inputs at a time.
//
// Up to 64 rows: bound by reading the weights once, front to back, prefetched; the rows stay in the cache. A strip's
// weights are loaded once for up to four tiles of rows, and one or two tiles of rows once for several strips: where another
// guest has the core's other half, a load and a product do not overlap, and loads are half of the time.
//
// More: bound by multiplying. A thread takes a block of up to 256 rows x 16 strips, whose sums (256 KiB), rows and weights
// stay in its second-level cache. It goes through the inputs some tiles at a time; of those, the tiles of two rows stay in
// the first-level cache while the strips pass by, two at a time: four products for four loads. Sums are put down in
// between and taken up again, the same numbers.
#pragma once

#include "thread_pool.hpp"
#include "linear_output.hpp"
#include "packed_words.hpp"
#include "tiles.hpp"

#ifdef __AMX_BF16__

namespace quire::ISA {

constexpr int FEW_TILES = 4;        // row tiles that share one pass over the weights
constexpr long AHEAD = 4;           // tiles of weights prefetched, in each strip; 8 is no faster
constexpr long EXPANDED_TILES = 6;  // tiles of inputs, few rows: four strips' take half of the first-level cache
constexpr long BLOCK_INPUTS = 14;   // tiles of inputs at a time
constexpr long TILE_WORDS = 16;     // words of a strip
constexpr long BLOCK_ROW_TILES = 16;
constexpr long BLOCK_STRIPS = 16;
constexpr int TILE_LINES = 16;      // cache lines of a tile

template <int hint = _MM_HINT_T0>
inline void prefetch_tile(const bf16* tile) {
#pragma GCC unroll 16
    for (int line = 0; line < TILE_LINES; line++)
        _mm_prefetch(reinterpret_cast<const char*>(tile + line * TILE_INPUTS), static_cast<_mm_hint>(hint));
}

// Rows cut into tiles: [row tile][input tile][rows of a tile][32 inputs], zeros where there is nothing.
struct RowTiles {
    const bf16* tiles;
    long num_tiles;   // tiles of inputs
    int rows;         // rows of a tile

    const bf16* at(long row_tile, long tile) const { return tiles + (row_tile * num_tiles + tile) * rows * TILE_INPUTS; }
};

inline void cut_row(const Linear<bf16>& op, const RowTiles& to, long row) {
    bf16* out = const_cast<bf16*>(to.at(row / to.rows, 0)) + row % to.rows * TILE_INPUTS;
    const long step = to.rows * TILE_INPUTS;
    const bf16* x = op.x + row * op.x_stride;
    for (long tile = 0; tile < to.num_tiles; tile++, out += step) {
        const long count = row < op.num_rows ? std::min(TILE_INPUTS, op.in_features - tile * TILE_INPUTS) : 0;
        if (count == TILE_INPUTS) {
            std::memcpy(out, x + tile * TILE_INPUTS, TILE_INPUTS * sizeof(bf16));
            continue;
        }
        std::memset(out, 0, TILE_INPUTS * sizeof(bf16));
        std::memcpy(out, x + tile * TILE_INPUTS, count * sizeof(bf16));
    }
}

inline RowTiles cut_rows(const Linear<bf16>& op) {
    const int rows = static_cast<int>(std::min(op.num_rows, TILE_ROWS));
    const long padded = rounded_up(op.num_rows, rows), tiles = num_tiles(op.in_features);
    if (op.num_rows == 1 && op.in_features % TILE_INPUTS == 0) return {op.x, tiles, rows};  // as it is
    static thread_local Aligned<bf16> scratch;
    const RowTiles to{scratch.at_least(padded * tiles * TILE_INPUTS), tiles, rows};
    share_range(padded, TILE_ROWS, [&](long begin, long end) {
        for (long row = begin; row < end; row++) cut_row(op, to, row);
    });
    return to;
}

struct alignas(64) TileSums {
    float sums[TILE_ROWS * STRIP];

    Floats row(long row) const { return load(sums + row * STRIP); }
};

// --- up to 64 rows ---------------------------------------------------------------------------------------------------

// Row tiles x strips of sums, four at most: what is loaded of the rows serves all strips, of the weights all rows.
template <int row_tiles, int strips>
struct FewTiles {
    static_assert(strips == 1 || row_tiles * strips == FEW_TILES);
    static constexpr int SUMS = row_tiles * strips;  // [row tile][strip]

    // The products of strips' words from tile `first` to `end`.
    static void multiply(const StripWords<bf16>& words, const RowTiles& x, long first, long end, TileSums* sums) {
        const bf16* w = words.words;
        const long strip_elements = words.stride;
        if (first == 0) {
            _tile_zero(0);
            if constexpr (SUMS > 1) _tile_zero(1);
            if constexpr (SUMS > 2) _tile_zero(2);
            if constexpr (SUMS > 3) _tile_zero(3);
        } else {
            _tile_loadd(0, sums[0].sums, 64);
            if constexpr (SUMS > 1) _tile_loadd(1, sums[1].sums, 64);
            if constexpr (SUMS > 2) _tile_loadd(2, sums[2].sums, 64);
            if constexpr (SUMS > 3) _tile_loadd(3, sums[3].sums, 64);
        }
        for (long tile = first; tile < end; tile++, w += TILE_ELEMENTS) {
            load_weights<6>(w);
            _tile_loadd(4, x.at(0, tile), 64);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (strips > 1) {
                load_weights<7>(w + strip_elements);
                _tile_dpbf16ps(1, 4, 7);
            }
            if constexpr (strips > 2) {
                load_weights<6>(w + 2 * strip_elements);
                _tile_dpbf16ps(2, 4, 6);
                load_weights<7>(w + 3 * strip_elements);
                _tile_dpbf16ps(3, 4, 7);
            }
            if constexpr (row_tiles > 1) {
                _tile_loadd(5, x.at(1, tile), 64);
                if constexpr (strips == 1) {
                    _tile_dpbf16ps(1, 5, 6);
                } else {
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                }
            }
            if constexpr (row_tiles > 2) {
                _tile_loadd(4, x.at(2, tile), 64);
                _tile_dpbf16ps(2, 4, 6);
            }
            if constexpr (row_tiles > 3) {
                _tile_loadd(5, x.at(3, tile), 64);
                _tile_dpbf16ps(3, 5, 6);
            }
        }
        _tile_stored(0, sums[0].sums, 64);
        if constexpr (SUMS > 1) _tile_stored(1, sums[1].sums, 64);
        if constexpr (SUMS > 2) _tile_stored(2, sums[2].sums, 64);
        if constexpr (SUMS > 3) _tile_stored(3, sums[3].sums, 64);
    }

private:
    template <int tile>
    static void load_weights(const bf16* w) {
        prefetch_tile(w + AHEAD * TILE_ELEMENTS);
        if constexpr (tile == 6)
            _tile_loadd(6, w, 64);
        else
            _tile_loadd(7, w, 64);
    }
};

template <int row_tiles, int strips>
void multiply_strips(const PackedWords<bf16>& weights, const RowTiles& x, long strip, TileSums* sums) {
    const long at_once = weights.at_once(x.num_tiles, EXPANDED_TILES);
    for (long first = 0, end; first < x.num_tiles; first = end) {
        end = std::min(first + at_once, x.num_tiles);
        FewTiles<row_tiles, strips>::multiply(
            weights.of(strip, strips, first * TILE_WORDS, (end - first) * TILE_WORDS), x, first, end, sums);
    }
}

// Add the addends to the sums of all rows x some strips, [row tile][strip].
inline void add_to_tiles(const Linear<bf16>& op, long tile_rows, long strip, long num_strips, TileSums* sums) {
    for (long row = 0; op.has_addends() && row < op.num_rows; row += tile_rows, sums += num_strips)
        add_addends(op, row, std::min(tile_rows, op.num_rows - row), strip, num_strips, {sums->sums, STRIP, TILE_ROWS * STRIP});
}

// Strips [strip, end) in groups, those that are left one by one: pairs of strips are finished together.
template <int row_tiles, int strips>
void few_rows(const Linear<bf16>& op, const PackedWords<bf16>& weights, const RowTiles& x, long strip, long end) {
    TileSums sums[2][FEW_TILES];
    for (; strip + strips <= end && strips > 1; strip += strips) {
        multiply_strips<row_tiles, strips>(weights, x, strip, sums[0]);
        add_to_tiles(op, x.rows, strip, strips, sums[0]);
        for (long row = 0; row < op.num_rows; row++) {
            TileSums* of_row = sums[0] + row / x.rows * strips;
            for (int i = 0; i < strips; i += 2)
                finish_pair(op, row, strip + i, of_row[i].row(row % x.rows), of_row[i + 1].row(row % x.rows));
        }
    }
    for (; strip < end; strip += 2) {
        const bool is_pair = strip + 1 < end;
        for (int i = 0; i <= is_pair; i++) {
            multiply_strips<row_tiles, 1>(weights, x, strip + i, sums[i]);
            add_to_tiles(op, x.rows, strip + i, 1, sums[i]);
        }
        for (long row = 0; row < op.num_rows; row++) {
            const Floats left = sums[0][row / x.rows].row(row % x.rows), right = sums[1][row / x.rows].row(row % x.rows);
            if (is_pair)
                finish_pair(op, row, strip, left, right);
            else
                finish(op, row, strip, left);
        }
    }
}

inline void few_rows(const Linear<bf16>& op, const RowTiles& x, long row_tiles) {
    const long strips = layer_strips(op), strip_bytes = x.num_tiles * TILE_ELEMENTS * sizeof(bf16);
    const PackedWords<bf16> weights(op);
    share_range(strips, rounded_up(strips_at_once(strips, strip_bytes), 4), [&](long strip, long end) {
        shape_tiles(x.rows);
        switch (row_tiles) {
            case 1: x.rows > 4 ? few_rows<1, 4>(op, weights, x, strip, end) : few_rows<1, 1>(op, weights, x, strip, end); break;
            case 2: few_rows<2, 2>(op, weights, x, strip, end); break;
            case 3: few_rows<3, 1>(op, weights, x, strip, end); break;
            default: few_rows<4, 1>(op, weights, x, strip, end);
        }
        _tile_release();
    });
}

// --- more rows -------------------------------------------------------------------------------------------------------

struct FourSums { TileSums tiles[2][2]; };  // [row tile][strip]

// Two row tiles x two strips, over some of the inputs. What comes next of the weights is prefetched.
struct FourTiles {
    const bf16 *x[2], *w[2], *next_w[2];
    long count;  // input tiles

    void multiply(FourSums& four, bool is_first) const {
        auto& sums = four.tiles;
        if (is_first) {
            _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
        } else {
            _tile_loadd(0, sums[0][0].sums, 64); _tile_loadd(1, sums[0][1].sums, 64);
            _tile_loadd(2, sums[1][0].sums, 64); _tile_loadd(3, sums[1][1].sums, 64);
        }
        for (long tile = 0, at = 0; tile < count; tile++, at += TILE_ELEMENTS) {
            const long ahead = tile + AHEAD, beyond = ahead - count;
            _tile_loadd(6, w[0] + at, 64);
            _tile_loadd(4, x[0] + at, 64);
            _tile_dpbf16ps(0, 4, 6);
            prefetch_tile(beyond < 0 ? w[0] + ahead * TILE_ELEMENTS : next_w[0] + beyond * TILE_ELEMENTS);
            _tile_loadd(5, x[1] + at, 64);
            _tile_dpbf16ps(2, 5, 6);
            prefetch_tile(beyond < 0 ? w[1] + ahead * TILE_ELEMENTS : next_w[1] + beyond * TILE_ELEMENTS);
            _tile_loadd(7, w[1] + at, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, sums[0][0].sums, 64); _tile_stored(1, sums[0][1].sums, 64);
        _tile_stored(2, sums[1][0].sums, 64); _tile_stored(3, sums[1][1].sums, 64);
    }
};

// A thread's block of row tiles [row_tile, end_row_tile) x strips [strip, end_strip).
struct Block {
    const Linear<bf16>& op;
    const PackedWords<bf16>& weights;
    const RowTiles& x;
    long row_tile, end_row_tile, strip, end_strip;
    FourSums* sums;

    void compute() const {
        const long pieces = (x.num_tiles + BLOCK_INPUTS - 1) / BLOCK_INPUTS, width = (x.num_tiles + pieces - 1) / pieces;
        for (long tile = 0; tile < x.num_tiles; tile += width) {
            const long count = std::min(width, x.num_tiles - tile);
            const StripWords<bf16> piece = weights.of(strip, end_strip - strip, tile * TILE_WORDS, count * TILE_WORDS);
            FourSums* four = sums;
            for (long row = row_tile; row < end_row_tile; row += 2)
                for (long left = strip; left < end_strip; left += 2) compute_four(row, left, piece, tile, count, *four++);
        }
    }

private:
    void compute_four(long row, long left, const StripWords<bf16>& piece, long tile, long count, FourSums& four) const {
        // The weights of a strip; of the last strip once more where there is none beside it.
        const auto words = [&](long of) { return piece.words + (std::min(of, end_strip - 1) - strip) * piece.stride; };
        const long next = left + 2 < end_strip ? left + 2 : strip;
        FourTiles{{x.at(row, tile), x.at(std::min(row + 1, end_row_tile - 1), tile)},
                  {words(left), words(left + 1)},
                  {words(next), words(next + 1)},
                  count}
            .multiply(four, tile == 0);
        if (tile + count < x.num_tiles) return;
        for (long i = 0; i < 2 && row + i < end_row_tile; i++) {
            const long first = (row + i) * TILE_ROWS, rows = std::min(TILE_ROWS, op.num_rows - first);
            if (op.has_addends())
                add_addends(op, first, rows, left, std::min(2L, end_strip - left), {four.tiles[i][0].sums, STRIP, TILE_ROWS * STRIP});
            for (long r = 0; r < rows; r++) {
                if (left + 1 < end_strip)
                    finish_pair(op, first + r, left, four.tiles[i][0].row(r), four.tiles[i][1].row(r));
                else
                    finish(op, first + r, left, four.tiles[i][0].row(r));
            }
        }
    }
};

inline void many_rows(const Linear<bf16>& op, const RowTiles& x) {
    const long strips = layer_strips(op), row_tiles = (op.num_rows + TILE_ROWS - 1) / TILE_ROWS;
    const long row_blocks = (row_tiles + BLOCK_ROW_TILES - 1) / BLOCK_ROW_TILES, height = rounded_up((row_tiles + row_blocks - 1) / row_blocks, 2);
    const long strip_blocks = (strips + BLOCK_STRIPS - 1) / BLOCK_STRIPS;
    const PackedWords<bf16> weights(op);
    share(row_blocks * strip_blocks, [&](Chunks& chunks) {
        static thread_local Aligned<FourSums> scratch;
        FourSums* sums = scratch.at_least(BLOCK_ROW_TILES * BLOCK_STRIPS / 4);
        shape_tiles(TILE_ROWS);
        for (long i; (i = chunks.take()) < chunks.count();) {
            const long row = i % row_blocks * height, strip = i / row_blocks * BLOCK_STRIPS;
            if (row < row_tiles)
                Block{op, weights, x, row, std::min(row + height, row_tiles), strip, std::min(strip + BLOCK_STRIPS, strips), sums}.compute();
        }
        _tile_release();
    });
}

inline void linear_by_tiles(const Linear<bf16>& op) {
    const RowTiles x = cut_rows(op);
    const long row_tiles = (op.num_rows + x.rows - 1) / x.rows;
    row_tiles <= FEW_TILES ? few_rows(op, x, row_tiles) : many_rows(op, x);
}

// A x of all adapters, as the layers of A alone have it: before the layer, since tiles of rows are in the thread's one scratch.
inline void multiply_down_by_tiles(const Linear<bf16>& op) {
    constexpr DownPieces pieces{FEW_TILES * TILE_ROWS};
    op.low_rank->num_left = pieces.count(*op.low_rank);
    share(op.low_rank->num_left, [&](Chunks&) {
        pieces.take(*op.low_rank, [&](const LowRankRows<bf16>& adapter, long first, long num_rows, long strip) {
            long stride = op.x_stride;
            const bf16* x = rows_of(adapter.rows + first, num_rows, op.x, op.in_features, stride);
            linear_by_tiles({x, num_rows, op.in_features, stride, adapter.down + packed_size<bf16>(strip * STRIP, op.in_features),
                             std::min(STRIP, adapter.rank - strip * STRIP), nullptr, adapter.inner + first * adapter.rank + strip * STRIP,
                             adapter.rank, false, Activation::none});
        });
    });
}

}  // namespace quire::ISA

#endif
