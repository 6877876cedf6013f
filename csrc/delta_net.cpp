// Gated delta nets (Yang et al. 2025). A thread takes a key head of a sequence with the value heads that read it, and goes
// through the tokens one after the other: what a token reads are the same numbers in the same order, whatever the tokens were
// divided into, and whether it is one of the step or one that a slot's ring gives back.
//
// A value head's state is cut into tiles of sixteen columns, [key_dim][16], which are independent of each other: one stays in
// the first-level cache for a block of tokens. In the pass in which a token changes a tile's rows, they are multiplied with the
// next token's key, too, so that a row is read and written once for each token.
#include <algorithm>
#include <array>
#include <cstring>
#include <stdexcept>

#include "activation.hpp"
#include "aligned.hpp"
#include "softmax.hpp"
#include "thread_pool.hpp"

namespace quire::ISA {
namespace {

constexpr long BLOCK = 32;      // tokens that a thread convolves at a time
constexpr long MAX_TAPS = 16;   // quire/kernels/delta_net.py
constexpr long MAX_SNAPSHOTS = 2;
constexpr long SLOT_UNIT = 64;
constexpr long SUMS = 4;        // partial sums over the rows of a tile
constexpr float L2_EPS = 1e-6f;

inline Floats sigmoid(Floats x) { return splat(1.0f) / (exp(-x) + splat(1.0f)); }

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

template <typename T>
class Piece {
public:
    Piece(const DeltaNet<T>& op, long seq, long key_head)
        : op_(op), seq_(seq), key_head_(key_head), group_(op.num_value_heads / op.num_key_heads), channels_(2 * op.num_key_heads * op.key_dim + op.num_value_heads * op.value_dim),
          num_inputs_(channels_ + 2 * op.num_value_heads), num_tiles_(op.value_dim / LANES), tile_size_(op.key_dim * LANES), ring_offset_(op.num_value_heads * num_tiles_ * tile_size_ * sizeof(float)),
          slot_bytes_(rounded_up(ring_offset_ + op.length * num_inputs_ * sizeof(T), SLOT_UNIT)) {}

    void run() {
        const long begin = op_.query_starts[seq_], count = op_.query_starts[seq_ + 1] - begin;
        if (count == 0) return;
        begin_ = begin, stop_ = op_.context_lens[seq_], start_ = stop_ - count;
        read_ = op_.read[seq_], write_ = op_.write[seq_];
        committed_ = op_.committed[seq_], commit_to_ = op_.commit_to[seq_];
        find_stops();
        check();
        make_room();
        if (write_ >= 0 && commit_to_ == committed_) copy_state(write_);
        for (long first = committed_; first < stop_; first += BLOCK) block(first, std::min(first + BLOCK, stop_));
        keep_inputs();
    }

private:
    struct Stop {
        long position, slot;
    };

    const DeltaNet<T>& op_;
    long seq_, key_head_, group_, channels_, num_inputs_, num_tiles_, tile_size_, ring_offset_, slot_bytes_;
    long begin_, start_, stop_, read_, write_, committed_, commit_to_, num_stops_ = 0;
    std::array<Stop, MAX_SNAPSHOTS + 1> stops_;  // where a copy of the state is kept, in the order of positions
    float *query_, *key_, *value_, *decay_, *share_, *out_, *tiles_;

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

    // Tiles of all heads where there are several blocks, else one, which is used again.
    void make_room() {
        static thread_local Aligned<float> memory;  // kept from call to call
        const long num_states = stop_ - committed_ > BLOCK ? group_ * num_tiles_ : 1;
        const long rows = group_ * op_.value_dim, rates = rounded_up(BLOCK * group_, LANES);
        float* at = memory.at_least(BLOCK * (2 * op_.key_dim + 2 * rows) + 2 * rates + num_states * tile_size_);
        for (auto [part, size] : {std::pair{&query_, BLOCK * op_.key_dim}, {&key_, BLOCK * op_.key_dim}, {&value_, BLOCK * rows}, {&out_, BLOCK * rows}, {&decay_, rates}, {&share_, rates}})
            *part = at, at += size;
        tiles_ = at;
    }

