// The AVX-512 and AMX instructions that the kernels use, in plain C++: with them the builds for those instruction sets run,
// slowly, on a CPU that has AVX2 alone (`make imitated`). In front of every source of such a build by -include; the
// definitions IMITATE_AVX512, IMITATE_AVX512_VNNI, IMITATE_AVX512_BF16 and IMITATE_AMX say which instructions the build may use.
//
// Integers and float32 give the bits of the instructions. Sums of bfloat16 products are rounded after each product, in the
// order of Intel's manual; subnormal numbers count as zeros there.
#pragma once

#include <immintrin.h>  // before the definitions below, with which it would declare what the target does not have

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace quire::imitated {

constexpr int LANES = 16;

template <typename T>
using Vector [[gnu::vector_size(64)]] = T;
using Int8s = Vector<std::int8_t>;
using UInt8s = Vector<std::uint8_t>;
using Int16s = Vector<std::int16_t>;
using UInt16s = Vector<std::uint16_t>;
using Int32s = Vector<std::int32_t>;
using UInt32s = Vector<std::uint32_t>;

template <typename To, typename From>
inline To bits_as(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Apply `each(lane)` to make a vector of 32-bit lanes.
template <typename Made, typename Each>
inline Made by_lane(Each&& each) {
    Made made;
    for (int lane = 0; lane < LANES; lane++) made[lane] = each(lane);
    return made;
}

template <typename Each>
inline __mmask16 mask_of(Each&& each) {
    unsigned mask = 0;
    for (int lane = 0; lane < LANES; lane++) mask |= static_cast<unsigned>(each(lane)) << lane;
    return static_cast<__mmask16>(mask);
}

inline bool is_set(__mmask16 mask, int lane) { return mask >> lane & 1; }

// --- float32 ---------------------------------------------------------------------------------------------------------

inline __m512 fmadd_ps(__m512 a, __m512 b, __m512 c) {
    return by_lane<__m512>([&](int i) { return std::fma(a[i], b[i], c[i]); });
}
inline __m512 fnmadd_ps(__m512 a, __m512 b, __m512 c) { return fmadd_ps(-a, b, c); }
inline __m512 permutexvar_ps(__m512i index, __m512 a) {
    return by_lane<__m512>([&](int i) { return a[((Int32s)index)[i] & 15]; });
}
inline __m512 mul_ps(__m512 a, __m512 b) { return a * b; }
inline __m512 add_ps(__m512 a, __m512 b) { return a + b; }
inline __m512 sub_ps(__m512 a, __m512 b) { return a - b; }
inline __m512 max_ps(__m512 a, __m512 b) {
    return by_lane<__m512>([&](int i) { return a[i] > b[i] ? a[i] : b[i]; });
}
inline __m512 min_ps(__m512 a, __m512 b) {
    return by_lane<__m512>([&](int i) { return a[i] < b[i] ? a[i] : b[i]; });
}
inline __m512 set1_ps(float x) { return x - __m512{}; }

template <int mode>
inline __m512 round_ps(__m512 x) {
    return by_lane<__m512>([&](int i) {
        return (mode & 3) == _MM_FROUND_TO_NEG_INF ? std::floor(x[i]) : std::nearbyint(x[i]);
    });
}
template <int mode>
inline __m512 reduce_ps(__m512 x) { return x - round_ps<mode>(x); }

inline __m512 scalef_ps(__m512 x, __m512 power) {
    return by_lane<__m512>([&](int i) {
        if (std::isnan(power[i])) return power[i];
        const float floored = std::floor(power[i]);
        return std::ldexp(x[i], static_cast<int>(std::fmin(std::fmax(floored, -1000.0f), 1000.0f)));
    });
}
inline __m512 maskz_scalef_ps(__mmask16 mask, __m512 x, __m512 power) {
    const __m512 scaled = scalef_ps(x, power);
    return by_lane<__m512>([&](int i) { return is_set(mask, i) ? scaled[i] : 0.0f; });
}

template <int predicate>
inline __mmask16 cmp_ps_mask(__m512 a, __m512 b) {
    static_assert(predicate == _CMP_UNORD_Q || predicate == _CMP_NLT_UQ);
    return mask_of([&](int i) {
        return predicate == _CMP_UNORD_Q ? std::isunordered(a[i], b[i]) : !(a[i] < b[i]);
    });
}

// --- integers --------------------------------------------------------------------------------------------------------

inline __m512i load_words(const void* from) {
    __m512i words;
    std::memcpy(&words, from, sizeof words);
    return words;
}
inline void store_words(void* to, __m512i words) { std::memcpy(to, &words, sizeof words); }

inline __m512i set1_epi32(int x) { return (__m512i)(x - Int32s{}); }
inline __m512i set1_epi16(short x) { return (__m512i)(x - Int16s{}); }
inline __m512i set1_epi8(char x) { return (__m512i)((std::int8_t)x - Int8s{}); }
inline __m512i setzero_si512() { return __m512i{}; }
inline __m512i and_si512(__m512i a, __m512i b) { return a & b; }
inline __m512i or_si512(__m512i a, __m512i b) { return a | b; }
inline __m512i xor_si512(__m512i a, __m512i b) { return a ^ b; }
inline __m512i add_epi32(__m512i a, __m512i b) { return (__m512i)((UInt32s)a + (UInt32s)b); }
inline __m512i sub_epi32(__m512i a, __m512i b) { return (__m512i)((UInt32s)a - (UInt32s)b); }
inline __m512i add_epi16(__m512i a, __m512i b) { return (__m512i)((UInt16s)a + (UInt16s)b); }
inline __m512i sub_epi8(__m512i a, __m512i b) { return (__m512i)((UInt8s)a - (UInt8s)b); }
inline __m512i mullo_epi32(__m512i a, __m512i b) { return (__m512i)((UInt32s)a * (UInt32s)b); }
inline __m512i srli_epi32(__m512i a, unsigned count) { return (__m512i)((UInt32s)a >> count); }
inline __m512i slli_epi32(__m512i a, unsigned count) { return (__m512i)((UInt32s)a << count); }
inline __m512i srli_epi16(__m512i a, unsigned count) { return (__m512i)((UInt16s)a >> count); }
inline __m512 cvtepi32_ps(__m512i a) { return __builtin_convertvector((Int32s)a, __m512); }
inline __m512i cvtps_epi32(__m512 x) {
    return (__m512i)by_lane<Int32s>([&](int i) {
        const float rounded = std::nearbyint(x[i]);
        return rounded >= -0x1p31f && rounded < 0x1p31f ? static_cast<std::int32_t>(rounded) : INT32_MIN;
    });
}

inline __m512i mask_or_epi32(__m512i source, __mmask16 mask, __m512i a, __m512i b) {
    const Int32s from = (Int32s)source, both = (Int32s)(a | b);
    return (__m512i)by_lane<Int32s>([&](int i) { return is_set(mask, i) ? both[i] : from[i]; });
}
inline __m512i maskz_compress_epi32(__mmask16 mask, __m512i a) {
    Int32s kept = {};
    for (int lane = 0, count = 0; lane < LANES; lane++)
        if (is_set(mask, lane)) kept[count++] = ((Int32s)a)[lane];
    return (__m512i)kept;
}
inline __mmask16 movepi32_mask(__m512i a) {
    return mask_of([&](int i) { return ((Int32s)a)[i] < 0; });
}
inline __m512i cvtepu16_epi32(__m256i a) {
    const auto halves = bits_as<std::array<std::uint16_t, LANES>>(a);
    return (__m512i)by_lane<Int32s>([&](int i) { return halves[i]; });
}
inline __m512i permutex2var_epi16(__m512i a, __m512i index, __m512i b) {
    const Int16s halves[2] = {(Int16s)a, (Int16s)b};
    const UInt16s from = (UInt16s)index;
    Int16s out;
    for (int i = 0; i < 2 * LANES; i++) out[i] = halves[from[i] >> 5 & 1][from[i] & 31];
    return (__m512i)out;
}

// Sums of four products of unsigned and signed bytes in each lane.
inline __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    const UInt8s unsigned_bytes = (UInt8s)a;
    const Int8s signed_bytes = (Int8s)b;
    return (__m512i)by_lane<Int32s>([&](int i) {
        std::int32_t sum = ((Int32s)sums)[i];
        for (int byte = 4 * i; byte < 4 * i + 4; byte++) sum += unsigned_bytes[byte] * signed_bytes[byte];
        return sum;
    });
}

inline __m512i madd_epi16(__m512i a, __m512i b) {
    const Int16s x = (Int16s)a, y = (Int16s)b;
    return (__m512i)by_lane<Int32s>([&](int i) { return x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1]; });
}

