// Norms and activations: a row is read once and written once. Rows are shared among the threads; a row's sum has sixteen
// lanes that are added in a fixed tree, so it depends on the row and its width alone.
#include <algorithm>

#include <omp.h>

#include "exp.hpp"
#include "softmax.hpp"

namespace quire::ISA {
namespace {

constexpr long FEW_ELEMENTS = 1 << 14;  // less than this is done before a second thread would have woken

template <typename T>
inline Floats rounded(Floats v) {
    if (sizeof(T) == sizeof(float)) return v;
    return as_floats(rounded_bits(v) << 16);
}

}  // namespace

template <typename T>
void rms_norm(const RmsNorm<T>& op) {
#pragma omp parallel for schedule(static) if (op.num_rows * op.width >= FEW_ELEMENTS)
    for (long row = 0; row < op.num_rows; row++) {
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
    }
}

// out [num_rows, width] = silu(gate) * up of gate_up [num_rows, 2 * width], gate in the first half of a row.
template <typename T>
void silu_and_mul(const SiluAndMul<T>& op) {
#pragma omp parallel for schedule(static) if (op.num_rows * op.width >= FEW_ELEMENTS)
    for (long row = 0; row < op.num_rows; row++) {
        const T* gate = op.gate_up + row * 2 * op.width;
        const T* up = gate + op.width;
        for (long i = 0; i < op.width; i += LANES) {
            const long count = std::min<long>(LANES, op.width - i);
            const Floats g = load_some(gate + i, count);
            const Floats activated = rounded<T>(g / (exp(-g) + splat(1.0f)));
            store_some(op.out + row * op.width + i, activated * load_some(up + i, count), count);
        }
    }
}

template void rms_norm(const RmsNorm<bf16>&);
template void rms_norm(const RmsNorm<float>&);
template void silu_and_mul(const SiluAndMul<bf16>&);
template void silu_and_mul(const SiluAndMul<float>&);

}  // namespace quire::ISA
