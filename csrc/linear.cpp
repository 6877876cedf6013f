// Linear layers over packed weights.
//
// Each output is one sum over the inputs in ascending order, kept in one accumulator (a lane, or an element of a tile)
// from the first input to the last, or put down as it is and taken up again: neither the number of rows nor of threads
// changes its order. Threads share the outputs, never a sum.
#include "linear_pieces.hpp"
#include "linear_tiles.hpp"
#include "linear_vectors.hpp"

namespace quire::ISA {

template <typename T>
void quantized_linear(const Linear<T>&);  // any format that is not multiplied as a dense one

template <typename T>
bool is_multiplied_as_dense(const Linear<T>& op) { return op.format == WeightFormat::dense || expander(op); }

// Begin A x of a layer's adapters, whose pieces the threads of the layer compute.
template <typename T>
void begin_down(const Linear<T>& op) {
    LowRank<T>& low_rank = *op.low_rank;
    low_rank.x_stride = op.x_stride;
    low_rank.x = factors_of(op, low_rank.x_stride);
    low_rank.num_left = DOWN_PIECES.count(low_rank);
}

template <typename T>
void linear(const Linear<T>& op) {
    if (!op.num_rows) return;
    if (op.low_rank) begin_down(op);
    if (is_multiplied_as_dense(op)) return linear_by_vectors(op);
    quantized_linear(op);
}

#ifdef __AMX_BF16__
template <>
void linear(const Linear<bf16>& op) {
    if (!op.num_rows) return;
    if (op.low_rank) multiply_down_by_tiles(op);
    if (is_multiplied_as_dense(op)) return linear_by_tiles(op);
    quantized_linear(op);
}
#else
template void linear(const Linear<bf16>&);
#endif
template void linear(const Linear<float>&);

template <typename T>
void low_rank_product(const LowRankProduct<T>& op) {
    constexpr long strips_at_once = 16;
    share_range(num_strips(op.num_outputs), strips_at_once, [&](long begin, long end) {
        for (long row = 0; row < op.num_rows; row++)
            for (long strip = begin; strip < end; strip++) {
                float product[STRIP];
                const T* packed = op.packed + strip * low_rank_strip_elements<T>(op.rank);
                multiply_up<1, 1>(op.inner + row * op.inner_stride, op.inner_stride, packed, op.rank).store(product, STRIP);
                store_some(op.out + row * op.out_stride + strip * STRIP, load(product), op.num_outputs - strip * STRIP);
            }
    });
}

template void low_rank_product(const LowRankProduct<bf16>&);
template void low_rank_product(const LowRankProduct<float>&);

// A work list of all heads' layers: pieces of some rows times some outputs of a head.
template <typename T>
void head_linear(const HeadLinear<T>& op) {
    constexpr long rows_at_once = 128, turns = 4;  // turns: pieces for each thread, at least
    const LinearWeights& each = op.heads.front();
    const long num_heads = static_cast<long>(op.heads.size()), row_blocks = (op.num_rows + rows_at_once - 1) / rows_at_once;
    const long steps = (each.out_features + PIECE_STEP - 1) / PIECE_STEP, wanted = turns * num_threads();
    const long pieces = num_threads() == 1 || !op.num_rows ? 1 : std::clamp(wanted / (num_heads * row_blocks), 1L, steps);
    share(num_heads * row_blocks * pieces, [&](Chunks& chunks) {
        for (long i; (i = chunks.take()) < chunks.count();) {
            const long head = i / (row_blocks * pieces), block = i / pieces % row_blocks, piece = i % pieces;
            const long first = op.num_rows * block / row_blocks, count = op.num_rows * (block + 1) / row_blocks - first;
            const T* x = op.x + first * op.x_stride + head * (each.in_features + op.passed);
            T* out = op.out + first * op.out_stride + head * (each.out_features + op.passed);
            const auto border = [&](long n) { return std::min(steps * n / pieces * PIECE_STEP, each.out_features); };
            compute_outputs(op.heads[head], LayerRows<T>{x, count, op.x_stride}, border(piece), border(piece + 1), out, op.out_stride,
                    sizeof(T) == sizeof(float));
            if (piece > 0) continue;
            for (long row = 0; row < count; row++)
                std::memcpy(out + row * op.out_stride + each.out_features, x + row * op.x_stride + each.in_features, op.passed * sizeof(T));
        }
    });
}

template void head_linear(const HeadLinear<bf16>&);
template void head_linear(const HeadLinear<float>&);

}  // namespace quire::ISA
