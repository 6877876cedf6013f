// Mamba-2 (Dao and Gu 2024): a thread takes some heads of one group through a sequence. What they are gated with, and the norm of
// their group, follow in a second pass, when all heads of a token are there; and the inputs that a slot's ring keeps, which other
// heads read until then.
#include "state_piece.hpp"
#include "thread_pool.hpp"

namespace quire::ISA {
namespace {

constexpr long HEADS_AT_ONCE = 8;  // all of them convolve their group's keys and queries again
constexpr long ROWS_AT_ONCE = 4;

template <typename T>
class Piece : StatePiece<T, Mamba<T>> {
    using Base = StatePiece<T, Mamba<T>>;
    using Base::begin_, Base::channels, Base::channels_, Base::committed_, Base::num_tiles_, Base::op_, Base::start_, Base::stop_, Base::tile_size_;

public:
    Piece(const Mamba<T>& op, long seq) : Base(op, seq, op.num_value_heads * op.value_dim, num_channels(op), num_channels(op) + op.num_value_heads) {}

    // Compute the heads [first, last), all of one group.
    void run(long first_head, long last_head) {
        if (!Base::open()) return;
        first_ = first_head, count_ = last_head - first_head;
        make_room();
        for (long head = 0; head < count_; head++) Base::copy_state(first_ + head);
        for (long first = committed_; first < stop_; first += STATE_BLOCK) block(first, std::min(first + STATE_BLOCK, stop_));
    }

    void keep() {
        if (Base::open()) Base::keep_inputs([this](long position, T* row) { std::memcpy(row, channels(position), Base::num_inputs_ * sizeof(T)); });
    }

private:
    long first_ = 0, count_ = 0;
    float *query_, *key_, *value_, *decay_, *share_, *out_, *tiles_;

    static long num_channels(const Mamba<T>& op) { return 2 * op.num_key_heads * op.key_dim + op.num_value_heads * op.value_dim; }

    // Tiles of all heads where there are several blocks, else one, which is used again.
    void make_room() {
        static thread_local Aligned<float> memory;  // kept from call to call
        const long num_states = Base::has_several_blocks() ? count_ * num_tiles_ : 1;
        const long rows = count_ * op_.value_dim, rates = rounded_up(STATE_BLOCK * count_, LANES);
        float* at = memory.at_least(STATE_BLOCK * (2 * op_.key_dim + rows) + LANES + 2 * rates + num_states * tile_size_);
        for (auto [part, size] : {std::pair{&query_, STATE_BLOCK * op_.key_dim}, {&key_, STATE_BLOCK * op_.key_dim}, {&value_, STATE_BLOCK * rows}, {&out_, LANES}, {&decay_, rates}, {&share_, rates}})
            *part = at, at += size;
        tiles_ = at;
    }

    void block(long first, long last) {
        const long count = last - first, key_dim = op_.key_dim, rows = count_ * op_.value_dim, width = op_.num_value_heads * op_.value_dim;
        const long key = width + first_ / (op_.num_value_heads / op_.num_key_heads) * key_dim;
        Base::convolve(first, count, first_ * op_.value_dim, rows, value_, rows, op_.conv_bias);
        Base::convolve(first, count, key, key_dim, key_, key_dim, op_.conv_bias);
        Base::convolve(first, count, key + op_.num_key_heads * key_dim, key_dim, query_, key_dim, op_.conv_bias);
        find_rates(first, count);
        for (long head = 0; head < count_; head++)
            for (long number = 0; number < num_tiles_; number++) {
                float* state = tiles_ + (Base::has_several_blocks() ? head * num_tiles_ + number : 0) * tile_size_;
                Base::pass(first, last, first_ + head, number, state, [&](long token, long end) { advance(state, first, token, end, head, number); });
            }
    }

    // For each token and head: what is left of the state, and the factor on the token's value.
    void find_rates(long first, long count) {
        const long size = rounded_up(count * count_, LANES);
        std::fill(share_ + count * count_, share_ + size, 0.0f);
        for (long token = 0; token < count; token++) {
            const T* from = channels(first + token) + channels_ + first_;
            for (long head = 0; head < count_; head++) share_[token * count_ + head] = single_float(from[head]) * op_.rate_factor + op_.rate_bias[first_ + head];
        }
        for (long i = 0; i < size; i += LANES) store(share_ + i, softplus(load(share_ + i)));
        std::fill(decay_ + count * count_, decay_ + size, 0.0f);
        for (long token = 0; token < count; token++)
            for (long head = 0; head < count_; head++) decay_[token * count_ + head] = share_[token * count_ + head] * -op_.rate[first_ + head];
        for (long i = 0; i < size; i += LANES) store(decay_ + i, exp(load(decay_ + i)));
    }

