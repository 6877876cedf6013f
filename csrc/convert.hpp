// Values of one dtype as values of another.
#pragma once

#include <cstdint>

namespace quire {

enum class ValueType : std::uint8_t { float64, float32, float16, bfloat16, float8_e4m3 };

// Convert `count` values without gaps, each by way of float32, rounded to the nearest number, ties to even. What is too
// large is infinite, in e4m3 the largest number; NaN stays NaN. All threads take part. `to` may not be float64.
void convert(const void* from, ValueType from_type, void* to, ValueType to_type, long count);

}  // namespace quire