inline __m512i maddubs_epi16(__m512i a, __m512i b) {
    const UInt8s x = (UInt8s)a;
    const Int8s y = (Int8s)b;
    Int16s out;
    for (int i = 0; i < 2 * LANES; i++) {
        const int sum = x[2 * i] * y[2 * i] + x[2 * i + 1] * y[2 * i + 1];
        out[i] = static_cast<std::int16_t>(sum > INT16_MAX ? INT16_MAX : sum < INT16_MIN ? INT16_MIN : sum);
    }
    return (__m512i)out;
}

inline __m512i cvtepi8_epi16(__m256i a) {
    typedef std::int8_t Bytes __attribute__((vector_size(32)));
    return (__m512i)__builtin_convertvector((Bytes)a, Int16s);
}
inline __m512i cvtepu8_epi16(__m256i a) {
    typedef std::uint8_t Bytes __attribute__((vector_size(32)));
    return (__m512i)__builtin_convertvector((Bytes)a, Int16s);
}

inline __m512i cvtepi8_epi32(__m128i a) {
    typedef std::int8_t Bytes __attribute__((vector_size(16)));
    return (__m512i)__builtin_convertvector((Bytes)a, Int32s);
}
inline __m512i cvtepu8_epi32(__m128i a) {
    typedef std::uint8_t Bytes __attribute__((vector_size(16)));
    return (__m512i)__builtin_convertvector((Bytes)a, Int32s);
}

