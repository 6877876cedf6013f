// The words of a packed weight (packing.hpp) that the loops of dense linear layers read, whatever its format: dense words as
// they lie, all others expanded into scratch that stays in the cache. So sums have the bits of those of the dense weight.
//
// A value is scale * (element - zero point) or (scale * element) - minimum, each step rounded to float32 by itself, and then
// to T. Rounding to bfloat16 where the CPU does it takes values below 2^-126 as zeros, as its products take them anyway.
#pragma once

#include "aligned.hpp"
#include "cache_layout.hpp"
#include "e4m3.hpp"
#include "expanded_packing.hpp"
#include "vec.hpp"

namespace quire::ISA {

constexpr long ELEMENTS_AHEAD = 2048;  // bytes that are asked for: of few rows those that are expanded next

constexpr bool is_half_byte(WeightFormat format) { return format == WeightFormat::int4 || format == WeightFormat::codebook4; }

// Elements as float32.
template <WeightFormat format>
struct Decoder {
    explicit Decoder(const Quantization&) {}
    Register operator()(RegisterWords elements) const { return __builtin_convertvector((RegisterIntegers)elements, Register); }
};

template <>
struct Decoder<WeightFormat::codebook4> {
#if defined(__AVX512F__)
    Register all;
    explicit Decoder(const Quantization& quantization) { std::memcpy(&all, quantization.codebook, sizeof all); }
    Register operator()(RegisterWords elements) const { return (Register)_mm512_permutexvar_ps((__m512i)elements, (__m512)all); }
#elif defined(__AVX2__)
    Register halves[2];
    explicit Decoder(const Quantization& quantization) { std::memcpy(halves, quantization.codebook, sizeof halves); }
    Register operator()(RegisterWords elements) const {
        const __m256 low = _mm256_permutevar8x32_ps((__m256)halves[0], (__m256i)elements);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)halves[1], (__m256i)elements);
        return (Register)_mm256_blendv_ps(low, high, (__m256)(elements << 28));
    }
#else
    const float* codebook;
    explicit Decoder(const Quantization& quantization) : codebook(quantization.codebook) {}
    Register operator()(RegisterWords elements) const {
        Register values;
        for (int lane = 0; lane < REGISTER_LANES; lane++) values[lane] = codebook[elements[lane]];
        return values;
    }
#endif
};

// What elements of some outputs and one group become.
template <Offsets offsets>
struct Scaling {
    Register scales, taken;

    // Lanes from `lane` on of a group's header.
    Scaling(const float* header, long num_groups, long group, int lane, const Quantization& quantization) {
        std::memcpy(&scales, header + group * STRIP + lane, sizeof scales);
        if constexpr (offsets == Offsets::zero_point)
            taken = static_cast<float>(quantization.zero_point) - Register{};
        else
            std::memcpy(&taken, header + (num_groups + group) * STRIP + lane, sizeof taken);
    }
    // Floats, which have no zero point, are multiplied only.
    template <WeightFormat format>
    Register value(Register elements) const {
        if constexpr (format == WeightFormat::fp8 || format == WeightFormat::codebook4) return scales * elements;
        if constexpr (offsets == Offsets::minimums) return scales * elements - taken;
        return scales * (elements - taken);
    }
};

// Bits whose upper halves are those of the nearest bfloat16. NaN must be one of those that packing leaves.
inline RegisterWords nearest_half(Register values) {
    const RegisterWords bits = (RegisterWords)values;
    return bits + 0x7fffu + ((bits >> 16) & 1u);
}

inline void store_words(float* to, Register values) { std::memcpy(to, &values, sizeof values); }

