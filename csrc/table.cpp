#include "kernels.hpp"

namespace quire::ISA {

template <typename T>
void linear(const Linear<T>&);
template <typename T>
void rms_norm(const RmsNorm<T>&);
template <typename T>
void silu_and_mul(const SiluAndMul<T>&);

const Kernels kernels = {
    {linear<bf16>, linear<float>},
    {rms_norm<bf16>, rms_norm<float>},
    {silu_and_mul<bf16>, silu_and_mul<float>},
};

}  // namespace quire::ISA