    char* slot(long index) const { return static_cast<char*>(op_.states) + index * slot_bytes_; }
    T* ring(long index, long position) const { return reinterpret_cast<T*>(slot(index) + ring_offset_) + position % op_.length * num_inputs_; }
    float* tile(long index, long head, long number) const {
        return reinterpret_cast<float*>(slot(index)) + (value_head(head) * num_tiles_ + number) * tile_size_;
    }
    long value_head(long head) const { return op_.is_tiled ? head * op_.num_key_heads + key_head_ : key_head_ * group_ + head; }
    bool has_room_for_all() const { return stop_ - committed_ > BLOCK; }

    // Where the channels of a token are, and its two numbers of each value head; null before the sequence.
    const T* channels(long position) const {
        if (position < 0) return nullptr;
        return position < start_ ? ring(read_, position) : op_.x + (begin_ + position - start_) * op_.x_stride;
    }
    const T* rates(long position) const {
        return position < start_ ? ring(read_, position) + channels_ : op_.rates + (begin_ + position - start_) * op_.rates_stride;
    }

    void block(long first, long last) {
        const long count = last - first, key_dim = op_.key_dim, value_rows = group_ * op_.value_dim;
        const long keys = op_.num_key_heads * key_dim;
        convolve(first, count, key_head_ * key_dim, key_dim, query_, key_dim);
        convolve(first, count, keys + key_head_ * key_dim, key_dim, key_, key_dim);
        for (long head = 0; head < group_; head++)
            convolve(first, count, 2 * keys + value_head(head) * op_.value_dim, op_.value_dim, value_ + head * op_.value_dim, value_rows);
        const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(key_dim));
        for (long i = 0; i < count; i++) normalize(query_ + i * key_dim, scale), normalize(key_ + i * key_dim, 1.0f);
        find_rates(first, count);
        for (long head = 0; head < group_; head++)
            for (long number = 0; number < num_tiles_; number++) pass(first, last, head, number);
        for (long position = std::max(first, start_); position < last; position++)
            for (long head = 0; head < group_; head++) finish(position, position - first, head);
    }

    // rows [count, width], `stride` apart, = silu of the convolution of the channels from `channel` on.
    void convolve(long first, long count, long channel, long width, float* rows, long stride) const {
        std::array<const T*, BLOCK + MAX_TAPS> inputs;
        for (long i = 0; i < count + op_.taps - 1; i++) inputs[i] = channels(first - op_.taps + 1 + i);
        for (long i = 0; i < width; i += LANES) {
            const float* weight = op_.conv_weight + channel + i;
            for (long token = 0; token < count; token++) {
                Floats sum = {};
                for (long tap = 0; tap < op_.taps; tap++)
                    if (const T* row = inputs[token + tap]) sum = multiply_add(load(weight + tap * channels_), load(row + channel + i), sum);
                store(rows + token * stride + i, silu(sum));
            }
        }
    }

    void normalize(float* row, float scale) const {
        Floats squares = {};
        for (long i = 0; i < op_.key_dim; i += LANES) squares = multiply_add(load(row + i), load(row + i), squares);
        const Floats factor = splat(scale / __builtin_sqrtf(sum_of_lanes(squares) + L2_EPS));
        for (long i = 0; i < op_.key_dim; i += LANES) store(row + i, load(row + i) * factor);
    }

