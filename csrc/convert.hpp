// Values of one dtype as values of another.
#pragma once

#include <bit>
#include <cstdint>

namespace quire {

inline std::uint32_t bits_of(float value) { return std::bit_cast<std::uint32_t>(value); }
inline float float_of(std::uint32_t bits) { return std::bit_cast<float>(bits); }

// The value of a half. NaN keeps its bits.
inline float float_of_half(std::uint16_t half) {
    const std::uint32_t magnitude = half & 0x7fffu, sign = (half & 0x8000u) << 16;
    const float number = float_of(magnitude << 13) * 0x1p112f;  // subnormal or not
    return float_of(sign | (magnitude >= 0x7c00u ? magnitude << 13 | 0x7f800000u : bits_of(number)));
}

enum class ValueType : std::uint8_t { float64, float32, float16, bfloat16, float8_e4m3 };

// Convert `count` values without gaps, each by way of float32, rounded to the nearest number, ties to even. What is too
// large is infinite, in e4m3 the largest number; NaN stays NaN. All threads take part. `to` may not be float64.
void convert(const void* from, ValueType from_type, void* to, ValueType to_type, long count);

}  // namespace quire
