// Low-rank addends of linear layers: what the adapters of a step add to the sums of a layer (Hu et al. 2021).
//
// delta = B (A x) of the rows of each adapter, A x rounded to T; the layer's own kernel computes both products
// (low_rank_products.hpp), so that the delta is never in memory. A row's bits depend on its own adapter alone, and a row
// without one is not touched.
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
    struct Rows {  // rows of one adapter
        const AdapterFactors* adapter;
        std::vector<std::int32_t> rows;
    };
    std::vector<Rows> adapters_;
};

}  // namespace quire
