// Sampling softmax: exp(logit) of a row, and draws by it, with the same bits on every instruction set: products and sums
// are rounded apart, and sums are float64, in blocks of 512 tokens whose lanes are added in a fixed tree, then block by
// block.
#pragma once

#include <algorithm>

#include "aligned.hpp"
#include "exp.hpp"

namespace quire::ISA {

typedef double Doubles __attribute__((vector_size(64)));

// Map from logits to weights: exp((logit - highest) / temperature), 0 below exp(lowest).
struct Scale {
    Floats highest, factor, lowest;

    // Less than exp(-87) of the likeliest token is nothing; a factor is above 0, and 0 only if the temperature is infinite.
    Scale(float highest, float temperature = 1.0f, float log_min_p = -__builtin_inff())
        : highest(splat(highest)), factor(splat(1.0f / temperature)), lowest(splat(std::max(log_min_p, -87.0f))) {}

    // exp(x) = 2^n exp(r), n the integer nearest to x / ln 2, r by a polynomial of degree 6: relative error below 3e-7.
    Floats weight(Floats logit) const {
        const Floats x = (logit - highest) * factor;
        const Floats magic = splat(12582912.0f), shifted = x * splat(LOG2_E) + magic;  // n in the lowest bits
        const Floats n = shifted - magic;
        const Floats r = (x - n * splat(LN2_HIGH)) - n * splat(LN2_LOW);
        const Floats p = exp_of_remainder(r, [](Floats a, Floats b, Floats c) { return a * b + c; });
        const Words power = ((Words)shifted - 0x4b400000u + 127u) << 23;
        const Words is_kept = by_registers<Words>([&](int i) { return part(x, i) >= part(lowest, i); });  // NaN is 0, too
        return (Floats)((Words)(p * (Floats)power) & is_kept);
    }
};

// Weights and the running sums of their blocks.
class Weights {
public:
    static constexpr long BLOCK = 512;

    // Weights of `count` tokens; logits(i) gives those of tokens i to i + 15, anything behind the last one.
    template <typename SomeLogits>
    void of(long count, const Scale& scale, SomeLogits logits) {
        float* weights = begin(count);
        for (long first = 0; first < count; first += BLOCK) {
            const long last = std::min(count, first + BLOCK);
            for (long i = first; i < last; i += LANES) store(weights + i, scale.weight(logits(i)));
            end_block(first);
        }
    }

    // Weights computed elsewhere.
    void of(const float* values, long count) {
        std::copy(values, values + count, begin(count));
        for (long first = 0; first < count; first += BLOCK) end_block(first);
    }

    double total() const { return total_; }
    const float* values() const { return values_.data(); }

    // The first token at which the running sum passes uniform * total. A uniform of 53 bits times a total rounds to less
    // than the total, so some block passes it. If rounding keeps the sum within the block below, it is the block's last
    // token of any weight.
    long draw(double uniform) const {
        const double target = uniform * total_;
        const double* sums = sums_.data();
        const long block = std::upper_bound(sums, sums + num_blocks_, target) - sums;
        double sum = block ? sums[block - 1] : 0.0;
        long token = block * BLOCK;
        for (long i = token; i < std::min(count_, (block + 1) * BLOCK) && sum <= target; i++) {
            sum += values_.data()[i];
            if (values_.data()[i] > 0) token = i;
        }
        return token;
    }

private:
    long count_ = 0, num_blocks_ = 0;
    double total_ = 0;
    Aligned<float> values_;
    Aligned<double> sums_;

    float* begin(long count) {
        count_ = count;
        num_blocks_ = 0;
        total_ = 0;
        sums_.at_least(rounded_up(count, BLOCK) / BLOCK);
        return values_.at_least(rounded_up(count, BLOCK));
    }

    void end_block(long first) {
        float* block = values_.data() + first;
        std::fill(block + std::min(BLOCK, count_ - first), block + BLOCK, 0.0f);
        Doubles low[2] = {}, high[2] = {};
        for (long i = 0; i < BLOCK; i += 2 * LANES)
            for (int half = 0; half < 2; half++) {
                const Floats v = load(block + i + half * LANES);
                low[half] += __builtin_convertvector(__builtin_shufflevector(v, v, 0, 1, 2, 3, 4, 5, 6, 7), Doubles);
                high[half] += __builtin_convertvector(__builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15), Doubles);
            }
        const Doubles s = (low[0] + high[0]) + (low[1] + high[1]);
        total_ += ((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]));
        sums_.data()[num_blocks_++] = total_;
    }
};

}  // namespace quire::ISA
