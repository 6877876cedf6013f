// Conversions are loops without branches, of which the compiler makes vectors.
#include "convert.hpp"

#include <algorithm>
#include <cmath>
#include <stdexcept>

#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long VALUES_AT_ONCE = 1 << 18;  // a thread converts so many at a time
constexpr std::uint32_t INFINITE = 0x7f800000, MAGNITUDE = 0x7fffffff;

// The magnitude of a value as that of a float with `fraction_bits` and exponents from `least` on, whatever its highest. Added
// to a power of two 2^(23 - fraction_bits) times as large as its own, a float is rounded to that many bits, ties to even.
std::uint32_t rounded_magnitude(float value, int fraction_bits, int least) {
    const std::uint32_t lowest = std::uint32_t(least + 127) << 23, exponent = std::max(bits_of(value) & INFINITE, lowest);
    const float rounder = float_of(exponent + (std::uint32_t(23 - fraction_bits) << 23));
    const std::uint32_t last_bits = bits_of(std::fabs(value) + rounder) - bits_of(rounder);
    return ((exponent - lowest) >> (23 - fraction_bits)) + last_bits;
}

struct Float64 {
    using Stored = double;
    static float read(double value) { return static_cast<float>(value); }
};

struct Float32 {
    using Stored = float;
    static float read(float value) { return value; }
    static float write(float value) { return value; }
};

struct BFloat16 {
    using Stored = std::uint16_t;
    static float read(std::uint16_t bits) { return float_of(std::uint32_t{bits} << 16); }
    static std::uint16_t write(float value) {
        const std::uint32_t bits = bits_of(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        return static_cast<std::uint16_t>((bits & MAGNITUDE) > INFINITE ? bits >> 16 | 0x40u : rounded);
    }
};

struct Float16 {
    using Stored = std::uint16_t;
    static float read(std::uint16_t half) { return float_of_half(half); }
    static std::uint16_t write(float value) {
        const std::uint32_t magnitude = bits_of(value) & MAGNITUDE, rounded = rounded_magnitude(value, 10, -14);
        const std::uint32_t half = magnitude > INFINITE ? 0x7e00u : magnitude >= bits_of(65536.0f) ? 0x7c00u : rounded;
        return static_cast<std::uint16_t>(half | (bits_of(value) >> 16 & 0x8000u));
    }
};

struct Float8E4M3 {
    using Stored = std::uint8_t;
    static float read(std::uint8_t byte) {
        const std::uint32_t magnitude = byte & 0x7fu, sign = (byte & 0x80u) << 24;
        const float number = float_of(magnitude << 20) * 0x1p120f;  // subnormal or not
        return float_of(sign | (magnitude == 0x7fu ? 0x7fc00000u : bits_of(number)));
    }
    static std::uint8_t write(float value) {
        const std::uint32_t magnitude = bits_of(value) & MAGNITUDE, rounded = rounded_magnitude(value, 3, -6);
        const std::uint32_t byte = magnitude > INFINITE ? 0x7fu : magnitude >= bits_of(448.0f) ? 0x7eu : rounded;
        return static_cast<std::uint8_t>(byte | (bits_of(value) >> 24 & 0x80u));
    }
};

template <typename From, typename To>
void convert_values(const void* from, void* to, long count) {
    share_range(count, VALUES_AT_ONCE, [&](long begin, long end) {
        const auto* values = static_cast<const typename From::Stored*>(from);
        auto* results = static_cast<typename To::Stored*>(to);
        for (long i = begin; i < end; i++) results[i] = To::write(From::read(values[i]));
    });
}

template <typename From>
void convert_from(const void* from, void* to, ValueType to_type, long count) {
    switch (to_type) {
        case ValueType::float32: return convert_values<From, Float32>(from, to, count);
        case ValueType::float16: return convert_values<From, Float16>(from, to, count);
        case ValueType::bfloat16: return convert_values<From, BFloat16>(from, to, count);
        case ValueType::float8_e4m3: return convert_values<From, Float8E4M3>(from, to, count);
        default: throw std::invalid_argument("values are not converted to this type");
    }
}

}  // namespace

void convert(const void* from, ValueType from_type, void* to, ValueType to_type, long count) {
    switch (from_type) {
        case ValueType::float64: return convert_from<Float64>(from, to, to_type, count);
        case ValueType::float32: return convert_from<Float32>(from, to, to_type, count);
        case ValueType::float16: return convert_from<Float16>(from, to, to_type, count);
        case ValueType::bfloat16: return convert_from<BFloat16>(from, to, to_type, count);
        case ValueType::float8_e4m3: return convert_from<Float8E4M3>(from, to, to_type, count);
    }
    throw std::invalid_argument("values of this type are not converted");
}

}  // namespace quire
