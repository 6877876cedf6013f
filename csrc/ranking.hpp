// The order of a row's tokens, higher logit first and equal ones by id, and its first tokens found without sorting it.
//
// A logit's bits become an integer that rises with it (quire/kernels/reference/sampling.py), so NaN has a place, too. BlockMaxima
// holds the highest of every 64 logits: the k-th highest of those is a bound that at least k tokens reach, and in most rows
// hardly more. Among the tokens at the bound, `last_of` narrows down where a prefix of the order ends: 512 bins of
// equal width in the integers, the bin in which the running count or sum gets there, and so on inside that bin.
#pragma once

#include <algorithm>
#include <bit>
#include <limits>

#include "aligned.hpp"
#include "vec.hpp"

namespace quire::ISA {

constexpr Integers LANE_NUMBERS = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
constexpr std::int32_t LOWEST_KEY = std::numeric_limits<std::int32_t>::min();
constexpr std::int32_t INFINITY_KEY = 0x7f800000, MINUS_INFINITY_KEY = ~INFINITY_KEY;  // beyond them is NaN

inline Integers splat_key(std::int32_t key) { return key - Integers{}; }

// Bits of a float as those of the integer, and back.
template <typename Bits>
inline Bits risen(Bits bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

inline Integers keys_of(Floats logits) { return risen((Integers)(logits + Floats{})); }  // -0 + 0 is 0, which it equals
inline Floats logits_of(Integers keys) { return (Floats)risen(keys); }

inline std::int32_t key_of(float logit) {
    const float zeroed = logit + 0.0f;
    std::int32_t bits;
    std::memcpy(&bits, &zeroed, sizeof bits);
    return risen(bits);
}

inline std::int32_t least_lane(Integers lanes) {
    std::int32_t least = lanes[0];
    for (int lane = 1; lane < LANES; lane++) least = std::min(least, lanes[lane]);
    return least;
}

// A plain integer that orders tokens: falling keys, then rising ids or places.
inline std::uint64_t order_of(std::int32_t key, std::uint32_t place) {
    return std::uint64_t(~std::uint32_t(key) ^ (1u << 31)) << 32 | place;
}

// One bit per lane.
using Mask = std::uint32_t;

inline Mask lanes_where(Integers is_true) {
#ifdef __AVX512F__
    return _mm512_movepi32_mask((__m512i)is_true);
#else
    typedef std::uint64_t Longs __attribute__((vector_size(64)));
    const Longs longs = (Longs)is_true;
    if (!(longs[0] | longs[1] | longs[2] | longs[3] | longs[4] | longs[5] | longs[6] | longs[7])) return 0;
    Mask mask = 0;
    for (int lane = 0; lane < LANES; lane++) mask |= (is_true[lane] & 1u) << lane;
    return mask;
#endif
}

inline Mask first_lanes(long count) { return count >= LANES ? 0xffffu : (1u << count) - 1; }

// Write the lanes in `mask` to `out`, one after the other. Up to LANES places are written.
inline void compress(Integers lanes, Mask mask, std::int32_t* out) {
#ifdef __AVX512F__
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(mask), (__m512i)lanes));
#else
    for (; mask; mask &= mask - 1) *out++ = lanes[std::countr_zero(mask)];
#endif
}

// Tokens of a row in the order of their ids: key, id and, where they have been written, weight of each.
struct Candidates {
    Aligned<std::int32_t> keys, ids;
    Aligned<float> weights;
    long count = 0;

    // Begin anew, with room for `most`. Memory that is not written costs none.
    void begin(long most) {
        keys.at_least(most + LANES), ids.at_least(most + LANES), weights.at_least(most + 2 * LANES);
        count = 0;
    }

    void append(Integers more_keys, Integers more_ids, Mask mask) {
        compress(more_keys, mask, keys.data() + count);
        compress(more_ids, mask, ids.data() + count);
        count += std::popcount(mask);
    }

    void append(Integers more_keys, Integers more_ids, Floats more_weights, Mask mask) {
        compress((Integers)more_weights, mask, reinterpret_cast<std::int32_t*>(weights.data()) + count);
        append(more_keys, more_ids, mask);
    }
};

inline Integers load_keys(const std::int32_t* keys) {
    Integers lanes;
    std::memcpy(&lanes, keys, sizeof lanes);
    return lanes;
}

inline Integers load_some_keys(const std::int32_t* keys, long count) {
    if (count >= LANES) return load_keys(keys);
    Integers lanes = {};
    std::memcpy(&lanes, keys, count * sizeof *keys);
    return lanes;
}

// The highest keys of stripes of 1,024 logits, lane by lane, from one pass over a row.
class BlockMaxima {
public:
    static constexpr long STRIPE = 1024;

