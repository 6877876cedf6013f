// Gated delta nets (Yang et al. 2025), also with a decay of each row of a state (Kimi Team 2025). A thread takes a key head of a
// sequence with the value heads that read it. In the pass in which a token changes a tile's rows, they are multiplied with the next
// token's key, too, so that a row is read and written once for each token. What a decayed state holds for a key is the decay times
// what the state holds for it; with a decay of each row, what the state holds for the key times the decays.
#include "state_piece.hpp"
#include "thread_pool.hpp"

namespace quire::ISA {
namespace {

constexpr float L2_EPS = 1e-6f;

inline Floats sigmoid(Floats x) { return splat(1.0f) / (exp(-x) + splat(1.0f)); }

template <typename T>
class Piece : StatePiece<T, DeltaNet<T>> {
    using Base = StatePiece<T, DeltaNet<T>>;
    using Base::begin_, Base::channels, Base::channels_, Base::committed_, Base::num_tiles_, Base::op_, Base::read_, Base::ring, Base::start_, Base::stop_, Base::tile_size_;

public:
    Piece(const DeltaNet<T>& op, long seq, long key_head)
        : Base(op, seq, 0, num_channels(op), num_channels(op) + op.num_value_heads * (1 + num_decays(op))), key_head_(key_head), group_(op.num_value_heads / op.num_key_heads) {}

    void run() {
        if (!Base::open()) return;
        make_room();
        for (long head = 0; head < group_; head++) Base::copy_state(value_head(head));
        for (long first = committed_; first < stop_; first += STATE_BLOCK) block(first, std::min(first + STATE_BLOCK, stop_));
        Base::keep_inputs([this](long position, T* row) { copy_inputs(position, row); });
    }

private:
    long key_head_, group_;
    float *query_, *key_, *value_, *decay_, *share_, *decayed_key_, *out_, *tiles_;

    static long num_decays(const DeltaNet<T>& op) { return op.has_row_decays ? op.key_dim : 1; }  // a value head's
    static long num_channels(const DeltaNet<T>& op) { return 2 * op.num_key_heads * op.key_dim + op.num_value_heads * op.value_dim; }

    // Tiles of all heads where there are several blocks, else one, which is used again.
    void make_room() {
        static thread_local Aligned<float> memory;  // kept from call to call
        const long num_states = Base::has_several_blocks() ? group_ * num_tiles_ : 1;
        const long rows = group_ * op_.value_dim, rates = rounded_up(STATE_BLOCK * group_, LANES);
        const long decays = op_.has_row_decays ? STATE_BLOCK * group_ * op_.key_dim : rates, decayed = op_.has_row_decays ? decays : 0;
        float* at = memory.at_least(STATE_BLOCK * (2 * op_.key_dim + 2 * rows) + rates + decays + decayed + num_states * tile_size_);
        for (auto [part, size] : {std::pair{&query_, STATE_BLOCK * op_.key_dim}, {&key_, STATE_BLOCK * op_.key_dim}, {&value_, STATE_BLOCK * rows}, {&out_, STATE_BLOCK * rows}, {&decay_, decays}, {&share_, rates}, {&decayed_key_, decayed}})
            *part = at, at += size;
        tiles_ = at;
    }

    long value_head(long head) const { return op_.is_tiled ? head * op_.num_key_heads + key_head_ : key_head_ * group_ + head; }

    // Where a number of each value head of a token is, and where the decays of its heads are.
    const T* shares(long position) const {
        return position < start_ ? ring(read_, position) + channels_ : op_.shares + (begin_ + position - start_) * op_.shares_stride;
    }
    const T* decays(long position) const {
        return position < start_ ? ring(read_, position) + channels_ + op_.num_value_heads : op_.decays + (begin_ + position - start_) * op_.decays_stride;
    }