// Pairs of an even and an odd input's values.
inline void store_words(bf16* to, Register even, Register odd) {
#if defined(__AVX512BF16__)
    typedef std::uint16_t Halves __attribute__((vector_size(64)));
    const Halves both = (Halves)_mm512_cvtne2ps_pbh((__m512)odd, (__m512)even);
    const Halves pairs = __builtin_shufflevector(both, both, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23,
                                                 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif defined(__AVX2__) && !defined(__AVX512F__)
    const __m256i pairs = _mm256_blend_epi16((__m256i)(nearest_half(even) >> 16), (__m256i)nearest_half(odd), 0xaa);
#else
    const RegisterWords pairs = nearest_half(even) >> 16 | (nearest_half(odd) & 0xffff0000u);
#endif
    std::memcpy(to, &pairs, sizeof pairs);
}

// Bytes, each in a lane. From a vector of bytes gcc 12 would take them one by one.
inline RegisterWords widened(const std::uint8_t* elements) {
#if defined(__AVX512F__)
    return (RegisterWords)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(elements)));
#elif defined(__AVX2__)
    return (RegisterWords)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(elements)));
#elif defined(__SSE2__)
    std::int32_t bytes;
    std::memcpy(&bytes, elements, sizeof bytes);
    const __m128i zero = _mm_setzero_si128();
    return (RegisterWords)_mm_unpacklo_epi16(_mm_unpacklo_epi8(_mm_cvtsi32_si128(bytes), zero), zero);
#else
    RegisterWords words;
    for (int lane = 0; lane < REGISTER_LANES; lane++) words[lane] = elements[lane];
    return words;
#endif
}

// Elements of the even or the odd input of a pair, as floats.
template <WeightFormat format>
inline Register load_elements(const Decoder<format>& decode, const std::uint8_t* elements, long pair, bool is_odd) {
    elements += (is_half_byte(format) ? pair : 2 * pair + is_odd) * STRIP;
    if constexpr (format == WeightFormat::fp8) return widened_e4m3(elements);
    const RegisterWords loaded = widened(elements);
    if constexpr (!is_half_byte(format)) return decode(loaded);
    return decode(is_odd ? loaded >> 4 : loaded & 15u);
}

// Words [word, end) of a strip, whose first inputs are all of one group and whose last ones of another or the same. Elements
// so many bytes ahead are asked for.
template <typename T, WeightFormat format, Offsets offsets>
void expand_run(const Quantization& quantization, const ExpandedLayout& layout, const std::uint8_t* strip, const long (&groups)[2],
                long word, long end, long ahead, T* to) {
    const float* header = reinterpret_cast<const float*>(strip);
    const Decoder<format> decode(quantization);
    for (int lane = 0; lane < STRIP; lane += REGISTER_LANES) {
        const std::uint8_t* elements = strip + layout.header_bytes + lane;
        const Scaling<offsets> first(header, layout.num_groups, groups[0], lane, quantization);
        const Scaling<offsets> last(header, layout.num_groups, groups[1], lane, quantization);
        T* at = to + lane * PAIR<T>;
        for (long i = word; i < end; i++, at += STRIP * PAIR<T>) {
            if (lane == 0) __builtin_prefetch(elements + i * PAIR<T> * STRIP / (is_half_byte(format) ? 2 : 1) + ahead);
            if constexpr (PAIR<T> == 1)
                store_words(at, first.template value<format>(load_elements(decode, elements, i >> 1, i & 1)));
            else
                store_words(at, first.template value<format>(load_elements(decode, elements, i, false)),
                            last.template value<format>(load_elements(decode, elements, i, true)));
        }
    }
}