    void of(const float* row, long count) {
        row_ = row;
        count_ = count;
        const long num_stripes = (count + STRIPE - 1) / STRIPE;
        std::int32_t* peaks = peaks_.at_least(num_stripes * LANES);
        Integers highest = splat_key(LOWEST_KEY), lowest = splat_key(~LOWEST_KEY);
        for (long stripe = 0; stripe < num_stripes; stripe++) {
            const Integers peak = of_stripe(stripe * STRIPE, std::min(count, (stripe + 1) * STRIPE), lowest);
            std::memcpy(peaks + stripe * LANES, &peak, sizeof peak);
            highest = peak > highest ? peak : highest;
        }
        lowest_ = least_lane(lowest), highest_ = ~least_lane(~highest);
    }

    bool has_nan() const { return highest_ > INFINITY_KEY || lowest_ < MINUS_INFINITY_KEY; }
    // Whether no logit is NaN or infinite but minus infinity, and not all are that.
    bool has_distribution() const { return !has_nan() && highest_ < INFINITY_KEY && highest_ > MINUS_INFINITY_KEY; }
    float highest() const { return value_of(highest_); }

    // The lowest id of the highest logit; of a row with NaN, the first of those (as NumPy's argmax).
    long argmax() const {
        if (has_nan()) return std::find_if(row_, row_ + count_, [](float logit) { return logit != logit; }) - row_;
        long stripe = 0;
        while (!reaches(stripe, highest_)) stripe++;
        long id = stripe * STRIPE;
        while (id + LANES <= count_ && !lanes_where(keys_of(load(row_ + id)) == splat_key(highest_))) id += LANES;
        while (key_of(row_[id]) != highest_) id++;
        return id;
    }

    // A key that at least `num` tokens reach; LOWEST_KEY where the blocks are too few for a bound.
    std::int32_t bound(long num) {
        const long num_stripes = (count_ + STRIPE - 1) / STRIPE, together = std::max(1L, num_stripes * LANES / (4 * num));
        const long num_groups = (num_stripes + together - 1) / together * LANES;
        if (num_groups < num) return LOWEST_KEY;
        std::int32_t* highest = groups_.at_least(num_groups);
        for (long group = 0; group * LANES < num_groups; group++) {
            Integers peak = peak_of(group * together);
            for (long i = group * together + 1; i < std::min(num_stripes, (group + 1) * together); i++)
                peak = peak_of(i) > peak ? peak_of(i) : peak;
            std::memcpy(highest + group * LANES, &peak, sizeof peak);
        }
        std::nth_element(highest, highest + num - 1, highest + num_groups, std::greater<>());
        return highest[num - 1];
    }

    // Put the tokens that reach a bound into `found`.
    void collect(std::int32_t bound, Candidates& found) const {
        found.begin(count_);
        for (long begin = 0; begin < count_; begin += STRIPE)
            if (reaches(begin / STRIPE, bound))
                for (long id = begin; id < std::min(count_, begin + STRIPE); id += LANES) {
                    const Integers keys = keys_of(load_some(row_ + id, count_ - id));
                    const Mask mask = lanes_where(keys >= splat_key(bound)) & first_lanes(count_ - id);
                    if (mask) found.append(keys, LANE_NUMBERS + static_cast<std::int32_t>(id), mask);
                }
    }

    // How many tokens come before this one, and itself.
    long rank(long token) const {
        const std::int32_t key = key_of(row_[token]);
        long rank = 1;
        for (long begin = 0; begin < count_; begin += STRIPE) {
            if (!reaches(begin / STRIPE, key)) continue;
            const long end = std::min(count_, begin + STRIPE), middle = std::clamp(token, begin, end);
            rank += num_reaching(begin, middle, key);
            if (key < ~LOWEST_KEY) rank += num_reaching(middle, end, key + 1);
        }
        return rank;
    }

private:
    const float* row_ = nullptr;
    long count_ = 0;
    Aligned<std::int32_t> peaks_, groups_;
    std::int32_t highest_ = 0, lowest_ = 0;

    static float value_of(std::int32_t key) { return logits_of(splat_key(key))[0]; }
    Integers peak_of(long stripe) const { return load_keys(peaks_.data() + stripe * LANES); }
    bool reaches(long stripe, std::int32_t key) const { return lanes_where(peak_of(stripe) >= splat_key(key)); }

    Integers of_stripe(long begin, long end, Integers& lowest) const {
        Integers peak = splat_key(LOWEST_KEY);
        long id = begin;
        for (; id + LANES <= end; id += LANES) {
            const Integers keys = keys_of(load(row_ + id));
            peak = keys > peak ? keys : peak;
            lowest = keys < lowest ? keys : lowest;
        }
        for (int lane = 0; id < end; id++, lane++) {
            const std::int32_t key = key_of(row_[id]);
            peak[lane] = std::max(peak[lane], key);
            lowest[lane] = std::min(lowest[lane], key);
        }
        return peak;
    }

    long num_reaching(long begin, long end, std::int32_t key) const {
        long num = 0;
        for (long id = begin; id < end; id += LANES) {
            const Integers keys = keys_of(load_some(row_ + id, end - id));
            num += std::popcount(lanes_where(keys >= splat_key(key)) & first_lanes(end - id));
        }
        return num;
    }
};

// A token's place in the order.
struct Place {
    std::int32_t key, id;

