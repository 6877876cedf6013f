#include "low_rank.hpp"

#include "aligned.hpp"

namespace quire {

template <typename T>
StepAdapters<T>::StepAdapters(const std::vector<const AdapterFactors*>& adapters, const std::int32_t* of_row, long num_rows) {
    for (const AdapterFactors* adapter : adapters) adapters_.push_back({adapter, {}});
    for (long row = 0; row < num_rows; row++)
        if (of_row[row] >= 0) adapters_[of_row[row]].rows.push_back(static_cast<std::int32_t>(row));
}

template <typename T>
void StepAdapters<T>::linear(const Linear<T>& layer, long number) const {
    static thread_local std::vector<LowRankRows<T>> present;
    static thread_local ISA::Aligned<T> scratch;
    present.clear();
    long inner_size = 0;
    for (const Rows& each : adapters_) {
        const LowRankFactors& factors = each.adapter->layers[number];
        const long num_rows = each.rows.size();
        if (!num_rows || !factors.rank) continue;
        present.push_back({each.rows.data(), num_rows, static_cast<const T*>(factors.packed), factors.rank, factors.parts.data(),
                           static_cast<long>(factors.parts.size()), nullptr});
        inner_size += num_rows * factors.rank;
    }
    T* inner = scratch.at_least(inner_size);
    for (LowRankRows<T>& each : present) {
        each.inner = inner;
        inner += each.num_rows * each.rank;
    }
    LowRank<T> low_rank{present.data(), static_cast<long>(present.size())};
    Linear<T> adapted = layer;
    if (low_rank.num_adapters) adapted.low_rank = &low_rank;
    if constexpr (sizeof(T) == sizeof(bf16))
        chosen->linear.bf16(adapted);
    else
        chosen->linear.float32(adapted);
}

template class StepAdapters<bf16>;
template class StepAdapters<float>;

}  // namespace quire
