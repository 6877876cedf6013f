// The two products of attention over int8 keys and values, for models in bfloat16, in integers: four products a lane at
// once (VNNI), twice as many as of bfloat16. Integer sums are exact, so that no order of them counts.
//
// A row's query is rounded to int8 by its largest number, as keys are. Weights times their values' scales are rounded to 8
// bits, in steps of a 255th of the largest of their group: of a partition's tokens, those of every fourth quad are one
// group. So the largest one, a sink's for instance, makes the steps of 64 tokens and not of 256, and to find it costs next
// to nothing: a group is a quarter of a register. The sum of weights is that before rounding.
#pragma once

#include "attention_scores.hpp"

#ifdef USES_INTEGER_ATTENTION

namespace quire::ISA {

struct ByIntegers {
    using Query = std::int8_t;
    static constexpr long KEY_ROWS = 1;  // the number of rows of keys is a multiple of this

    struct Session {
        explicit Session(long) {}
    };

    // Behind a row's elements is what belongs to all of them.
    struct RowTail {
        float scale;
        std::int32_t first_sum;  // keys are stored as unsigned bytes, 128 too large: -128 times the sum of the elements
    };
    static long query_stride(long key_rows) { return key_rows * PAIR<Byte> + sizeof(RowTail); }

    template <typename T>
    static void pack_row(const T* query, long head_dim, Query* out, long query_stride) {
        RowTail tail{quantize(query, head_dim, out), 0};
        for (long i = 0; i < head_dim; i++) tail.first_sum -= 128 * out[i];
        std::memcpy(out + query_stride - sizeof tail, &tail, sizeof tail);
    }

    // Calls of `meanwhile` by `scores` and by `weigh`, about.
    static long score_calls(long rows, Columns computed, long key_rows) {
        return num_groups(rows) * ((computed.last() - computed.first()) / (COLUMNS * GROUP)) * (key_rows / STEPS_BETWEEN);
    }
    static long weigh_calls(long rows, Columns computed, long padded) {
        return rows + (rows + MEAN_ROWS - 1) / MEAN_ROWS * ((padded / GROUP + 1) / COLUMNS) * QUADS;
    }

    template <typename Meanwhile>
    static void scores(const Query* query, long query_stride, long rows, const PartitionView<Byte>& view, long key_rows,
                       Columns computed, const float* key_scales, float* scores, Meanwhile& meanwhile) {
        for (long i = computed.first(); i < computed.last(); i += COLUMNS * GROUP) {
            const Byte* keys[COLUMNS];
            Floats scales[COLUMNS];
            for (int c = 0; c < COLUMNS; c++) {
                keys[c] = view.keys[i / GROUP + c].at;
                scales[c] = load(key_scales + i + c * GROUP);
            }
            in_groups<ROWS>(rows, [&](auto count, long top) {
                RowTail tails[count];
                IntegerSums<count, COLUMNS> sums;
                for (int r = 0; r < count; r++) {
                    std::memcpy(&tails[r], query + (top + r + 1) * query_stride - sizeof(RowTail), sizeof(RowTail));
                    for (int c = 0; c < COLUMNS; c++) sums.parts[r][c] += tails[r].first_sum;
                }
                sums.template add<Byte>(keys, view.keys[i / GROUP].stride, query + top * query_stride, query_stride, key_rows, meanwhile);
                for (int r = 0; r < count; r++)
                    for (int c = 0; c < COLUMNS; c++)
                        store(scores + (top + r) * SCORE_STRIDE + i + c * GROUP,
                              __builtin_convertvector(sums.parts[r][c], Floats) * scales[c] * splat(tails[r].scale));
            });
        }
    }