    Integers holds(Integers keys, Integers ids) const {  // true where a token has this place or an earlier one
        return (keys > splat_key(key)) | ((keys == splat_key(key)) & (ids <= splat_key(id)));
    }
};

enum class Measure { tokens, weights };

// Finds the end of the shortest prefix of the order whose tokens, or whose weights in float64, come to `limit`.
class PrefixSearch {
public:
    Place last_of(const Candidates& all, Measure measure, double limit) {
        measure_ = measure;
        limit_ = limit;
        before_ = 0;
        const Candidates* among = &all;
        while (among->count > MAX_SORTED) {
            find_range(*among);
            if (lowest_ == highest_) break;
            shift_ = std::max(0, static_cast<int>(std::bit_width(distance(lowest_))) - BIN_BITS);
            take_bin(*among, crossing_bin(*among));
            among = &narrowed_;
        }
        return walk(*among);
    }

private:
    static constexpr long MAX_SORTED = 128;
    static constexpr int BIN_BITS = 9, WAYS = 4;  // four counters per bin: an addition need not wait for the last one

    Measure measure_;
    double limit_, before_;  // before_: the measure of the tokens before those that are left to search
    std::int32_t lowest_, highest_;
    int shift_;
    Candidates narrowed_;
    Aligned<double> bins_;
    std::uint64_t order_[MAX_SORTED];

    // From the highest key; two keys may be further apart than an int holds.
    std::uint32_t distance(std::int32_t key) const { return std::uint32_t(highest_) - std::uint32_t(key); }
    double measure_of(const Candidates& of, long i) const { return measure_ == Measure::tokens ? 1.0 : of.weights.data()[i]; }

    void find_range(const Candidates& among) {
        Integers lowest = splat_key(among.keys.data()[0]), highest = lowest;
        for (long i = 0; i < among.count; i += LANES) {  // the last lanes once more rather than some
            const Integers keys = load_keys(among.keys.data() + std::min(i, among.count - LANES));
            lowest = keys < lowest ? keys : lowest;
            highest = keys > highest ? keys : highest;
        }
        lowest_ = least_lane(lowest), highest_ = ~least_lane(~highest);
    }

    // The bin in which the running sum comes to the limit; the last one that has tokens if rounding kept it below.
    std::uint32_t crossing_bin(const Candidates& among) {
        const std::uint32_t num_bins = (distance(lowest_) >> shift_) + 1;
        double* bins = bins_.at_least((1 << BIN_BITS) * WAYS);
        std::fill(bins, bins + num_bins * WAYS, 0.0);
        for (long i = 0; i < among.count; i += LANES) {
            const Words distances = (Words)splat_key(highest_) - (Words)load_keys(among.keys.data() + i);
            const Words counters = (distances >> shift_) * WAYS + ((Words)LANE_NUMBERS & (WAYS - 1));
            const long last = std::min<long>(LANES, among.count - i);
            for (long lane = 0; lane < last; lane++) bins[counters[lane]] += measure_of(among, i + lane);
        }
        for (std::uint32_t bin = 0;; bin++) {
            const double* ways = bins + bin * WAYS;
            const double sum = before_ + ((ways[0] + ways[1]) + (ways[2] + ways[3]));
            if (sum >= limit_ || bin + 1 == num_bins) return bin;
            before_ = sum;
        }
    }

    // Keep the tokens of one bin. Where they come from may be where they go: nothing is written before it has been read.
    void take_bin(const Candidates& among, std::uint32_t bin) {
        const auto top = static_cast<std::int32_t>(std::uint32_t(highest_) - (bin << shift_));
        const std::int32_t bottom = std::max<std::int64_t>(lowest_, std::int64_t(top) - (std::int64_t(1) << shift_) + 1);
        const long count = among.count;
        if (&among != &narrowed_) narrowed_.begin(count);
        narrowed_.count = 0;
        for (long i = 0; i < count; i += LANES) {
            const Integers keys = load_some_keys(among.keys.data() + i, count - i);
            const Integers ids = load_some_keys(among.ids.data() + i, count - i);
            const Integers is_in = (keys >= splat_key(bottom)) & (keys <= splat_key(top));
            const Mask mask = lanes_where(is_in) & first_lanes(count - i);
            if (!mask) continue;
            if (measure_ == Measure::weights)
                narrowed_.append(keys, ids, load_some(among.weights.data() + i, count - i), mask);
            else
                narrowed_.append(keys, ids, mask);
        }
    }

    // Few tokens, or many of one logit, which are in order already.
    Place walk(const Candidates& among) {
        const bool is_in_order = among.count > MAX_SORTED;
        if (!is_in_order) sort(among);
        for (long i = 0;; i++) {
            const long at = is_in_order ? i : static_cast<std::uint32_t>(order_[i]);
            before_ += measure_of(among, at);
            if (before_ >= limit_ || i + 1 == among.count) return {among.keys.data()[at], among.ids.data()[at]};
        }
    }

    void sort(const Candidates& among) {  // places rise with ids
        for (long i = 0; i < among.count; i++) order_[i] = order_of(among.keys.data()[i], i);
        std::sort(order_, order_ + among.count);
    }
};

}  // namespace quire::ISA
