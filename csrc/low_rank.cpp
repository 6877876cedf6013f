#include "low_rank.hpp"

#include <algorithm>
#include <cstring>

#include "aligned.hpp"
#include "packing.hpp"
#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long ROWS_AT_ONCE = 256;  // as many as a block of many rows has: weights are read once more for each
constexpr long FEWEST_STRIPS = 16;  // of a piece of B that a thread takes

template <typename T>
void call_linear(const Linear<T>& op) {
    if constexpr (sizeof(T) == sizeof(bf16))
        chosen->linear.bf16(op);
    else
        chosen->linear.float32(op);
}

template <typename T>
long total_outputs(const Linear<T>& layer) { return layer.out_features * (layer.is_gated() ? 2 : 1); }

bool covers(const LowRankFactors& factors, long num_outputs) {
    long covered = 0;
    for (const LowRankPart& part : factors.parts) covered += part.num_outputs;
    return covered == num_outputs;
}

// x + -0 is x, of every x.
void fill_with_nothing(float* addend, long num_rows, long stride) { std::fill(addend, addend + num_rows * stride, -0.0f); }

}  // namespace

template <typename T>
StepAdapters<T>::StepAdapters(const std::vector<const AdapterFactors*>& adapters, const std::int32_t* of_row, long num_rows)
    : addend_rows_(num_rows, -1) {
    for (long begin = 0; begin < num_rows; begin += ROWS_AT_ONCE) {
        const long end = std::min(begin + ROWS_AT_ONCE, num_rows), first_group = groups_.size(), slice_start = order_.size();
        for (std::size_t i = 0; i < adapters.size(); i++) {
            const long first = order_.size();
            for (long row = begin; row < end; row++)
                if (of_row[row] == static_cast<std::int32_t>(i)) {
                    addend_rows_[row] = order_.size() - slice_start;
                    order_.push_back(row);
                }
            const long count = order_.size() - first;
            if (count) groups_.push_back({adapters[i], first, count});
        }
        slices_.push_back({begin, end, first_group, static_cast<long>(groups_.size())});
    }
}

template <typename T>
void StepAdapters<T>::linear(const Linear<T>& layer, long number) const {
    const bool is_adapted = std::any_of(groups_.begin(), groups_.end(), [&](const Group& group) { return group.adapter->layers[number].rank; });
    if (!is_adapted) return call_linear(layer);
    static thread_local ISA::Aligned<float> scratch;
    const long stride = total_outputs(layer);
    for (const Slice& slice : slices_) {
        Linear<T> rows = layer;
        rows.x += slice.begin * layer.x_stride;
        rows.num_rows = slice.end - slice.begin;
        rows.out = static_cast<T*>(layer.out) + slice.begin * layer.out_stride;
        long num_adapted = 0;
        for (long i = slice.first_group; i < slice.end_group; i++) num_adapted += groups_[i].count;
        if (num_adapted) {
            float* addend = scratch.at_least(num_adapted * stride);
            compute_addend(layer, slice, number, addend, stride);
            rows.addend = addend;
            rows.addend_stride = stride;
            rows.addend_rows = addend_rows_.data() + slice.begin;
        }
        call_linear(rows);
    }
}

// Write the addends of a slice's rows, in their order, [rows with adapters, all outputs].
template <typename T>
void StepAdapters<T>::compute_addend(const Linear<T>& layer, const Slice& slice, long number, float* addend, long stride) const {
    const Group* groups = groups_.data() + slice.first_group;
    const long num_groups = slice.end_group - slice.first_group, slice_start = groups[0].first;
    struct Piece {  // of one part of one group: some strips
        const Group* group;
        const LowRankPart* part;
        const T* inner;
        long inner_stride, strip, num_strips;
    };
    static thread_local std::vector<Piece> pieces;
    static thread_local ISA::Aligned<T> scratch;
    pieces.clear();
    long inner_size = 0, all_strips = 0;
    for (long i = 0; i < num_groups; i++) {
        const LowRankFactors& factors = groups[i].adapter->layers[number];
        inner_size += groups[i].count * factors.rank;
        for (const LowRankPart& part : factors.parts) all_strips += num_strips(part.num_outputs);
    }
    T* inner = scratch.at_least(inner_size);
    const long strips_at_once = std::max(FEWEST_STRIPS, all_strips / (4 * num_threads()));
    std::vector<T*> inners(num_groups);
    for (long i = 0; i < num_groups; i++) {
        const LowRankFactors& factors = groups[i].adapter->layers[number];
        inners[i] = inner;
        for (const LowRankPart& part : factors.parts)
            for (long strip = 0, strips = num_strips(part.num_outputs); strip < strips; strip += strips_at_once)
                pieces.push_back({&groups[i], &part, inner + part.first_input, factors.rank, strip, std::min(strips_at_once, strips - strip)});
        inner += groups[i].count * factors.rank;
    }
    share_range(num_groups, 1, [&](long i, long) {
        const LowRankFactors& factors = groups[i].adapter->layers[number];
        float* own = addend + (groups[i].first - slice_start) * stride;
        if (!covers(factors, stride)) fill_with_nothing(own, groups[i].count, stride);
        if (!factors.rank) return;
        long x_stride = layer.x_stride;
        const T* x = rows_of(groups[i], layer, x_stride);
        call_linear(Linear<T>{x, groups[i].count, layer.in_features, x_stride, static_cast<const T*>(factors.packed), factors.rank,
                              nullptr, inners[i], factors.rank, false, Activation::none});
    });
    share_range(pieces.size(), 1, [&, own_pieces = pieces.data()](long i, long) {
        const Piece& piece = own_pieces[i];
        const LowRankPart& part = *piece.part;
        const long first = piece.strip * STRIP, num_outputs = std::min(piece.num_strips * STRIP, part.num_outputs - first);
        float* out = addend + (piece.group->first - slice_start) * stride + part.first_output + first;
        call_linear(Linear<T>{piece.inner, piece.group->count, part.rank, piece.inner_stride,
                              static_cast<const T*>(part.packed) + packed_size<T>(first, part.rank), num_outputs, nullptr, out, stride,
                              true, Activation::none});
    });
}

// The rows of a group: where they are, if they follow one another; else a copy of them, valid until the thread's next.
template <typename T>
const T* StepAdapters<T>::rows_of(const Group& group, const Linear<T>& all, long& stride) const {
    const std::int32_t* order = order_.data() + group.first;
    stride = all.x_stride;
    if (order[group.count - 1] - order[0] == group.count - 1) return all.x + order[0] * all.x_stride;
    static thread_local ISA::Aligned<T> scratch;
    T* rows = scratch.at_least(group.count * all.in_features);
    for (long i = 0; i < group.count; i++)
        std::memcpy(rows + i * all.in_features, all.x + order[i] * all.x_stride, all.in_features * sizeof(T));
    stride = all.in_features;
    return rows;
}

template class StepAdapters<bf16>;
template class StepAdapters<float>;

}  // namespace quire
