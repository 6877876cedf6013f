// Low-rank addends of linear layers: what the adapters of a step add to the sums of a layer (Hu et al. 2021).
//
// delta = B (A x) of the rows of each adapter, by the kernels of linear layers: A's outputs are rounded to T, B's stay float32. So a
// row's bits depend on its own adapter alone, and a row without one is not touched. A step has few rows and many small products: one
// dispatch computes A of all adapters, one B of all adapters and outputs.
#pragma once

#include <vector>

#include "kernels.hpp"

namespace quire {

// Outputs [first_output, first_output + num_outputs) of a layer: B [num_outputs, rank], dense and packed, of the `rank` outputs
// of A from `first_input` on.
struct LowRankPart {
    const void* packed;
    long first_input, rank, first_output, num_outputs;
};

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

// The adapters of a step's rows. Rows are taken some at a time, which bounds the memory of addends.
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
    struct Slice {  // rows [begin, end), their order by adapters, and their groups
        long begin, end, first_group, end_group;
    };
    std::vector<std::int32_t> order_;         // of a slice's rows with adapters, by adapter; numbers within all rows
    std::vector<std::int32_t> addend_rows_;   // of each row: its place in the slice's order; -1: it has no adapter
    std::vector<Group> groups_;
    std::vector<Slice> slices_;

    void compute_addend(const Linear<T>& rows, const Slice& slice, long number, float* addend, long stride) const;
    const T* rows_of(const Group& group, const Linear<T>& all, long& stride) const;
};

}  // namespace quire
