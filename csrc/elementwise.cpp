// Norms: a row is read once and written once. Rows are shared among the threads; a row's sum has sixteen
// lanes that are added in a fixed tree, so it depends on the row and its width alone.
#include <algorithm>

#include "gang.hpp"
#include "softmax.hpp"

namespace quire::ISA {
namespace {

constexpr long PIECE_ELEMENTS = 1 << 13;  // a thread takes about so many at a time: a few microseconds

// Call row(i) for all rows.
template <typename Row>
void each_row(long num_rows, long width, Row row) {
    share_range(num_rows, std::max(1L, PIECE_ELEMENTS / width), [&](long begin, long end) {
        for (long i = begin; i < end; i++) row(i);
    });
}

}  // namespace

template <typename T>
void rms_norm(const RmsNorm<T>& op) {
    each_row(op.num_rows, op.width, [&](long row) {
        const T* x = op.x + row * op.x_stride;
        const T* residual = op.residual ? op.residual + row * op.width : nullptr;
        T* summed = op.summed + row * op.width;
        T* out = op.out + row * op.width;
        Floats squares = {};
        for (long i = 0; i < op.width; i += LANES) {
            const long count = std::min<long>(LANES, op.width - i);
            Floats v = load_some(x + i, count);
            if (residual) {
                v = rounded<T>(v + load_some(residual + i, count));
                store_some(summed + i, v, count);
            }
            squares = multiply_add(v, v, squares);
        }
        const float mean = sum_of_lanes(squares) / static_cast<float>(op.width);
        const Floats inverse = splat(1.0f / __builtin_sqrtf(mean + op.eps));
        const T* values = residual ? summed : x;
        for (long i = 0; i < op.width; i += LANES) {
            const long count = std::min<long>(LANES, op.width - i);
            const Floats normed = rounded<T>(load_some(values + i, count) * inverse);
            store_some(out + i, normed * load_some(op.weight + i, count), count);
        }
    });
}

template void rms_norm(const RmsNorm<bf16>&);
template void rms_norm(const RmsNorm<float>&);

}  // namespace quire::ISA