    // For each token and value head: what is left of the state, and the share of the token's value.
    void find_rates(long first, long count) {
        const long size = rounded_up(count * group_, LANES);
        std::fill(decay_ + count * group_, decay_ + size, 0.0f), std::fill(share_ + count * group_, share_ + size, 0.0f);
        for (long token = 0; token < count; token++) {
            const T* from = rates(first + token);
            for (long head = 0; head < group_; head++) {
                const long number = value_head(head);
                share_[token * group_ + head] = as_float(from[number]);
                decay_[token * group_ + head] = as_float(from[op_.num_value_heads + number]) + op_.rate_bias[number];
            }
        }
        for (long i = 0; i < size; i += LANES) {
            store(share_ + i, sigmoid(load(share_ + i)));
            store(decay_ + i, softplus(load(decay_ + i)));
        }
        for (long token = 0; token < count; token++)
            for (long head = 0; head < group_; head++) decay_[token * group_ + head] *= -op_.rate[value_head(head)];
        for (long i = 0; i < size; i += LANES) store(decay_ + i, exp(load(decay_ + i)));
    }

    static float as_float(T x) {
        if constexpr (sizeof(T) == sizeof(float)) return x;
        const std::uint32_t bits = static_cast<std::uint32_t>(x) << 16;
        float value;
        std::memcpy(&value, &bits, sizeof value);
        return value;
    }

    // Take a tile through the tokens [first, last), and keep copies of it on the way.
    void pass(long first, long last, long head, long number) {
        float* state = tiles_ + (has_room_for_all() ? head * num_tiles_ + number : 0) * tile_size_;
        if (first == committed_) {
            if (read_ < 0)
                std::fill_n(state, tile_size_, 0.0f);
            else
                std::memcpy(state, tile(read_, head, number), tile_size_ * sizeof(float));
        }
        long position = first;
        for (long i = 0; i < num_stops_; i++) {
            if (stops_[i].position <= first || stops_[i].position > last) continue;
            advance(state, position - first, stops_[i].position - first, head, number);
            position = stops_[i].position;
            std::memcpy(tile(stops_[i].slot, head, number), state, tile_size_ * sizeof(float));
        }
        advance(state, position - first, last - first, head, number);
    }

    void advance(float* state, long token, long last, long head, long number) {
        if (token == last) return;
        for (long lane = 0; lane < LANES; lane += REGISTER_LANES) {
            const long column = head * op_.value_dim + number * LANES + lane, width = group_ * op_.value_dim;
            Register held = dot(state + lane, key_ + token * op_.key_dim);
            for (long i = token; i < last; i++) {
                const Register decay = in_all(decay_[i * group_ + head]), share = in_all(share_[i * group_ + head]);
                const Register change = share * (load_register(value_ + i * width + column) - decay * held);
                const float *key = key_ + i * op_.key_dim, *query = query_ + i * op_.key_dim;
                float* out = out_ + i * width + column;
                if (i + 1 < last)
                    update<true>(state + lane, decay, change, key, query, key + op_.key_dim, out, &held);
                else
                    update<false>(state + lane, decay, change, key, query, nullptr, out, nullptr);
            }
        }
    }

    static Register sum_of(const Register (&sums)[SUMS]) { return (sums[0] + sums[1]) + (sums[2] + sums[3]); }

    // key^T S of one register of columns.
    Register dot(const float* state, const float* key) const {
        Register sums[SUMS] = {};
        for (long row = 0; row < op_.key_dim; row += SUMS)
            for (long i = 0; i < SUMS; i++) sums[i] = multiply_add(load_register(state + (row + i) * LANES), in_all(key[row + i]), sums[i]);
        return sum_of(sums);
    }

    // S = decay * S + key (x) change, out = query^T S, and held = next_key^T S if there is a next token.
    template <bool HAS_NEXT>
    void update(float* state, Register decay, Register change, const float* key, const float* query, const float* next_key, float* out, Register* held) const {
        Register sums[SUMS] = {}, next[SUMS] = {};
        for (long row = 0; row < op_.key_dim; row += SUMS)
            for (long i = 0; i < SUMS; i++) {
                float* at = state + (row + i) * LANES;
                const Register changed = multiply_add(in_all(key[row + i]), change, decay * load_register(at));
                store_register(at, changed);
                sums[i] = multiply_add(changed, in_all(query[row + i]), sums[i]);
                if constexpr (HAS_NEXT) next[i] = multiply_add(changed, in_all(next_key[row + i]), next[i]);
            }
        store_register(out, sum_of(sums));
        if constexpr (HAS_NEXT) *held = sum_of(next);
    }

