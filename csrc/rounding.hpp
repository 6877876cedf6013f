// Weights of floats rounded to 8-bit or 4-bit integers; kernels/quantized.py (`round_to_nearest`) has the meaning.
#pragma once

#include <cstdint>

namespace quire {

// Round rows [num_rows, width] of floats without gaps: elements [num_rows, width], a byte each, and scales [num_rows, groups
// of `group_size` inputs]. The zero point is 128, or 8 if is_int4. All threads take part.
void round_to_nearest(const float* rows, long num_rows, long width, long group_size, bool is_int4, std::uint8_t* elements,
                      float* scales);

}  // namespace quire
