// Gated short convolutions over paged tails (LFM2). A thread takes a strip of channels of one sequence and goes through its
// tokens in their order: what a token reads are the same numbers in the same order, whatever the tokens were divided into.
#include <algorithm>
#include <stdexcept>

#include "thread_pool.hpp"
#include "vec.hpp"

namespace quire::ISA {
namespace {

constexpr long STRIP = 256;     // channels that a thread takes at a time: 16 rows of them are 16 KiB
constexpr long MAX_TAPS = 16;   // quire/kernels/short_conv.py

template <typename T>
class Strip {
public:
    Strip(const ShortConv<T>& op, long seq, long first) : op_(op), seq_(seq), first_(first), width_(std::min(STRIP, op.width - first)), length_(std::min(op.length, op.block_size)) {}

    void run() {
        const long begin = op_.query_starts[seq_], end = op_.query_starts[seq_ + 1];
        if (begin == end) return;
        for (long position = op_.positions[begin] - op_.taps + 1; position < op_.positions[begin]; position++) read(position);
        for (long token = begin; token < end; token++) {
            float* gated = row(op_.positions[token]);
            gate(token, gated);
            convolve(token);
            if (op_.slots[token] >= 0 && stays(token, end)) write(op_.slots[token], gated);
        }
    }

private:
    const ShortConv<T>& op_;
    long seq_, first_, width_, length_;
    alignas(64) float rows_[MAX_TAPS][STRIP];  // rows of the last positions, at position % taps

    float* row(long position) { return rows_[position % op_.taps]; }

    template <typename Lanes>
    void each_lanes(Lanes lanes) const {
        for (long i = 0; i < width_; i += LANES) lanes(i, std::min<long>(LANES, width_ - i));
    }

    T* tail(long block, long offset) const { return op_.tails + (block * length_ + offset % length_) * op_.width + first_; }

    // What a token before those of the step has left; zeros before the sequence.
    void read(long position) {
        if (position < 0) {
            std::fill_n(rows_[(position + op_.taps) % op_.taps], STRIP, 0.0f);
            return;
        }
        const long block = op_.block_tables[seq_ * op_.table_stride + position / op_.block_size];
        const T* from = tail(block, position % op_.block_size);
        float* to = row(position);
        each_lanes([&](long i, long count) { store_some(to + i, load_some(from + i, count), count); });
    }

    void gate(long token, float* gated) const {
        const T* gates = op_.x + token * op_.x_stride + first_;
        const T* values = gates + 2 * op_.width;
        each_lanes([&](long i, long count) {
            store_some(gated + i, rounded<T>(load_some(gates + i, count) * load_some(values + i, count)), count);
        });
    }

    void convolve(long token) {
        const long oldest = op_.positions[token] + 1;  // taps - 1 tokens before, and the same row as taps later
        const T* gates = op_.x + token * op_.x_stride + op_.width + first_;
        T* out = op_.out + token * op_.out_stride + first_;
        each_lanes([&](long i, long count) {
            Floats sum = op_.bias ? load_some(op_.bias + first_ + i, count) : Floats{};
            for (long tap = 0; tap < op_.taps; tap++)
                sum = multiply_add(load_some(op_.weight + tap * op_.width + first_ + i, count), load_some(row(oldest + tap) + i, count), sum);
            store_some(out + i, load_some(gates + i, count) * sum, count);
        });
    }

    // No later token of the step is written over this one.
    bool stays(long token, long end) const {
        return token + length_ >= end || op_.slots[token] % op_.block_size + length_ >= op_.block_size;
    }

    void write(long slot, const float* gated) const {
        T* to = tail(slot / op_.block_size, slot % op_.block_size);
        each_lanes([&](long i, long count) { store_some(to + i, load_some(gated + i, count), count); });
    }
};

}  // namespace

template <typename T>
void short_conv(const ShortConv<T>& op) {
    if (op.taps < 1 || op.taps > MAX_TAPS) throw std::invalid_argument("a convolution over more tokens than are served");
    const long num_strips = rounded_up(op.width, STRIP) / STRIP;
    share_range(op.num_seqs * num_strips, 1, [&](long begin, long end) {
        for (long piece = begin; piece < end; piece++) Strip<T>(op, piece / num_strips, piece % num_strips * STRIP).run();
    });
}

template void short_conv(const ShortConv<bf16>&);
template void short_conv(const ShortConv<float>&);

}  // namespace quire::ISA
