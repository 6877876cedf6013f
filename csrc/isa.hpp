// Which instruction sets this CPU and this system let us use.
#pragma once

#include <string>
#include <vector>

namespace quire {

// Names of the instruction sets that were built and can run here, the best first: amx, avx512, portable.
std::vector<std::string> usable_isas();

}  // namespace quire
