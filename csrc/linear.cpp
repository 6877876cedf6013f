// Linear layers over packed weights.
//
// Each output is one sum over the inputs in ascending order, kept in one accumulator (a lane, or an element of a tile)
// from the first input to the last: neither the number of rows nor of threads changes its order. Threads share the
// outputs, never a sum.
//
// Few rows: bound by reading the weights once, front to back, prefetched; the rows stay in the cache. Many rows: bound by
// multiplying; weights are read from the cache that they were kept in for the next rows.
#include <algorithm>
#include <vector>

#include <omp.h>

#include "packing.hpp"
#include "tiles.hpp"
#include "vec.hpp"

namespace quire::ISA {
namespace {

// Give each thread its share of `count` things: [begin, end).
struct Share {
    long begin, end;
    explicit Share(long count) {
        const long threads = omp_get_num_threads(), thread = omp_get_thread_num();
        begin = count * thread / threads;
        end = count * (thread + 1) / threads;
    }
};

// Write 16 outputs of one row, those of `strip` that exist: bias added, rounded if need be.
template <typename T>
inline void finish(const Linear<T>& op, long row, long strip, Floats sums) {
    const long first = strip * STRIP, count = std::min(STRIP, op.out_features - first);
    if (op.bias) sums += load_some(op.bias + first, count);
    const long at = row * op.out_stride + first;
    if (op.out_is_float)
        store_some(static_cast<float*>(op.out) + at, sums, count);
    else
        store_some(static_cast<T*>(op.out) + at, sums, count);
}

// --- vectors: rows x strips of accumulators, weights widened to float in registers ----------------------------------

// Sums that fill the registers: sixteen of AVX-512's 32; elsewhere a sum is four registers, and four sums were the fastest.
#ifdef __AVX512F__
constexpr int ROWS = 4, STRIPS = 4;
#else
constexpr int ROWS = 2, STRIPS = 2;
#endif

template <int rows, int strips>
void block(const Linear<float>& op, const float* x, long row, long strip) {
    Floats sums[rows][strips] = {};
    const long inputs = op.in_features;
    const float* w = op.packed + strip * STRIP * inputs;
    for (long i = 0; i < inputs; i++)
        for (int s = 0; s < strips; s++) {
            const Floats weights = load(w + (s * inputs + i) * STRIP);
            for (int r = 0; r < rows; r++) sums[r][s] = multiply_add(weights, splat(x[r * inputs + i]), sums[r][s]);
        }
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < strips; s++) finish(op, row + r, strip + s, sums[r][s]);
}

template <int rows, int strips>
void block(const Linear<bf16>& op, const float* x, long row, long strip) {
    Floats sums[rows][strips] = {};
    const long inputs = num_tiles(op.in_features) * TILE_INPUTS;
    const bf16* w = op.packed + strip * STRIP * inputs;
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
    for (int r = 0; r < rows; r++)
        for (int s = 0; s < strips; s++) finish(op, row + r, strip + s, sums[r][s]);
}

template <typename T, int strips>
void rows_of_strips(const Linear<T>& op, const float* x, long inputs, long strip) {
    long row = 0;
    for (; row + ROWS <= op.num_rows; row += ROWS) block<ROWS, strips>(op, x + row * inputs, row, strip);
    for (; row < op.num_rows; row++) block<1, strips>(op, x + row * inputs, row, strip);
}

template <typename T>
void linear_by_vectors(const Linear<T>& op) {
    const long inputs = sizeof(T) == 2 ? num_tiles(op.in_features) * TILE_INPUTS : op.in_features;
    static thread_local std::vector<float> scratch;
    scratch.resize(op.num_rows * inputs);
    float* x = scratch.data();  // the rows as floats, end to end, padded as the weights are
#pragma omp parallel
    {
        const Share rows(op.num_rows);
        for (long row = rows.begin; row < rows.end; row++)
            for (long i = 0; i < inputs; i += LANES) {
                const long count = std::min<long>(LANES, inputs - i), there = std::min<long>(count, op.in_features - i);
                store_some(x + row * inputs + i, load_some(op.x + row * op.x_stride + i, std::max(there, 0L)), count);
            }
#pragma omp barrier
        const Share strips(num_strips(op.out_features));
        long strip = strips.begin;
        for (; strip + STRIPS <= strips.end; strip += STRIPS) rows_of_strips<T, STRIPS>(op, x, inputs, strip);
        for (; strip < strips.end; strip++) rows_of_strips<T, 1>(op, x, inputs, strip);
    }
}

// --- tiles: 16 rows x 16 outputs of accumulators, 32 inputs at a time ------------------------------------------------

#ifdef __AMX_BF16__

constexpr int FEW_TILES = 4;          // row tiles that share one pass over the weights
constexpr long PREFETCH_TILES = 8;    // ahead, in a strip; of 4 to 32 the best at one row
constexpr long BLOCK_TILES = 14;      // of inputs that stay in the first-level cache: 4 strips and rows x 14 KiB

inline void prefetch_tile(const bf16* tile) {
#pragma GCC unroll 16
    for (int row = 0; row < TILE_ROWS; row++) _mm_prefetch(reinterpret_cast<const char*>(tile + row * TILE_INPUTS), _MM_HINT_T0);
}

// Rows cut into tiles: [row tile][input tile][rows of a tile][32 inputs], zeros where there is nothing.
struct RowTiles {
    const bf16* tiles;
    long num_tiles;   // of inputs
    int rows;         // of a tile