inline __m128i cvtepi32_epi8(__m512i a) {
    typedef std::uint8_t Bytes __attribute__((vector_size(16)));
    return (__m128i)__builtin_convertvector((UInt32s)a, Bytes);
}
inline __m512i castsi128_si512(__m128i a) {
    const __m128i parts[] = {a, {}, {}, {}};
    return bits_as<__m512i>(parts);
}
inline __m512i inserti32x4(__m512i a, __m128i b, int quarter) {
    std::memcpy(reinterpret_cast<char*>(&a) + quarter * sizeof b, &b, sizeof b);
    return a;
}
inline __m512i permutexvar_epi32(__m512i index, __m512i a) {
    return (__m512i)by_lane<UInt32s>([&](int i) { return ((UInt32s)a)[((Int32s)index)[i] & 15]; });
}
inline __m512i permutexvar_epi16(__m512i index, __m512i a) { return permutex2var_epi16(a, index, a); }
inline __m512i shuffle_epi8(__m512i a, __m512i index) {
    UInt8s made;
    for (int i = 0; i < 64; i++) {
        const int place = ((UInt8s)index)[i];
        made[i] = place & 0x80 ? 0 : ((UInt8s)a)[i / 16 * 16 + (place & 15)];
    }
    return (__m512i)made;
}

inline __m512 cvtph_ps(__m256i a) {
    const __m256 parts[] = {_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))};
    return bits_as<__m512>(parts);
}

// --- bfloat16 --------------------------------------------------------------------------------------------------------

inline float without_subnormal(float x) { return std::fabs(x) < 0x1p-126f ? std::copysign(0.0f, x) : x; }

inline float from_bf16(std::uint16_t x) { return without_subnormal(bits_as<float>(static_cast<std::uint32_t>(x) << 16)); }

inline float add_product(std::uint16_t a, std::uint16_t b, float sum) {
    return without_subnormal(std::fma(from_bf16(a), from_bf16(b), without_subnormal(sum)));
}

inline __m512 dpbf16_ps(__m512 sums, __m512bh a, __m512bh b) {
    const auto x = bits_as<UInt16s>(a), y = bits_as<UInt16s>(b);
    return by_lane<__m512>([&](int i) {
        return add_product(x[2 * i], y[2 * i], add_product(x[2 * i + 1], y[2 * i + 1], sums[i]));
    });
}

