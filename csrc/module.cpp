// The Python module: addresses, shapes and strides in, nothing out. quire/kernels/cpu checks what is passed here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>

#include "isa.hpp"
#include "kernels.hpp"
#include "packing.hpp"

namespace nb = nanobind;
using Address = std::uintptr_t;

namespace quire {
namespace {

const Kernels* chosen = &portable::kernels;

template <typename T>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

void use_isa(const std::string& name) {
    for (const std::string& usable : usable_isas())
        if (usable == name) {
#ifdef HAS_X86_KERNELS
            chosen = name == "amx" ? &amx::kernels : name == "avx512" ? &avx512::kernels : &portable::kernels;
#endif
            return;
        }
    throw std::invalid_argument("the instruction set " + name + " was not built, or this CPU does not have it");
}

template <typename T>
void pack(Address weight, long stride, long out_features, long in_features, Address packed) {
    pack_linear(at<const T>(weight), stride, out_features, in_features, at<T>(packed));
}

template <typename T>
Linear<T> linear_op(Address x, long num_rows, long in_features, long x_stride, Address packed, long out_features,
                    Address bias, Address out, long out_stride, bool out_is_float) {
    return {at<const T>(x), num_rows, in_features, x_stride, at<const T>(packed),
            out_features, at<const float>(bias), at<void>(out), out_stride, out_is_float};
}

}  // namespace
}  // namespace quire

NB_MODULE(_kernels, module) {
    using namespace quire;
    module.def("usable_isas", usable_isas);
    module.def("use_isa", use_isa);
    module.def("packed_size_bf16", [](long outs, long ins) { return packed_size(outs, ins, (const bf16*)nullptr); });
    module.def("packed_size_float", [](long outs, long ins) { return packed_size(outs, ins, (const float*)nullptr); });
    module.def("pack_bf16", pack<bf16>, nb::call_guard<nb::gil_scoped_release>());
    module.def("pack_float", pack<float>, nb::call_guard<nb::gil_scoped_release>());
    module.def("linear_bf16", [](Address x, long rows, long ins, long xs, Address w, long outs, Address b, Address o, long os,
                                 bool f) { chosen->linear_bf16(linear_op<bf16>(x, rows, ins, xs, w, outs, b, o, os, f)); });
    module.def("linear_float", [](Address x, long rows, long ins, long xs, Address w, long outs, Address b, Address o, long os,
                                  bool f) { chosen->linear_float(linear_op<float>(x, rows, ins, xs, w, outs, b, o, os, f)); });
}
