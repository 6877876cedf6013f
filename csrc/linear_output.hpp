// Output of a linear layer: addend, bias, rounding and activation of its sums. All on sixteen outputs of one row while
// they are in a register: no intermediate is written to memory.
#pragma once

#include <algorithm>

#include "activation.hpp"
#include "aligned.hpp"
#include "low_rank_products.hpp"
#include "thread_pool.hpp"
#include "packing.hpp"
#include "vec.hpp"

namespace quire::ISA {

// Strips of packed weights: a gated layer has two for sixteen outputs.
template <typename T>
long layer_strips(const Linear<T>& op) { return num_strips(op.out_features) * (op.is_gated() ? 2 : 1); }

// Strips that a thread takes at a time, an even number: some 20 us of reading, but at least four turns for each thread.
inline long strips_at_once(long strips, long strip_bytes) {
    constexpr long bytes = 1 << 18;
    return rounded_up(std::max(1L, std::min(bytes / strip_bytes, strips / (4 * num_threads()))), 2);
}

template <typename T>
inline void store_outputs(const Linear<T>& op, long row, long first, Floats values) {
    const long count = std::min(STRIP, op.out_features - first), at = row * op.out_stride + first;
    if (op.out_is_float)
        store_some(static_cast<float*>(op.out) + at, values, count);
    else
        store_some(static_cast<T*>(op.out) + at, values, count);
}

// Ask for the cache lines that some rows x strips of outputs are written to.
template <typename T>
[[gnu::always_inline]] inline void fetch_outputs(const Linear<T>& op, long row, long num_rows, long strip, long num_strips) {
    constexpr long LINE = 64;
    const long each = op.is_gated() ? 2 : 1, size = static_cast<long>(op.out_is_float ? sizeof(float) : sizeof(T));
    const long first = strip / each * STRIP * size, end = (strip + num_strips) / each * STRIP * size;
    for (long r = 0; r < num_rows; r++) {
        const char* outputs = static_cast<const char*>(op.out) + (row + r) * op.out_stride * size;
        for (long at = first; at < end; at += LINE) __builtin_prefetch(outputs + at, 1);
    }
}

// Call work(first output, number of outputs, index of their first strip, from strip to strip) for the outputs of some strips of
// sums, one after the other: of a gated layer for those of gates and then for those of ups, which come after all gates.
template <typename T, typename Work>
inline void for_outputs(const Linear<T>& op, long strip, long num_strips, Work&& work) {
    const auto some = [&](long first, long strips, long offset, long at, long step) {
        if (strips > 0) work(offset + first * STRIP, std::min(strips * STRIP, op.out_features - first * STRIP), at, step);
    };
    if (!op.is_gated()) return some(strip, num_strips, 0, 0, 1);
    const long end = strip + num_strips, first_gate = (strip + 1) / 2, first_up = strip / 2;
    some(first_gate, (end + 1) / 2 - first_gate, 0, strip % 2, 2);
    some(first_up, end / 2 - first_up, op.out_features, (strip + 1) % 2, 2);
}

// Add the addends to the sums of some rows x strips, in memory: apart from what every layer does to its sums, which is 3 %
// slower with this among it.
template <typename T>
[[gnu::noinline]] void add_addends(const Linear<T>& op, long row, long num_rows, long strip, long num_strips, const SumsInMemory& sums) {
    if (op.low_rank) wait_for(op.low_rank->num_left, 0);
    for_outputs(op, strip, num_strips, [&](long first, long count, long at, long step) {
        for (long r = 0; op.addend && r < num_rows; r++)
            for (long i = 0; i < count; i += STRIP) {
                float* to = sums.at(r, at + i / STRIP * step);
                store(to, load(to) + load_some(op.addend + (row + r) * op.addend_stride + first + i, count - i));
            }
        if (!op.low_rank) return;
        const SumsInMemory own{sums.at(0, at), sums.row_stride, step * sums.strip_stride};
        for (const LowRankRows<T>& adapter : *op.low_rank) {
            if (&adapter + 1 < op.low_rank->end()) fetch_low_rank(*(&adapter + 1), first, count);
            add_low_rank(adapter, row, num_rows, first, count, own);
        }
    });
}

// Fetch what adapters add to some rows and strips.
template <typename T>
[[gnu::noinline]] void fetch_addends(const Linear<T>& op, long row, long num_rows, long strip, long num_strips) {
    for (const LowRankRows<T>& adapter : *op.low_rank)
        if (rows_within(adapter, row, num_rows).count > 0)
            for_outputs(op, strip, num_strips, [&](long first, long count, long, long) { fetch_low_rank(adapter, first, count); });
}

template <typename T>
inline Floats with_bias(const Linear<T>& op, Floats sums, long offset, long first) {
    return op.bias ? sums + load_some(op.bias + offset + first, std::min(STRIP, op.out_features - first)) : sums;
}

// Outputs are rounded to T before they are activated: fused or not, the bits are the same.
template <typename T>
Floats activated(const Linear<T>& op, Floats sums) {
    switch (op.activation) {
        case Activation::relu: return relu(sums);
        case Activation::relu2: return relu2(rounded<T>(sums));
        case Activation::gelu: return gelu(rounded<T>(sums));
        case Activation::gelu_tanh: return gelu_tanh(rounded<T>(sums));
        case Activation::quick_gelu: return quick_gelu(rounded<T>(sums));
        default: return sums;
    }
}

// Finish strip `strip` of one row; of a gated layer strips come as pairs, gate and up.
template <typename T>
void finish(const Linear<T>& op, long row, long strip, Floats sums) {
    store_outputs(op, row, strip * STRIP, activated(op, with_bias(op, sums, 0, strip * STRIP)));
}

// Apart, like the addend: the other gated layers are to be as fast as without it.
[[gnu::noinline]] inline Floats gelu_of_gate(Activation activation, Floats gate) {
    return activation == Activation::gelu_and_mul ? gelu(gate) : gelu_tanh(gate);
}
[[gnu::noinline]] inline Floats clamped(Floats gate, Floats up) { return clamped_silu_and_mul(gate, up); }

template <typename T>
[[gnu::always_inline]] inline void finish_pair(const Linear<T>& op, long row, long strip, Floats left, Floats right) {
    if (!op.is_gated()) {
        finish(op, row, strip, left);
        finish(op, row, strip + 1, right);
        return;
    }
    const long first = strip / 2 * STRIP;
    const Floats gate = rounded<T>(with_bias(op, left, 0, first)), up = rounded<T>(with_bias(op, right, op.out_features, first));
    if (op.activation == Activation::clamped_silu_and_mul) return store_outputs(op, row, first, clamped(gate, up));
    const Floats active = op.activation == Activation::silu_and_mul ? silu(gate) : gelu_of_gate(op.activation, gate);
    store_outputs(op, row, first, rounded<T>(active) * up);
}

}  // namespace quire::ISA
