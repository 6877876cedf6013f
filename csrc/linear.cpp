// Linear layers over packed weights.
//
// Each output is one sum over the inputs in ascending order, kept in one accumulator (a lane, or an element of a tile)
// from the first input to the last, or put down as it is and taken up again: neither the number of rows nor of threads
// changes its order. Threads share the outputs, never a sum.
#include <stdexcept>
#include <string>

#include "linear_tiles.hpp"
#include "linear_vectors.hpp"

namespace quire::ISA {

template <typename T>
void check_format(const Linear<T>& op) {
    if (op.format != WeightFormat::dense)
        throw std::invalid_argument("no kernel for weight format " + std::to_string(static_cast<int>(op.format)));
}

template <typename T>
void linear(const Linear<T>& op) {
    check_format(op);
    if (op.num_rows) linear_by_vectors(op);
}

#ifdef __AMX_BF16__
template <>
void linear(const Linear<bf16>& op) {
    check_format(op);
    if (op.num_rows) linear_by_tiles(op);
}
#else
template void linear(const Linear<bf16>&);
#endif
template void linear(const Linear<float>&);

}  // namespace quire::ISA
