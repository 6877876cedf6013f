// Norms, embeddings and sums: a row is read once and written once. Rows are shared among the threads; a row's sum has sixteen
// lanes that are added in a fixed tree, so it depends on the row and its width alone.
#include <algorithm>
#include <cstring>
#include <stdexcept>

#include "thread_pool.hpp"
#include "exp.hpp"
#include "softmax.hpp"

namespace quire::ISA {
namespace {

constexpr long PIECE_ELEMENTS = 1 << 13;  // a thread takes about so many at a time: a few microseconds

// Call row(i) for all rows.
template <typename Row>
void each_row(long num_rows, long width, Row row) {
    share_range(num_rows, std::max(1L, PIECE_ELEMENTS / width), [&](long begin, long end) {
        for (long i = begin; i < end; i++) row(i);
    });
}

// Call lanes(i, count) for each sixteen elements of a row, fewer at its end.
template <typename Lanes>
void each_lanes(long width, Lanes lanes) {
    long i = 0;
    for (; i + LANES <= width; i += LANES) lanes(i, LANES);
    if (i < width) lanes(i, width - i);
}

// Add the residual where there is one, call take(values) for all of a row, zeros behind its end; return where they are.
template <typename T, typename Take>
const T* add_residual(const Norm<T>& op, long row, Take take) {
    const T* x = op.x + row * op.x_stride;
    if (!op.residual) {
        each_lanes(op.width, [&](long i, long count) { take(load_some(x + i, count)); });
        return x;
    }
    const T* residual = op.residual + row * op.width;
    T* summed = op.summed + row * op.width;
    each_lanes(op.width, [&](long i, long count) {
        const Floats v = rounded<T>(load_some(x + i, count) + load_some(residual + i, count));
        store_some(summed + i, v, count);
        take(v);
    });
    return summed;
}

void check_rows(const std::int64_t* rows, long count, long num_rows) {
    for (long i = 0; i < count; i++)
        if (rows[i] < 0 || rows[i] >= num_rows)
            throw std::out_of_range("row " + std::to_string(rows[i]) + " of a table of " + std::to_string(num_rows));
}

// Zeros in place of the lanes from `count` on.
inline Floats first_lanes(Floats v, long count) {
    if (count >= LANES) return v;
    float lanes[LANES];
    store(lanes, v);
    return load_some(lanes, count);
}

}  // namespace

// Apply weights in float32: OLMo 2's, and Gemma's with an offset of 1.
template <typename T>
[[gnu::noinline]] void wide_weights(const Norm<T>& op, const T* weight, const T* values, Floats inverse, T* out) {
    each_lanes(op.width, [&](long i, long count) {
        const Floats factors = load_some(weight + i, count) + splat(op.offset);
        store_some(out + i, load_some(values + i, count) * inverse * factors, count);
    });
}

template <typename T>
void rms_norm(const Norm<T>& op) {
    each_row(op.num_rows, op.width, [&](long row) {
        Floats squares = {};
        const T* values = add_residual(op, row, [&](Floats v) { squares = multiply_add(v, v, squares); });
        const float mean = sum_of_lanes(squares) / static_cast<float>(op.width);
        const Floats inverse = splat(1.0f / __builtin_sqrtf(mean + op.eps));
        const T* weight = op.weight + op.parameters_of(row);
        T* out = op.out + row * op.width;
        if (op.is_wide) return wide_weights(op, weight, values, inverse, out);
        each_lanes(op.width, [&](long i, long count) {
            const Floats normed = rounded<T>(load_some(values + i, count) * inverse);
            store_some(out + i, normed * load_some(weight + i, count), count);
        });
    });
}

// The variance is the mean square of what is left after the mean has been taken off: two passes over a row that is in the
// first-level cache, where the difference of two means of large values would lose what matters.
template <typename T>
void layer_norm(const Norm<T>& op) {
    each_row(op.num_rows, op.width, [&](long row) {
        Floats sums = {}, squares = {};
        const T* values = add_residual(op, row, [&](Floats v) { sums += v; });
        const Floats mean = splat(sum_of_lanes(sums) / static_cast<float>(op.width));
        each_lanes(op.width, [&](long i, long count) {
            const Floats centred = first_lanes(load_some(values + i, count) - mean, count);
            squares = multiply_add(centred, centred, squares);
        });
        const float variance = sum_of_lanes(squares) / static_cast<float>(op.width);
        const Floats inverse = splat(1.0f / __builtin_sqrtf(variance + op.eps));
        const long first = op.parameters_of(row);
        T* out = op.out + row * op.width;
        each_lanes(op.width, [&](long i, long count) {
            const Floats normed = (load_some(values + i, count) - mean) * inverse;
            const Floats bias = op.bias ? load_some(op.bias + first + i, count) : Floats{};
            store_some(out + i, multiply_add(normed, load_some(op.weight + first + i, count), bias), count);
        });
    });
}

template <typename T>
void embedding(const Embedding<T>& op) {
    check_rows(op.rows, op.num_tokens, op.num_rows);
    if (op.more) check_rows(op.more_rows, op.num_tokens, op.num_more_rows);
    each_row(op.num_tokens, op.width, [&](long token) {
        const T* row = op.table + op.rows[token] * op.width;
        T* out = op.out + token * op.width;
        if (!op.more) {
            std::memcpy(out, row, op.width * sizeof(T));
            return;
        }
        const T* more = op.more + op.more_rows[token] * op.width;
        each_lanes(op.width, [&](long i, long count) {
            store_some(out + i, load_some(row + i, count) + load_some(more + i, count), count);
        });
    });
}

template <typename T>
void sum(const Sum<T>& op) {
    const Floats factor = splat(op.factor), limit = splat(op.limit > 0 ? op.limit : __builtin_inff());
    share_range(rounded_up(op.num_elements, PIECE_ELEMENTS) / PIECE_ELEMENTS, 1, [&](long begin, long end) {
        const long first = begin * PIECE_ELEMENTS, last = std::min(end * PIECE_ELEMENTS, op.num_elements);
        each_lanes(last - first, [&](long i, long count) {
            const Floats scaled = rounded<T>(load_some(op.x + first + i, count) * factor);
            const Floats summed = op.y ? scaled + load_some(op.y + first + i, count) : scaled;
            store_some(op.out + first + i, minimum(limit, maximum(-limit, summed)), count);  // NaN stays
        });
    });
}

template <typename T>
void gate(const Gate<T>& op) {
    each_row(op.num_rows, op.width, [&](long row) {
        T* x = op.x + row * op.x_stride;
        const T* gates = op.gate + row * op.gate_stride;
        each_lanes(op.width, [&](long i, long count) {
            Floats share = load_some(gates + i, count);
            if (op.is_sigmoid) share = rounded<T>(splat(1.0f) / (exp(-share) + splat(1.0f)));
            store_some(x + i, load_some(x + i, count) * share, count);
        });
    });
}

template void gate(const Gate<bf16>&);
template void gate(const Gate<float>&);
template void rms_norm(const Norm<bf16>&);
template void rms_norm(const Norm<float>&);
template void layer_norm(const Norm<bf16>&);
template void layer_norm(const Norm<float>&);
template void embedding(const Embedding<bf16>&);
template void embedding(const Embedding<float>&);
template void sum(const Sum<bf16>&);
template void sum(const Sum<float>&);

}  // namespace quire::ISA
