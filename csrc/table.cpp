#include "kernels.hpp"

namespace quire::ISA {

void linear_bf16(const Linear<bf16>&);
void linear_float(const Linear<float>&);

const Kernels kernels = {linear_bf16, linear_float};

}  // namespace quire::ISA
