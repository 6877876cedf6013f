#include "low_rank.hpp"

#include <algorithm>
#include <cstring>

#include "aligned.hpp"
#include "packing.hpp"
#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long ROWS_AT_ONCE = 64;  // of one adapter, that a thread takes: as many as the tiles of one pass over the weights

template <typename T>
void call_linear(const Linear<T>& op) {
    if constexpr (sizeof(T) == sizeof(bf16))
        chosen->linear.bf16(op);
    else
        chosen->linear.float32(op);
}

}  // namespace

template <typename T>
StepAdapters<T>::StepAdapters(const std::vector<const AdapterFactors*>& adapters, const std::int32_t* of_row, long num_rows)
    : num_rows_(num_rows) {
    for (std::size_t i = 0; i < adapters.size(); i++) {
        const long first = order_.size();
        for (long row = 0; row < num_rows; row++)
            if (of_row[row] == static_cast<std::int32_t>(i)) order_.push_back(row);
        for (long begin = first, end = order_.size(); begin < end; begin += ROWS_AT_ONCE)
            groups_.push_back({adapters[i], begin, std::min(ROWS_AT_ONCE, end - begin)});
    }
}

template <typename T>
void StepAdapters<T>::linear(const Linear<T>& layer, long number) const {
    const bool is_adapted = std::any_of(groups_.begin(), groups_.end(), [&](const Group& group) { return group.adapter->layers[number].rank; });
    if (!is_adapted) return call_linear(layer);
    static thread_local std::vector<LowRankRow<T>> rows;
    rows.assign(num_rows_, {});
    multiply_down(layer, number, rows.data());
    Linear<T> adapted = layer;
    adapted.low_rank = rows.data();
    call_linear(adapted);
}

// Compute A x of all rows with adapters, and say where each row has its own; valid until the thread's next.
template <typename T>
void StepAdapters<T>::multiply_down(const Linear<T>& layer, long number, LowRankRow<T>* rows) const {
    struct Piece {  // of A of one group: outputs [first, first + count)
        const Group* group;
        T* inner;
        long first, count;
    };
    static thread_local std::vector<Piece> pieces;
    static thread_local ISA::Aligned<T> scratch;
    long inner_size = 0, all_strips = 0;
    for (const Group& group : groups_) {
        const long rank = group.adapter->layers[number].rank;
        inner_size += group.count * rank;
        all_strips += num_strips(rank);
    }
    T* inner = scratch.at_least(inner_size);
    const long outputs_at_once = std::max(1L, all_strips / (2 * num_threads())) * STRIP;
    pieces.clear();
    const AdapterFactors* before = nullptr;
    for (const Group& group : groups_) {
        const LowRankFactors& factors = group.adapter->layers[number];
        const long num_parts = factors.parts.size();
        for (long i = 0; i < group.count; i++) {
            const bool is_first = i == 0 && group.adapter != before;
            rows[order_[group.first + i]] = {inner + i * factors.rank, factors.parts.data(), num_parts, is_first};
        }
        for (long first = 0; first < factors.rank; first += outputs_at_once)
            pieces.push_back({&group, inner + first, first, std::min(outputs_at_once, factors.rank - first)});
        inner += group.count * factors.rank;
        before = group.adapter;
    }
    share_range(pieces.size(), 1, [&, own = pieces.data()](long i, long) {
        const Piece& piece = own[i];
        const LowRankFactors& factors = piece.group->adapter->layers[number];
        const T* packed = static_cast<const T*>(factors.packed) + packed_size<T>(piece.first, layer.in_features);
        long x_stride = layer.x_stride;
        const T* x = rows_of(*piece.group, layer, x_stride);
        call_linear(Linear<T>{x, piece.group->count, layer.in_features, x_stride, packed, piece.count, nullptr, piece.inner,
                              factors.rank, false, Activation::none});
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
