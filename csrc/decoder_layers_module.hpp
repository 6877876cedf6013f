#pragma once

#include <nanobind/nanobind.h>

#include "kernels.hpp"

namespace quire {

extern const Kernels* chosen;  // of the instruction set in use; never null

void bind_decoder_layers(nanobind::module_& module);

}  // namespace quire