    void block(long first, long last) {
        const long count = last - first, key_dim = op_.key_dim, value_rows = group_ * op_.value_dim;
        const long keys = op_.num_key_heads * key_dim;
        Base::convolve(first, count, key_head_ * key_dim, key_dim, query_, key_dim, nullptr);
        Base::convolve(first, count, keys + key_head_ * key_dim, key_dim, key_, key_dim, nullptr);
        for (long head = 0; head < group_; head++)
            Base::convolve(first, count, 2 * keys + value_head(head) * op_.value_dim, op_.value_dim, value_ + head * op_.value_dim, value_rows, nullptr);
        const float scale = 1.0f / __builtin_sqrtf(static_cast<float>(key_dim));
        for (long i = 0; i < count; i++) normalize(query_ + i * key_dim, scale), normalize(key_ + i * key_dim, 1.0f);
        find_shares(first, count);
        op_.has_row_decays ? find_row_decays(first, count) : find_decays(first, count);
        for (long head = 0; head < group_; head++)
            for (long number = 0; number < num_tiles_; number++) {
                float* state = tiles_ + (Base::has_several_blocks() ? head * num_tiles_ + number : 0) * tile_size_;
                Base::pass(first, last, value_head(head), number, state, [&](long token, long end) { advance(state, token, end, head, number); });
            }
        for (long position = std::max(first, start_); position < last; position++)
            for (long head = 0; head < group_; head++) finish(position, position - first, head);
    }

    void normalize(float* row, float scale) const {
        Floats squares = {};
        for (long i = 0; i < op_.key_dim; i += LANES) squares = multiply_add(load(row + i), load(row + i), squares);
        const Floats factor = splat(scale / __builtin_sqrtf(sum_of_lanes(squares) + L2_EPS));
        for (long i = 0; i < op_.key_dim; i += LANES) store(row + i, load(row + i) * factor);
    }

    // For each token and value head the share of the token's value.
    void find_shares(long first, long count) {
        const long size = rounded_up(count * group_, LANES);
        std::fill(share_ + count * group_, share_ + size, 0.0f);
        for (long token = 0; token < count; token++) {
            const T* from = shares(first + token);
            for (long head = 0; head < group_; head++) share_[token * group_ + head] = single_float(from[value_head(head)]);
        }
        for (long i = 0; i < size; i += LANES) store(share_ + i, splat(op_.max_share) * sigmoid(load(share_ + i)));
    }

    // For each token and value head what is left of the state.
    void find_decays(long first, long count) {
        const long size = rounded_up(count * group_, LANES);
        std::fill(decay_ + count * group_, decay_ + size, 0.0f);
        for (long token = 0; token < count; token++) {
            const T* from = decays(first + token);
            for (long head = 0; head < group_; head++) {
                const long number = value_head(head);
                decay_[token * group_ + head] = single_float(from[number]) + op_.rate_bias[number];
            }
        }
        for (long i = 0; i < size; i += LANES) store(decay_ + i, softplus(load(decay_ + i)));
        for (long token = 0; token < count; token++)
            for (long head = 0; head < group_; head++) decay_[token * group_ + head] *= -op_.rate[value_head(head)];
        for (long i = 0; i < size; i += LANES) store(decay_ + i, exp(load(decay_ + i)));
    }

    // For each token and value head what is left of each row of the state, and the token's key times that.
    void find_row_decays(long first, long count) {
        const long key_dim = op_.key_dim;
        for (long token = 0; token < count; token++)
            for (long head = 0; head < group_; head++) {
                const long number = value_head(head), at = (token * group_ + head) * key_dim;
                const T* from = decays(first + token) + number * key_dim;
                const float *bias = op_.rate_bias + number * key_dim, *key = key_ + token * key_dim;
                const Floats rate = splat(-op_.rate[number]);
                for (long i = 0; i < key_dim; i += LANES) {
                    const Floats decay = exp(softplus(load(from + i) + load(bias + i)) * rate);
                    store(decay_ + at + i, decay);
                    store(decayed_key_ + at + i, decay * load(key + i));
                }
            }
    }

    void advance(float* state, long token, long last, long head, long number) {
        if (token == last) return;
        const long key_dim = op_.key_dim;
        for (long lane = 0; lane < LANES; lane += REGISTER_LANES) {
            const long column = head * op_.value_dim + number * LANES + lane;
            if (op_.has_row_decays) {
                const auto decayed_key = [&](long i) { return decayed_key_ + (i * group_ + head) * key_dim; };
                const auto decay = [&](long i) { return RowDecays{decay_ + (i * group_ + head) * key_dim}; };
                advance(state + lane, token, last, head, column, decayed_key, decay, [](RowDecays, Register held) { return held; });
            } else {
                const auto key = [&](long i) { return key_ + i * key_dim; };
                const auto decay = [&](long i) { return OneDecay{in_all(decay_[i * group_ + head])}; };
                advance(state + lane, token, last, head, column, key, decay, [](OneDecay decay, Register held) { return decay.factor * held; });
            }
        }
    }

