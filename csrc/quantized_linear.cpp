// Linear layers over packed quantized weights.
//
// Activations are rounded to int8, each row and group of inputs by its own scale. A group's products are summed as
// integers, which is exact: neither instructions nor blocks matter. Groups are added in ascending order, in float32.
#include <stdexcept>
#include <string>

#include "quantized_tiles.hpp"
#include "quantized_vectors.hpp"

namespace quire::ISA {

template <typename T>
void quantized_linear(const Linear<T>& op) {
    if (op.format != WeightFormat::int8_a8 && op.format != WeightFormat::int4_a8)
        throw std::invalid_argument("no kernel for weight format " + std::to_string(static_cast<int>(op.format)));
    const QuantizedLayout layout(op.format, op.quantization, op.in_features);
#ifdef __AMX_INT8__
    if (op.num_rows > TILE_ROWS) return quantized_by_tiles(op, layout);  // fewer are bound by reading, in both ways
#endif
    if (op.format == WeightFormat::int8_a8)
        quantized_by_vectors<Byte>(op, layout);
    else if (layout.tile_inputs == 64)
        quantized_by_vectors<Nibbles<8>>(op, layout);
    else
        quantized_by_vectors<Nibbles<4>>(op, layout);
}

template void quantized_linear(const Linear<bf16>&);
template void quantized_linear(const Linear<float>&);

}  // namespace quire::ISA