inline __m256bh cvtneps_pbh(__m512 x) {
    std::uint16_t halves[LANES];
    for (int i = 0; i < LANES; i++) {
        const auto bits = bits_as<std::uint32_t>(without_subnormal(x[i]));
        halves[i] = static_cast<std::uint16_t>(x[i] != x[i] ? bits >> 16 | 0x40u : (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
    }
    return bits_as<__m256bh>(halves);
}

inline __m512bh cvtne2ps_pbh(__m512 high, __m512 low) {
    const __m256bh parts[] = {cvtneps_pbh(low), cvtneps_pbh(high)};
    return bits_as<__m512bh>(parts);
}

// --- tiles -----------------------------------------------------------------------------------------------------------

// The operand of ldtilecfg.
struct TileConfig {
    std::uint8_t palette, start_row, reserved[14];
    std::uint16_t row_bytes[16];
    std::uint8_t rows[16];
};

struct Tile {
    alignas(64) std::uint8_t bytes[16][64];
};

struct TileUnit {
    TileConfig config;
    Tile tiles[8];
};

inline TileUnit& tile_unit() {
    static thread_local TileUnit unit = {};
    return unit;
}

inline void tile_loadconfig(const void* config) {
    tile_unit() = {};
    std::memcpy(&tile_unit().config, config, sizeof(TileConfig));
}
inline void tile_release() { tile_unit() = {}; }
inline void tile_zero(int tile) { tile_unit().tiles[tile] = {}; }

inline void tile_load(int tile, const void* from, long stride) {
    TileUnit& unit = tile_unit();
    unit.tiles[tile] = {};
    for (int row = 0; row < unit.config.rows[tile]; row++)
        std::memcpy(unit.tiles[tile].bytes[row], static_cast<const char*>(from) + row * stride, unit.config.row_bytes[tile]);
}
inline void tile_store(int tile, void* to, long stride) {
    const TileUnit& unit = tile_unit();
    for (int row = 0; row < unit.config.rows[tile]; row++)
        std::memcpy(static_cast<char*>(to) + row * stride, unit.tiles[tile].bytes[row], unit.config.row_bytes[tile]);
}

// Apply add(sum, words of `a` and of `b`, how many words, how far apart those of b) to each sum of tile `to`.
template <typename Sum, typename Add>
inline void tile_multiply(int to, int a, int b, Add&& add) {
    TileUnit& unit = tile_unit();
    const int columns = unit.config.row_bytes[to] / 4, words = unit.config.row_bytes[a] / 4;
    for (int row = 0; row < unit.config.rows[to]; row++)
        for (int column = 0; column < columns; column++) {
            Sum sum;
            std::uint8_t* place = unit.tiles[to].bytes[row] + 4 * column;
            std::memcpy(&sum, place, sizeof sum);
            sum = add(sum, unit.tiles[a].bytes[row], unit.tiles[b].bytes[0] + 4 * column, words);
            std::memcpy(place, &sum, sizeof sum);
        }
}

template <typename A, typename B>
inline void tile_multiply_bytes(int to, int a, int b) {
    tile_multiply<std::int32_t>(to, a, b, [](std::int32_t sum, const std::uint8_t* x, const std::uint8_t* y, int words) {
        for (int word = 0; word < words; word++)
            for (int i = 0; i < 4; i++) sum += static_cast<A>(x[4 * word + i]) * static_cast<B>(y[64 * word + i]);
        return sum;
    });
}

inline void tile_multiply_bf16(int to, int a, int b) {
    tile_multiply<float>(to, a, b, [](float sum, const std::uint8_t* x, const std::uint8_t* y, int words) {
        float even = 0, odd = 0;
        for (int word = 0; word < words; word++) {
            std::uint16_t left[2], right[2];
            std::memcpy(left, x + 4 * word, sizeof left);
            std::memcpy(right, y + 64 * word, sizeof right);
            even = add_product(left[0], right[0], even), odd = add_product(left[1], right[1], odd);
        }
        return without_subnormal(sum + without_subnormal(even + odd));
    });
}

}  // namespace quire::imitated

#ifdef IMITATE_AVX512
#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define _mm512_fmadd_ps quire::imitated::fmadd_ps
#define _mm512_fnmadd_ps quire::imitated::fnmadd_ps
#define _mm512_mul_ps quire::imitated::mul_ps
#define _mm512_add_ps quire::imitated::add_ps
#define _mm512_sub_ps quire::imitated::sub_ps
#define _mm512_max_ps quire::imitated::max_ps
#define _mm512_min_ps quire::imitated::min_ps
#define _mm512_set1_ps quire::imitated::set1_ps
#define _mm512_scalef_ps quire::imitated::scalef_ps
#define _mm512_maskz_scalef_ps quire::imitated::maskz_scalef_ps
#define _mm512_loadu_si512 quire::imitated::load_words
#define _mm512_load_si512 quire::imitated::load_words
#define _mm512_storeu_si512 quire::imitated::store_words
#define _mm512_store_si512 quire::imitated::store_words
#define _mm512_set1_epi32 quire::imitated::set1_epi32
#define _mm512_set1_epi16 quire::imitated::set1_epi16
#define _mm512_set1_epi8 quire::imitated::set1_epi8
#define _mm512_setzero_si512 quire::imitated::setzero_si512
#define _mm512_and_si512 quire::imitated::and_si512
#define _mm512_or_si512 quire::imitated::or_si512
#define _mm512_xor_si512 quire::imitated::xor_si512
#define _mm512_add_epi32 quire::imitated::add_epi32
#define _mm512_sub_epi32 quire::imitated::sub_epi32
#define _mm512_add_epi16 quire::imitated::add_epi16
#define _mm512_sub_epi8 quire::imitated::sub_epi8
#define _mm512_mullo_epi32 quire::imitated::mullo_epi32
#define _mm512_cvtepi32_ps quire::imitated::cvtepi32_ps
#define _mm512_cvtps_epi32 quire::imitated::cvtps_epi32
#define _mm512_mask_or_epi32 quire::imitated::mask_or_epi32
#define _mm512_maskz_compress_epi32 quire::imitated::maskz_compress_epi32
#define _mm512_movepi32_mask quire::imitated::movepi32_mask
#define _mm512_permutexvar_ps quire::imitated::permutexvar_ps
#define _mm512_permutex2var_epi16 quire::imitated::permutex2var_epi16
#define _mm512_madd_epi16 quire::imitated::madd_epi16
#define _mm512_maddubs_epi16 quire::imitated::maddubs_epi16
#define _mm512_cvtepi8_epi16 quire::imitated::cvtepi8_epi16
#define _mm512_cvtepu16_epi32 quire::imitated::cvtepu16_epi32
#define _mm512_cvtepu8_epi16 quire::imitated::cvtepu8_epi16
#define _mm512_cvtepi8_epi32 quire::imitated::cvtepi8_epi32
#define _mm512_cvtepu8_epi32 quire::imitated::cvtepu8_epi32
#define _mm512_cvtepi32_epi8 quire::imitated::cvtepi32_epi8
#define _mm512_castsi128_si512 quire::imitated::castsi128_si512
#define _mm512_permutexvar_epi32 quire::imitated::permutexvar_epi32
#define _mm512_permutexvar_epi16 quire::imitated::permutexvar_epi16
#define _mm512_shuffle_epi8 quire::imitated::shuffle_epi8
#define _mm512_cvtph_ps quire::imitated::cvtph_ps
// Macros in the compiler's headers where it does not optimize.
#undef _mm512_srli_epi32
#undef _mm512_slli_epi32
#undef _mm512_srli_epi16
#undef _mm512_roundscale_ps
#undef _mm512_inserti32x4
#undef _mm512_reduce_ps
#undef _mm512_cmp_ps_mask
#define _mm512_inserti32x4 quire::imitated::inserti32x4
#define _mm512_srli_epi32 quire::imitated::srli_epi32
#define _mm512_slli_epi32 quire::imitated::slli_epi32
#define _mm512_srli_epi16 quire::imitated::srli_epi16
#define _mm512_roundscale_ps(x, mode) quire::imitated::round_ps<mode>(x)
#define _mm512_reduce_ps(x, mode) quire::imitated::reduce_ps<mode>(x)
#define _mm512_cmp_ps_mask(a, b, predicate) quire::imitated::cmp_ps_mask<predicate>(a, b)
#endif

#ifdef IMITATE_AVX512_VNNI
#define __AVX512VNNI__ 1
#define _mm512_dpbusd_epi32 quire::imitated::dpbusd_epi32
#endif

#ifdef IMITATE_AVX512_BF16
#define __AVX512BF16__ 1
#define _mm512_dpbf16_ps quire::imitated::dpbf16_ps
#define _mm512_cvtneps_pbh quire::imitated::cvtneps_pbh
#define _mm512_cvtne2ps_pbh quire::imitated::cvtne2ps_pbh
#endif

#ifdef IMITATE_AMX
#define __AMX_TILE__ 1
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#undef _tile_loadconfig
#undef _tile_release
#undef _tile_zero
#undef _tile_loadd
#undef _tile_stream_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbssd
#undef _tile_dpbsud
#undef _tile_dpbusd
#undef _tile_dpbuud
#define _tile_loadconfig quire::imitated::tile_loadconfig
#define _tile_release quire::imitated::tile_release
#define _tile_zero quire::imitated::tile_zero
#define _tile_loadd quire::imitated::tile_load
#define _tile_stream_loadd quire::imitated::tile_load
#define _tile_stored quire::imitated::tile_store
#define _tile_dpbf16ps quire::imitated::tile_multiply_bf16
#define _tile_dpbssd (quire::imitated::tile_multiply_bytes<std::int8_t, std::int8_t>)
#define _tile_dpbsud (quire::imitated::tile_multiply_bytes<std::int8_t, std::uint8_t>)
#define _tile_dpbusd (quire::imitated::tile_multiply_bytes<std::uint8_t, std::int8_t>)
#define _tile_dpbuud (quire::imitated::tile_multiply_bytes<std::uint8_t, std::uint8_t>)
#endif