    const bf16* at(long row_tile, long tile) const { return tiles + (row_tile * num_tiles + tile) * rows * TILE_INPUTS; }
};

void cut_rows(const Linear<bf16>& op, RowTiles to) {
    const long padded = (op.num_rows + to.rows - 1) / to.rows * to.rows, full = op.in_features / TILE_INPUTS;
    const Share share(padded);
    for (long row = share.begin; row < share.end; row++) {
        bf16* out = const_cast<bf16*>(to.at(row / to.rows, 0)) + row % to.rows * TILE_INPUTS;
        const long step = to.rows * TILE_INPUTS;
        const bf16* x = op.x + row * op.x_stride;
        for (long tile = 0; tile < to.num_tiles; tile++) {
            const long count = row >= op.num_rows ? 0 : tile < full ? TILE_INPUTS : op.in_features - full * TILE_INPUTS;
            std::memset(out + tile * step, 0, TILE_INPUTS * sizeof(bf16));
            std::memcpy(out + tile * step, x + tile * TILE_INPUTS, count * sizeof(bf16));
        }
    }
}

void finish_tile(const Linear<bf16>& op, const float* sums, long first_row, int rows, long strip) {
    const long count = std::min<long>(rows, op.num_rows - first_row);
    for (long r = 0; r < count; r++) finish(op, first_row + r, strip, load(sums + r * STRIP));
}

// One strip for up to four row tiles: each weight tile is loaded once.
template <int row_tiles>
void strip_for_few(const Linear<bf16>& op, const RowTiles& x, long strip) {
    const bf16* w = op.packed + strip * x.num_tiles * TILE_ELEMENTS;
    _tile_zero(0);
    if (row_tiles > 1) _tile_zero(1);
    if (row_tiles > 2) _tile_zero(2);
    if (row_tiles > 3) _tile_zero(3);
    for (long tile = 0; tile < x.num_tiles; tile++, w += TILE_ELEMENTS) {
        prefetch_tile(w + PREFETCH_TILES * TILE_ELEMENTS);
        _tile_loadd(6, w, 64);
        _tile_loadd(4, x.at(0, tile), 64);
        _tile_dpbf16ps(0, 4, 6);
        if (row_tiles > 1) { _tile_loadd(5, x.at(1, tile), 64); _tile_dpbf16ps(1, 5, 6); }
        if (row_tiles > 2) { _tile_loadd(4, x.at(2, tile), 64); _tile_dpbf16ps(2, 4, 6); }
        if (row_tiles > 3) { _tile_loadd(5, x.at(3, tile), 64); _tile_dpbf16ps(3, 5, 6); }
    }
    alignas(64) float sums[FEW_TILES][TILE_ROWS * STRIP];
    _tile_stored(0, sums[0], 64);
    if (row_tiles > 1) _tile_stored(1, sums[1], 64);
    if (row_tiles > 2) _tile_stored(2, sums[2], 64);
    if (row_tiles > 3) _tile_stored(3, sums[3], 64);
    for (int i = 0; i < row_tiles; i++) finish_tile(op, sums[i], i * x.rows, x.rows, strip);
}

void few_rows(const Linear<bf16>& op, const RowTiles& x, long row_tiles) {
    const Share strips(num_strips(op.out_features));
    for (long strip = strips.begin; strip < strips.end; strip++) switch (row_tiles) {
            case 1: strip_for_few<1>(op, x, strip); break;
            case 2: strip_for_few<2>(op, x, strip); break;
            case 3: strip_for_few<3>(op, x, strip); break;
            default: strip_for_few<4>(op, x, strip);
        }
}

struct alignas(64) FourSums { float sums[4][TILE_ROWS * STRIP]; };  // [row tile][strip], two of each

// Two row tiles x two strips, over some of the inputs: four products for four loads.
void multiply_four(const bf16* x0, const bf16* x1, const bf16* w0, const bf16* w1, long tiles, FourSums& four, bool first) {
    if (first) {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    } else {
        _tile_loadd(0, four.sums[0], 64); _tile_loadd(1, four.sums[1], 64);
        _tile_loadd(2, four.sums[2], 64); _tile_loadd(3, four.sums[3], 64);
    }
    for (long at = 0; at < tiles * TILE_ELEMENTS; at += TILE_ELEMENTS) {
        _tile_loadd(6, w0 + at, 64);
        _tile_loadd(4, x0 + at, 64);
        _tile_dpbf16ps(0, 4, 6);
        prefetch_tile(w0 + at + 4 * TILE_ELEMENTS);
        _tile_loadd(5, x1 + at, 64);
        _tile_dpbf16ps(2, 5, 6);
        prefetch_tile(w1 + at + 4 * TILE_ELEMENTS);
        _tile_loadd(7, w1 + at, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, four.sums[0], 64); _tile_stored(1, four.sums[1], 64);
    _tile_stored(2, four.sums[2], 64); _tile_stored(3, four.sums[3], 64);
}

void many_rows(const Linear<bf16>& op, const RowTiles& x, long row_tiles) {
    constexpr long pairs_at_once = 16;  // pairs of strips whose weights stay in the second-level cache
    const long strips = num_strips(op.out_features), tiles = x.num_tiles;
    const Share pairs((strips + 1) / 2);
    std::vector<FourSums> sums(pairs_at_once);
    for (long begin = pairs.begin; begin < pairs.end; begin += pairs_at_once) {
        const long end = std::min(begin + pairs_at_once, pairs.end);
        for (long row_tile = 0; row_tile < row_tiles; row_tile += 2) {
            const long other = std::min(row_tile + 1, row_tiles - 1);
            for (long tile = 0; tile < tiles; tile += BLOCK_TILES) {
                const long count = std::min(BLOCK_TILES, tiles - tile);
                for (long pair = begin; pair < end; pair++) {
                    const long left = 2 * pair, right = std::min(left + 1, strips - 1);
                    multiply_four(x.at(row_tile, tile), x.at(other, tile),
                                  op.packed + (left * tiles + tile) * TILE_ELEMENTS,
                                  op.packed + (right * tiles + tile) * TILE_ELEMENTS, count, sums[pair - begin], tile == 0);
                }
            }
            for (long pair = begin; pair < end; pair++)
                for (int i = 0; i < 2 && row_tile + i < row_tiles; i++)
                    for (int j = 0; j < 2 && 2 * pair + j < strips; j++)
                        finish_tile(op, sums[pair - begin].sums[2 * i + j], (row_tile + i) * TILE_ROWS, TILE_ROWS, 2 * pair + j);
        }
    }
}

void linear_by_tiles(const Linear<bf16>& op) {
    const int rows = static_cast<int>(std::min(op.num_rows, TILE_ROWS));
    const long row_tiles = (op.num_rows + rows - 1) / rows, tiles = num_tiles(op.in_features);
    static thread_local std::vector<bf16> scratch;
    scratch.resize(row_tiles * tiles * rows * TILE_INPUTS + 32);
    bf16* aligned = scratch.data() + (-reinterpret_cast<std::uintptr_t>(scratch.data()) & 63) / sizeof(bf16);
    const RowTiles x{aligned, tiles, rows};
#pragma omp parallel
    {
        cut_rows(op, x);
        shape_tiles(rows);
#pragma omp barrier
        if (row_tiles <= FEW_TILES)
            few_rows(op, x, row_tiles);
        else
            many_rows(op, x, row_tiles);
        _tile_release();
    }
}

#endif

}  // namespace

template <typename T>
void linear(const Linear<T>& op) {
    if (op.num_rows) linear_by_vectors(op);
}

#ifdef __AMX_BF16__
template <>
void linear(const Linear<bf16>& op) {
    if (op.num_rows) linear_by_tiles(op);
}
#else
template void linear(const Linear<bf16>&);
#endif
template void linear(const Linear<float>&);

}  // namespace quire::ISA
