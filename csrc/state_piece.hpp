// What layers with a state per sequence have in common around their own rules. A slot has a layer's states, in tiles of sixteen
// columns, [key_dim][16], which are independent of each other, and behind them a ring of the inputs of the last tokens. A thread
// takes a part of a sequence's heads through the tokens one after the other: what a token reads are the same numbers in the same
// order, whatever the tokens were divided into, and whether it is one of the step or one that a slot's ring gives back.
#pragma once

#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "activation.hpp"
#include "aligned.hpp"
#include "softmax.hpp"

namespace quire::ISA {

constexpr long STATE_BLOCK = 32;    // tokens that a thread convolves at a time
constexpr long USUAL_TAPS = 4;      // nearly all models have as many
constexpr long MAX_STATE_TAPS = 16; // quire/kernels/delta_net.py
constexpr long MAX_SNAPSHOTS = 2;
constexpr long SLOT_UNIT = 64;
constexpr long STATE_SUMS = 4;      // partial sums over the rows of a tile

// log(1 + exp(x)). With u = exp(-|x|), log(1 + u) is 2 artanh(s), s = u / (2 + u) <= 1/3, by its series.
inline Floats softplus(Floats x) {
    const Floats u = exp(-maximum(x, -x)), s = u / (u + splat(2.0f)), z = s * s;
    Floats series = splat(1.0f / 17);
    for (const long divisor : {15, 13, 11, 9, 7, 5, 3}) series = multiply_add(series, z, splat(1.0f / divisor));
    series = multiply_add(series, z, splat(1.0f));
    return maximum(x, Floats{}) + splat(2.0f) * s * series;
}

inline Register load_register(const float* p) {
    Register v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

inline void store_register(float* p, Register v) { std::memcpy(p, &v, sizeof v); }
inline Register in_all(float x) { return x - Register{}; }

inline float single_float(float x) { return x; }
inline float single_float(bf16 x) {
    const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline Register sum_of(const Register (&sums)[STATE_SUMS]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

// What a token leaves of the rows of a state: one factor for all of them, or one for each.
struct OneDecay {
    Register factor;
    Register of(long) const { return factor; }
};
struct RowDecays {
    const float* factors;
    Register of(long row) const { return in_all(factors[row]); }
};

// S = decay * S + key (x) change of one register of columns, out = query^T S, and held = next_key^T S if there is a next token.
template <bool HAS_NEXT, typename Decay>
inline void update_state(float* state, long key_dim, Decay decay, Register change, const float* key, const float* query, const float* next_key, float* out, Register* held) {
    Register sums[STATE_SUMS] = {}, next[STATE_SUMS] = {};
    for (long row = 0; row < key_dim; row += STATE_SUMS)
        for (long i = 0; i < STATE_SUMS; i++) {
            float* at = state + (row + i) * LANES;
            const Register changed = multiply_add(in_all(key[row + i]), change, decay.of(row + i) * load_register(at));
            store_register(at, changed);
            sums[i] = multiply_add(changed, in_all(query[row + i]), sums[i]);
            if constexpr (HAS_NEXT) next[i] = multiply_add(changed, in_all(next_key[row + i]), next[i]);
        }
    store_register(out, sum_of(sums));
    if constexpr (HAS_NEXT) *held = sum_of(next);
}

// A sequence of a step of Op, which has the arrays of StateRows (quire/kernels/delta_net.py). The inputs of a token are
// `num_inputs` numbers, of which the first `channels`, those of x from column `first_channel` on, are convolved.
template <typename T, typename Op>
class StatePiece {
protected:
    struct Stop {
        long position, slot;
    };

    const Op& op_;
    long seq_, first_channel_, channels_, num_inputs_, num_tiles_, tile_size_, ring_offset_, slot_bytes_;
    long begin_ = 0, start_ = 0, stop_ = 0, read_ = -1, write_ = -1, committed_ = 0, commit_to_ = 0, num_stops_ = 0;
    std::array<Stop, MAX_SNAPSHOTS + 1> stops_;  // where a copy of the state is kept, in the order of positions

    StatePiece(const Op& op, long seq, long first_channel, long channels, long num_inputs)
        : op_(op), seq_(seq), first_channel_(first_channel), channels_(channels), num_inputs_(num_inputs), num_tiles_(op.value_dim / LANES), tile_size_(op.key_dim * LANES),
          ring_offset_(op.num_value_heads * num_tiles_ * tile_size_ * sizeof(float)), slot_bytes_(rounded_up(ring_offset_ + op.length * num_inputs_ * sizeof(T), SLOT_UNIT)) {}

    // Read the sequence's entry; whether it has tokens.
    bool open() {
        const long begin = op_.query_starts[seq_], count = op_.query_starts[seq_ + 1] - begin;
        if (count == 0) return false;
        begin_ = begin, stop_ = op_.context_lens[seq_], start_ = stop_ - count;
        read_ = op_.read[seq_], write_ = op_.write[seq_];
        committed_ = op_.committed[seq_], commit_to_ = op_.commit_to[seq_];
        find_stops();
        check();
        return true;
    }

    bool has_several_blocks() const { return stop_ - committed_ > STATE_BLOCK; }

    char* slot(long index) const { return static_cast<char*>(op_.states) + index * slot_bytes_; }
    T* ring(long index, long position) const { return reinterpret_cast<T*>(slot(index) + ring_offset_) + position % op_.length * num_inputs_; }
    float* tile(long index, long value_head, long number) const {
        return reinterpret_cast<float*>(slot(index)) + (value_head * num_tiles_ + number) * tile_size_;
    }

    // Where the channels of a token are; null before the sequence.
    const T* channels(long position) const {
        if (position < 0) return nullptr;
        return position < start_ ? ring(read_, position) : op_.x + (begin_ + position - start_) * op_.x_stride + first_channel_;
    }

    // rows [count, width], `stride` apart, = silu of the convolution of the channels from `channel` on; bias null for none.
    void convolve(long first, long count, long channel, long width, float* rows, long stride, const float* bias) const {
        std::array<const T*, STATE_BLOCK + MAX_STATE_TAPS> inputs;
        for (long i = 0; i < count + op_.taps - 1; i++) inputs[i] = channels(first - op_.taps + 1 + i);
        for (long i = 0; i < width; i += LANES) {
            const float* weight = op_.conv_weight + channel + i;
            const auto row_of = [&](long number) {
                const T* row = inputs[number];
                return row ? load(row + channel + i) : Floats{};
            };
            const Floats start = bias ? load(bias + channel + i) : Floats{};
            if (op_.taps == USUAL_TAPS) {  // weights and rows stay in registers
                const Floats oldest = load(weight), older = load(weight + channels_), old = load(weight + 2 * channels_), own = load(weight + 3 * channels_);
                Floats a = row_of(0), b = row_of(1), c = row_of(2);
                for (long token = 0; token < count; token++) {
                    const Floats d = row_of(token + 3);
                    const Floats sum = multiply_add(own, d, multiply_add(old, c, multiply_add(older, b, multiply_add(oldest, a, start))));
                    store(rows + token * stride + i, silu(sum));
                    a = b, b = c, c = d;
                }
                continue;
            }
            for (long token = 0; token < count; token++) {
                Floats sum = start;
                for (long tap = 0; tap < op_.taps; tap++) sum = multiply_add(load(weight + tap * channels_), row_of(token + tap), sum);
                store(rows + token * stride + i, silu(sum));
            }
        }
    }

    // Take a tile, which is kept at `state` between blocks, through the tokens [first, last), and keep copies of it on the way.
    // advance(token, last): the tokens of the block from one to another.
    template <typename Advance>
    void pass(long first, long last, long value_head, long number, float* state, Advance advance) {
        if (first == committed_) {
            if (read_ < 0)
                std::fill_n(state, tile_size_, 0.0f);
            else
                std::memcpy(state, tile(read_, value_head, number), tile_size_ * sizeof(float));
        }
        long position = first;
        for (long i = 0; i < num_stops_; i++) {
            if (stops_[i].position <= first || stops_[i].position > last) continue;
            advance(position - first, stops_[i].position - first);
            position = stops_[i].position;
            std::memcpy(tile(stops_[i].slot, value_head, number), state, tile_size_ * sizeof(float));
        }
        advance(position - first, last - first);
    }

    // Where no token is committed, the state of a head as it was.
    void copy_state(long value_head) const {
        if (write_ < 0 || commit_to_ != committed_) return;
        for (long number = 0; number < num_tiles_; number++) {
            float* copy = tile(write_, value_head, number);
            if (read_ < 0)
                std::fill_n(copy, tile_size_, 0.0f);
            else if (read_ != write_)
                std::memcpy(copy, tile(read_, value_head, number), tile_size_ * sizeof(float));
        }
    }

    // To each slot that was written, the inputs that are needed after its state. The sequence's own slot is the last: where it
    // is the one that was read, its ring loses inputs that a snapshot near the start of the step needs. copy(position, row): a
    // token's inputs to a row of a ring. A snapshot's ring has inputs of the sequence alone: it may be stored.
    template <typename Copy>
    void keep_inputs(Copy copy) const {
        for (long i = 0; i < num_stops_; i++) {
            const auto [position, slot] = stops_[i];
            if (slot == write_) continue;
            for (long each = position; each < position + op_.length; each++) copy(position - 1, ring(slot, each));
            keep_inputs(slot, position, position, copy);
        }
        if (write_ >= 0) keep_inputs(write_, commit_to_, stop_, copy);
    }

private:
    void find_stops() {
        if (write_ >= 0 && commit_to_ > committed_) stops_[num_stops_++] = {commit_to_, write_};
        for (long i = 0; i < MAX_SNAPSHOTS; i++) {
            const std::int32_t* snapshot = op_.snapshots + (seq_ * MAX_SNAPSHOTS + i) * 2;
            if (snapshot[1] >= 0) stops_[num_stops_++] = {snapshot[0], snapshot[1]};
        }
        std::sort(stops_.begin(), stops_.begin() + num_stops_, [](Stop a, Stop b) { return a.position < b.position; });
    }

    void check() const {
        const long num_kept = op_.taps - 1 + stop_ - commit_to_;
        const bool is_within = committed_ >= 0 && committed_ <= start_ && commit_to_ >= committed_ && commit_to_ <= stop_;
        if (!is_within || (read_ < 0 && start_ > 0)) throw std::invalid_argument("a state of other tokens than those before a step");
        if (write_ >= 0 && num_kept > op_.length) throw std::invalid_argument("more tokens behind a state than its ring holds");
        for (long i = 0; i < num_stops_; i++)
            if (stops_[i].position <= committed_ || stops_[i].position > stop_) throw std::invalid_argument("a snapshot of tokens that no step has");
    }

    template <typename Copy>
    void keep_inputs(long to, long committed, long stop, Copy copy) const {
        for (long position = std::max(committed - op_.taps + 1, 0L); position < stop; position++)
            if (position >= start_ || to != read_) copy(position, ring(to, position));  // else there already
    }
};

// Whether the kernels take a layer of these sizes.
template <typename Op>
bool serves_states(const Op& op) {
    return op.taps >= 1 && op.taps <= MAX_STATE_TAPS && op.key_dim % LANES == 0 && op.value_dim % LANES == 0 && op.num_value_heads % op.num_key_heads == 0;
}

}  // namespace quire::ISA