    // The result of a token's head, normed and gated.
    void finish(long position, long token, long head) const {
        const float* values = out_ + token * group_ * op_.value_dim + head * op_.value_dim;
        const long row = begin_ + position - start_, column = value_head(head) * op_.value_dim;
        const T* gates = op_.x + row * op_.x_stride + channels_ + column;
        T* out = op_.out + row * op_.out_stride + column;
        Floats squares = {};
        for (long i = 0; i < op_.value_dim; i += LANES) {
            const Floats value = rounded<T>(load(values + i));
            squares = multiply_add(value, value, squares);
        }
        const float mean = sum_of_lanes(squares) / static_cast<float>(op_.value_dim);
        const Floats inverse = splat(1.0f / __builtin_sqrtf(mean + op_.norm_eps));
        for (long i = 0; i < op_.value_dim; i += LANES) {
            const Floats normed = rounded<T>(rounded<T>(load(values + i)) * inverse);
            store(out + i, load(op_.norm_weight + i) * normed * silu(load(gates + i)));
        }
    }

    void copy_state(long to) const {
        for (long head = 0; head < group_; head++)
            for (long number = 0; number < num_tiles_; number++) {
                float* copy = tile(to, head, number);
                if (read_ < 0)
                    std::fill_n(copy, tile_size_, 0.0f);
                else if (read_ != to)
                    std::memcpy(copy, tile(read_, head, number), tile_size_ * sizeof(float));
            }
    }

    // To each slot that was written, the inputs that are needed after its state. The sequence's own slot is the last: where it
    // is the one that was read, its ring loses inputs that a snapshot near the start of the step needs.
    void keep_inputs() const {
        for (long i = 0; i < num_stops_; i++)
            if (stops_[i].slot != write_) keep_inputs(stops_[i].slot, stops_[i].position, stops_[i].position);
        if (write_ >= 0) keep_inputs(write_, commit_to_, stop_);
    }

    void keep_inputs(long to, long committed, long stop) const {
        const long key_dim = op_.key_dim, keys = op_.num_key_heads * key_dim, value_dim = op_.value_dim;
        for (long position = std::max(committed - op_.taps + 1, 0L); position < stop; position++) {
            if (position < start_ && to == read_) continue;  // there already
            const T *from = channels(position), *numbers = rates(position);
            T *row = ring(to, position), *kept = row + channels_;
            for (const long first : {key_head_ * key_dim, keys + key_head_ * key_dim}) std::memcpy(row + first, from + first, key_dim * sizeof(T));
            for (long head = 0; head < group_; head++) {
                const long number = value_head(head), first = 2 * keys + number * value_dim;
                std::memcpy(row + first, from + first, value_dim * sizeof(T));
                kept[number] = numbers[number], kept[op_.num_value_heads + number] = numbers[op_.num_value_heads + number];
            }
        }
    }
};

}  // namespace

template <typename T>
void delta_net(const DeltaNet<T>& op) {
    const bool is_served = op.taps >= 1 && op.taps <= MAX_TAPS && op.key_dim % LANES == 0 && op.value_dim % LANES == 0 && op.num_value_heads % op.num_key_heads == 0;
    if (!is_served) throw std::invalid_argument("a gated delta net of sizes that are not served");
    share_range(op.num_seqs * op.num_key_heads, 1, [&](long begin, long end) {
        for (long piece = begin; piece < end; piece++) Piece<T>(op, piece / op.num_key_heads, piece % op.num_key_heads).run();
    });
}

template void delta_net(const DeltaNet<bf16>&);
template void delta_net(const DeltaNet<float>&);

}  // namespace quire::ISA