    // One register of columns. reader(i): the key with which the state before token i is read; left(decay, held): what the decayed
    // state holds for the token's key, from what was read.
    template <typename Reader, typename Decay, typename Left>
    void advance(float* state, long token, long last, long head, long column, Reader reader, Decay decay_of, Left left) {
        const long key_dim = op_.key_dim, width = group_ * op_.value_dim;
        Register held = dot(state, reader(token));
        for (long i = token; i < last; i++) {
            const auto decay = decay_of(i);
            const Register share = in_all(share_[i * group_ + head]);
            const Register change = share * (load_register(value_ + i * width + column) - left(decay, held));
            const float *key = key_ + i * key_dim, *query = query_ + i * key_dim;
            float* out = out_ + i * width + column;
            if (i + 1 < last)
                update_state<true>(state, key_dim, decay, change, key, query, reader(i + 1), out, &held);
            else
                update_state<false>(state, key_dim, decay, change, key, query, nullptr, out, nullptr);
        }
    }

    // key^T S of one register of columns.
    Register dot(const float* state, const float* key) const {
        Register sums[STATE_SUMS] = {};
        for (long row = 0; row < op_.key_dim; row += STATE_SUMS)
            for (long i = 0; i < STATE_SUMS; i++) sums[i] = multiply_add(load_register(state + (row + i) * LANES), in_all(key[row + i]), sums[i]);
        return sum_of(sums);
    }

    // The result of a token's head, normed and gated.
    void finish(long position, long token, long head) const {
        const float* values = out_ + token * group_ * op_.value_dim + head * op_.value_dim;
        const long row = begin_ + position - start_, column = value_head(head) * op_.value_dim;
        const T* gates = op_.gates + row * op_.gates_stride + column;
        T* out = op_.out + row * op_.out_stride + column;
        Floats squares = {};
        for (long i = 0; i < op_.value_dim; i += LANES) {
            const Floats value = rounded<T>(load(values + i));
            squares = multiply_add(value, value, squares);
        }
        const float mean = sum_of_lanes(squares) / static_cast<float>(op_.value_dim);
        const Floats inverse = splat(1.0f / __builtin_sqrtf(mean + op_.norm_eps));
        for (long i = 0; i < op_.value_dim; i += LANES) {
            const Floats normed = rounded<T>(load(values + i)) * inverse, weight = load(op_.norm_weight + i), gate = load(gates + i);
            store(out + i, op_.is_gate_sigmoid ? weight * normed * sigmoid(gate) : weight * rounded<T>(normed) * silu(gate));
        }
    }

    void copy_inputs(long position, T* row) const {
        const long key_dim = op_.key_dim, keys = op_.num_key_heads * key_dim, value_dim = op_.value_dim;
        const long count = num_decays(op_);
        const T *from = channels(position), *own_shares = shares(position), *own_decays = decays(position);
        T* kept = row + channels_;
        for (const long first : {key_head_ * key_dim, keys + key_head_ * key_dim}) std::memcpy(row + first, from + first, key_dim * sizeof(T));
        for (long head = 0; head < group_; head++) {
            const long number = value_head(head), first = 2 * keys + number * value_dim;
            std::memcpy(row + first, from + first, value_dim * sizeof(T));
            kept[number] = own_shares[number];
            std::memcpy(kept + op_.num_value_heads + number * count, own_decays + number * count, count * sizeof(T));
        }
    }
};

}  // namespace

template <typename T>
void delta_net(const DeltaNet<T>& op) {
    if (!serves_states(op)) throw std::invalid_argument("a gated delta net of sizes that are not served");
    share_range(op.num_seqs * op.num_key_heads, 1, [&](long begin, long end) {
        for (long piece = begin; piece < end; piece++) Piece<T>(op, piece / op.num_key_heads, piece % op.num_key_heads).run();
    });
}

template void delta_net(const DeltaNet<bf16>&);
template void delta_net(const DeltaNet<float>&);

}  // namespace quire::ISA
