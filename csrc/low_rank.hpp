// Low-rank addends of linear layers: what the adapters of a step add to the sums of a layer (Hu et al. 2021).
//
// delta = B (A x) of the rows of each adapter. One dispatch computes A x of all adapters by the kernels of linear layers,
// rounded to T; the layer's own kernel adds B times that to its sums (low_rank_output.hpp), so that the delta is never in
// memory. A row's bits depend on its own adapter alone, and a row without one is not touched.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace quire {

// The factors of one layer: A [rank, in_features], dense and packed, of all parts together. rank 0: the layer is as it is.
struct LowRankFactors {
    const void* packed;
    long rank;
    std::vector<LowRankPart> parts;
};

// An adapter: its factors by the layers' numbers.
struct AdapterFactors {
    std::vector<LowRankFactors> layers;
};

// The adapters of a step's rows.
template <typename T>
class StepAdapters {
public:
    // `of_row` [num_rows]: indices of `adapters`; -1: none.
    StepAdapters(const std::vector<const AdapterFactors*>& adapters, const std::int32_t* of_row, long num_rows);

    // Compute layer `number` of all rows.
    void linear(const Linear<T>& layer, long number) const;

private:
    struct Group {  // rows of one adapter: `count` of the order from `first` on
        const AdapterFactors* adapter;
        long first, count;
    };
    std::vector<std::int32_t> order_;  // rows with adapters, by adapter
    std::vector<Group> groups_;
    long num_rows_;

    void multiply_down(const Linear<T>& layer, long number, LowRankRow<T>* rows) const;
    const T* rows_of(const Group& group, const Linear<T>& all, long& stride) const;
};

}  // namespace quire