    // Take a tile through tokens of the block that begins at position `first`, and write what those of the step give.
    void advance(float* state, long first, long token, long last, long head, long number) {
        const long column = head * op_.value_dim + number * LANES, rows = count_ * op_.value_dim, key_dim = op_.key_dim;
        const Floats skip = splat(op_.skip[first_ + head]);
        for (long i = token; i < last; i++) {
            const float* value = value_ + i * rows + column;
            const OneDecay decay{in_all(decay_[i * count_ + head])};
            const Register share = in_all(share_[i * count_ + head]);
            for (long lane = 0; lane < LANES; lane += REGISTER_LANES)
                update_state<false>(state + lane, key_dim, decay, share * load_register(value + lane), key_ + i * key_dim, query_ + i * key_dim, nullptr, out_ + lane, nullptr);
            if (const long row = first + i - start_; row >= 0)
                store(op_.out + (begin_ + row) * op_.out_stride + first_ * op_.value_dim + column, multiply_add(skip, load(value), load(out_)));
        }
    }
};

// What a row's heads gave, gated and normed in place; the norm is over each group of heads.
template <typename T>
class GatedRow {
public:
    GatedRow(const Mamba<T>& op, long row)
        : op_(op), width_(op.num_value_heads * op.value_dim / op.num_key_heads), gates_first_(!op.is_norm_first || !op.norm_weight),
          out_(op.out + row * op.out_stride), gates_(op.x + row * op.x_stride), gate_factor_(splat(op.gate_factor)) {}

    // sums: of all groups' squares over all ranks; null: this rank has whole groups.
    void norm(const float* sums) {
        static thread_local Aligned<float> memory;
        float* values = memory.at_least(width_);
        for (long group = 0; group < op_.num_key_heads; group++) {
            const float own = gate(group, values);
            if (!op_.norm_weight)
                for (long i = 0; i < width_; i += LANES) store(out_ + group * width_ + i, load(values + i));
            else if (sums)
                norm(group, values, sums[op_.span.first_group + group] / static_cast<float>(op_.span.width));
            else
                norm(group, values, own / static_cast<float>(width_));
        }
    }

    // Add the squares of this rank's part of each of its groups.
    void add_squares(float* sums) {
        static thread_local Aligned<float> memory;
        for (long group = 0; group < op_.num_key_heads; group++) sums[op_.span.first_group + group] = gate(group, memory.at_least(width_));
    }

private:
    const Mamba<T>& op_;
    const long width_;
    const bool gates_first_;
    T* const out_;
    const T* const gates_;
    const Floats gate_factor_;

    // Find what is normed of a group, [width]; return the sum of its squares.
    float gate(long group, float* values) const {
        Floats squares = {};
        for (long i = 0; i < width_; i += LANES) {
            Floats value = load(out_ + group * width_ + i);
            if (gates_first_) value = value * silu(load(gates_ + group * width_ + i) * gate_factor_);
            squares = multiply_add(value, value, squares);
            store(values + i, value);
        }
        return sum_of_lanes(squares);
    }

    void norm(long group, const float* values, float mean_square) {
        const Floats inverse = splat(1.0f / __builtin_sqrtf(mean_square + op_.norm_eps));
        for (long i = 0; i < width_; i += LANES) {
            Floats normed = load(op_.norm_weight + group * width_ + i) * rounded<T>(load(values + i) * inverse);
            if (!gates_first_) normed = normed * silu(load(gates_ + group * width_ + i) * gate_factor_);
            store(out_ + group * width_ + i, normed);
        }
    }
};

// The squares of all rows, summed over the ranks, [num_rows, num_groups]; null: this rank has whole groups.
template <typename T>
const float* exchanged_squares(const Mamba<T>& op, long num_rows) {
    if (!op.span.sum.sum) return nullptr;
    static thread_local Aligned<float> memory;  // kept from call to call
    const long count = num_rows * op.span.num_groups;
    float *own = memory.at_least(2 * count), *sums = own + count;
    std::fill(own, sums, 0.0f);  // other ranks have the other groups
    share_range(num_rows, ROWS_AT_ONCE, [&](long begin, long end) {
        for (long row = begin; row < end; row++) GatedRow<T>(op, row).add_squares(own + row * op.span.num_groups);
    });
    op.span.sum(own, sums, num_rows, true);
    return sums;
}

}  // namespace

template <typename T>
void mamba(const Mamba<T>& op) {
    if (!serves_states(op)) throw std::invalid_argument("a Mamba-2 of sizes that are not served");
    const long group = op.num_value_heads / op.num_key_heads, parts = (group + HEADS_AT_ONCE - 1) / HEADS_AT_ONCE, pieces = op.num_key_heads * parts;
    share_range(op.num_seqs * pieces, 1, [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
            const long first = i % pieces / parts * group, part = i % parts * HEADS_AT_ONCE;
            Piece<T>(op, i / pieces).run(first + part, first + std::min(part + HEADS_AT_ONCE, group));
        }
    });
    const long num_rows = op.query_starts[op.num_seqs];
    const float* sums = exchanged_squares(op, num_rows);
    share_range(op.num_seqs + (num_rows + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE, 1, [&](long begin, long end) {
        for (long i = begin; i < end; i++) {
            if (i < op.num_seqs) Piece<T>(op, i).keep();
            const long first = (i - op.num_seqs) * ROWS_AT_ONCE;
            for (long row = first; i >= op.num_seqs && row < std::min(first + ROWS_AT_ONCE, num_rows); row++)
                GatedRow<T>(op, row).norm(sums ? sums + row * op.span.num_groups : nullptr);
        }
    });
}

template void mamba(const Mamba<bf16>&);
template void mamba(const Mamba<float>&);

}  // namespace quire::ISA