    // Scores become weights, and these the weighted values, with the sums of weights behind them.
    template <typename Meanwhile>
    static void weigh(float* scores, const float* highest, float scale, long rows, const PartitionView<Byte>& view, long padded,
                      Columns computed, const float* value_scales, float* out, Meanwhile& meanwhile) {
        const long width = padded + LANES;
        const float spoiled = spoiled_sum(computed, value_scales);
        float steps[BLOCK_ROWS][QUADS];
        Floats factors = {};
        for (long r = 0; r <= rows; r++) {  // a row is rounded after the next one's exponentials: its division takes long
            const Floats before = factors;
            if (r < rows) {
                meanwhile();
                const float offset = score_offset(highest[r], scale);
                const float sum = weigh_scores(scores + r * SCORE_STRIDE, computed, offset, splat(scale), value_scales, factors, steps[r]);
                store(out + r * width + padded, splat(sum + spoiled));
            }
            if (r > 0) round_weights(scores + (r - 1) * SCORE_STRIDE, computed, before);
        }
        const std::uint8_t* weights = reinterpret_cast<const std::uint8_t*>(scores);
        for (long dim = 0; dim < padded; dim += COLUMNS * GROUP)
            in_groups<MEAN_ROWS>(rows, [&](auto count, long r) {
                float* to = out + r * width + dim;
                if (dim + COLUMNS * GROUP <= padded)
                    mean<count, COLUMNS>(weights + r * WEIGHT_STRIDE, view, dim, computed, steps + r, meanwhile).store(to, width);
                else
                    mean<count, 1>(weights + r * WEIGHT_STRIDE, view, dim, computed, steps + r, meanwhile).store(to, width);
            });
    }

private:
    static constexpr int ROWS = 8, COLUMNS = 2;  // sums at once
    static constexpr int MEAN_ROWS = 6;          // each with sums of a group, and of all groups
    static constexpr int QUADS = GROUP / 4;      // quads of tokens in a register, each of another group of weights
    static constexpr long WEIGHT_STRIDE = SCORE_STRIDE * sizeof(float);
    static constexpr float LEAST = 1e-36f;       // least largest product of a group: 255 / LEAST is finite
    static constexpr long num_groups(long rows) { return (rows + ROWS - 1) / ROWS; }

    // 0, or NaN if a value's scale is: rounded weights cannot be NaN.
    static float spoiled_sum(Columns computed, const float* value_scales) {
        Floats sum = {};
        for (long i = computed.first(); i < computed.last(); i += LANES) sum += load(value_scales + i) * Floats{};
        return sum_of_lanes(sum);
    }

    // Turn a row's scores into weights times their values' scales. Returns the sum of the weights, and of each group the
    // factor to 255ths of its largest product, and that step.
    static float weigh_scores(float* scores, Columns computed, float offset, Floats scale, const float* value_scales, Floats& factors,
                              float* steps) {
        Floats sum = {}, largest = {};
        for (long i = computed.first(); i < computed.last(); i += LANES) {
            const Floats weights = rough_power(multiply_add(load(scores + i), scale, splat(-offset)));
            const Floats scaled = weights * load(value_scales + i);
            store(scores + i, scaled);
            sum += weights;
            largest = maximum(scaled, largest);
        }
        largest = maximum(largest, __builtin_shufflevector(largest, largest, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
        largest = maximum(largest, __builtin_shufflevector(largest, largest, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
        largest = maximum(largest, splat(LEAST));
        factors = splat(255.0f) / largest;
        const Floats step = largest * splat(1.0f / 255);
        for (int quad = 0; quad < QUADS; quad++) steps[quad] = step[4 * quad];
        return sum_of_lanes(sum);
    }

    // Round a row's products to bytes, in their own memory.
    static void round_weights(float* products, Columns computed, Floats factors) {
        std::uint8_t* bytes = reinterpret_cast<std::uint8_t*>(products);
        for (long i = computed.first(); i < computed.last(); i += LANES) {
            const Floats rounded = multiply_add(load(products + i), factors, splat(12582912.0f));  // to the lowest bits
            const __m128i lowest = _mm512_cvtepi32_epi8((__m512i)rounded);
            std::memcpy(bytes + i, &lowest, sizeof lowest);
        }
    }

    template <int rows, int columns, typename Meanwhile>
    static Sums<rows, columns> mean(const std::uint8_t* weights, const PartitionView<Byte>& view, long dim, Columns computed,
                                    const float (*steps)[QUADS], Meanwhile& meanwhile) {
        Sums<rows, columns> means;
        const long first = computed.begin / GROUP, end = (computed.end + GROUP - 1) / GROUP;
        for (int quad = 0; quad < QUADS; quad++) {
            meanwhile();
            RegisterIntegers sums[rows][columns] = {};
            for (long i = first; i < end; i++) {
                RegisterWords values[columns];
                for (int c = 0; c < columns; c++) values[c] = load_quads(view.values[i].row(quad) + (dim + c * GROUP) * 4);
                for (int r = 0; r < rows; r++) {
                    const RegisterIntegers factor = splat_word(weights + r * WEIGHT_STRIDE + i * GROUP + quad * 4);
                    for (int c = 0; c < columns; c++)
                        sums[r][c] = (RegisterIntegers)_mm512_dpbusd_epi32((__m512i)sums[r][c], (__m512i)factor, (__m512i)values[c]);
                }
            }
            for (int r = 0; r < rows; r++)
                for (int c = 0; c < columns; c++)
                    means.parts[r][c] = multiply_add(__builtin_convertvector(sums[r][c], Register), steps[r][quad] - Register{}, means.parts[r][c]);
        }
        return means;
    }
};

}  // namespace quire::ISA

#endif