// `count` words of a strip, from `word` on; zeros where there is no input. The strip that comes next is `next_strip` strips on.
template <typename T, WeightFormat format, Offsets offsets>
void expand_words(const Linear<T>& op, const ExpandedLayout& layout, long strip, long next_strip, long word, long count, T* to) {
    const std::uint8_t* from = reinterpret_cast<const std::uint8_t*>(op.packed) + strip * layout.strip_bytes;
    const Quantization& quantization = op.quantization;
    const auto group_of = [&](long input) -> long {
        return quantization.groups ? quantization.groups[input] : static_cast<unsigned>(input) / static_cast<unsigned>(quantization.group_size);
    };
    const long end = std::min(word + count, (op.in_features + PAIR<T> - 1) / PAIR<T>);
    const bool is_last = layout.header_bytes + end * STRIP * PAIR<T> / (is_half_byte(format) ? 2 : 1) + ELEMENTS_AHEAD > layout.strip_bytes;
    const long ahead = ELEMENTS_AHEAD + (is_last ? (next_strip - 1) * layout.strip_bytes : 0);
    T* const end_of_words = to + count * STRIP * PAIR<T>;
    for (long next; word < end; to += (next - word) * STRIP * PAIR<T>, word = next) {
        const long first = word * PAIR<T>, last = std::min(first + PAIR<T>, op.in_features) - 1;
        const long groups[2] = {group_of(first), group_of(last)};
        next = word + 1;
        if (!quantization.groups && groups[0] == groups[1])  // up to the end of the group
            next = std::max(next, std::min(end, (groups[0] + 1) * quantization.group_size / PAIR<T>));
        expand_run<T, format, offsets>(quantization, layout, from, groups, word, next, ahead, to);
    }
    if (word * PAIR<T> > op.in_features)  // the last input is the first of a pair
        for (long i = 1; i <= 2 * STRIP; i += 2) to[-i] = 0;
    std::fill(to, end_of_words, T{});
}

template <typename T>
using ExpandWords = void (*)(const Linear<T>&, const ExpandedLayout&, long strip, long next_strip, long word, long count, T* to);

template <typename T, WeightFormat format>
ExpandWords<T> expander_of_integers(Offsets offsets) {
    switch (offsets) {
        case Offsets::minimums: return expand_words<T, format, Offsets::minimums>;
        case Offsets::zero_points: return expand_words<T, format, Offsets::zero_points>;
        default: return expand_words<T, format, Offsets::zero_point>;
    }
}

// Null for formats that are not expanded.
template <typename T>
ExpandWords<T> expander(const Linear<T>& op) {
    switch (op.format) {
        case WeightFormat::int8: return expander_of_integers<T, WeightFormat::int8>(op.quantization.offsets);
        case WeightFormat::int4: return expander_of_integers<T, WeightFormat::int4>(op.quantization.offsets);
        case WeightFormat::fp8: return expand_words<T, WeightFormat::fp8, Offsets::zero_point>;
        case WeightFormat::codebook4: return expand_words<T, WeightFormat::codebook4, Offsets::zero_point>;
        default: return nullptr;
    }
}

// Words of some strips; those of the next strip are `stride` elements behind.
template <typename T>
struct StripWords {
    const T* words;
    long stride;
};

// The words of a layer's weight.
template <typename T>
class PackedWords {
public:
    explicit PackedWords(const Linear<T>& op)
        : op_(op), expand_(expander(op)), layout_(expand_ ? ExpandedLayout(op.format, op.quantization, op.in_features) : ExpandedLayout()) {}

    // How many of a row's words to ask for at once: all of them, unless they are expanded.
    long at_once(long all, long expanded) const { return expand_ ? std::min(all, expanded) : all; }

    // `count` words of some strips, until this thread asks again.
    StripWords<T> of(long strip, long num_strips, long word, long count) const {
        if (!expand_) {
            const long stride = packed_size<T>(STRIP, op_.in_features);
            return {op_.packed + strip * stride + word * STRIP * PAIR<T>, stride};
        }
        static thread_local Aligned<T> scratch;
        const long stride = count * STRIP * PAIR<T>;
        T* words = scratch.at_least(num_strips * stride);
        for (long i = 0; i < num_strips; i++) expand_(op_, layout_, strip + i, num_strips, word, count, words + i * stride);
        return {words, stride};
    }

private:
    const Linear<T>& op_;
    ExpandWords<T> expand_;
    ExpandedLayout layout_;
};

}  // namespace quire::ISA
