// Exchange of activations between the ranks of tensor parallelism on one machine, through memory that all of them map.
//
// A rank copies its columns into a region, publishes, and reads the columns of each other rank as soon as that has
// published. Two regions alternate: a rank that writes one for the second next exchange has seen all others publish the
// next one, which they do after they have read this one. A waiting rank polls for about 20 us and then sleeps: there may
// be more ranks than free cores (decision 0006).
#pragma once

#include <atomic>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "kernels.hpp"

namespace quire {

// The exchange has been given up, by `interrupt` of any rank.
struct Interrupted : std::runtime_error {
    using std::runtime_error::runtime_error;
};

constexpr long MAX_RANKS = 64;

// The first bytes of the memory. All zeros at the start.
struct SharedHeader {
    struct alignas(64) Rank {
        std::atomic<std::uint32_t> num_published;  // a futex
        std::atomic<std::uint32_t> num_asleep;     // ranks that wait for this one
    };
    alignas(64) std::atomic<std::uint32_t> is_interrupted;
    Rank ranks[MAX_RANKS];
};

// A rank's end. One thread exchanges; any may interrupt.
class RankGroup {
public:
    // memory: a header, then from `header_bytes` on two regions of `region_bytes` each.
    RankGroup(std::uintptr_t memory, long rank, long num_ranks, long region_bytes);

    static constexpr long header_bytes = 1 << 13;
    static_assert(sizeof(SharedHeader) <= header_bytes);

    // Fill rows [num_rows, bounds.back()] with the columns of all ranks; rank r has [bounds[r], bounds[r + 1]). own
    // [num_rows, columns of this rank] without gaps. All ranks call it with the same sizes. Throws Interrupted.
    void gather(const void* own, void* rows, long num_rows, const std::vector<long>& bounds, long element_bytes);

    // Fill out [num_rows, width] with the sums of what all ranks pass, own [num_rows, width], both without gaps: added in
    // the order of the ranks, and rounded to T once. All ranks call it with the same sizes. Throws Interrupted.
    template <typename T>
    void sum(const float* own, T* out, long num_rows, long width);

    // Return when all ranks have called it.
    void meet();

    // Let the current and all later exchanges of all ranks throw, until they begin again: while none exchanges, one
    // rank calls `resume`, and each of them `reset` before its next exchange.
    void interrupt();
    void resume();
    void reset() { num_exchanges_ = 0; }

private:
    SharedHeader* header_;
    char* regions_;
    long rank_, num_ranks_, region_bytes_;
    std::uint32_t num_exchanges_ = 0;

    SharedHeader::Rank& me() { return header_->ranks[rank_]; }
    void publish();
    void wait_for(long rank);
    void wait_for_all();
    template <typename T>
    void sum_at_once(const float* own, T* out, long num_rows, long width);
    void exchange(const char* own, char* rows, long num_rows, const std::vector<long>& bounds, long element_bytes);
};

// A gather of activations with their columns divided in one way, as a ColumnExchange (kernels.hpp) calls it.
struct ColumnGather {
    RankGroup* group;
    std::vector<long> bounds;

    static void call(void* context, const void* own, void* rows, long num_rows, long element_bytes) {
        const ColumnGather& self = *static_cast<const ColumnGather*>(context);
        self.group->gather(own, rows, num_rows, self.bounds, element_bytes);
    }
};

// A sum of partial sums of one width, as a SumExchange (kernels.hpp) calls it.
struct PartialSum {
    RankGroup* group;
    long width;

    static void call(void* context, const float* own, void* out, long num_rows, bool out_is_float) {
        const PartialSum& self = *static_cast<const PartialSum*>(context);
        if (out_is_float)
            self.group->sum(own, static_cast<float*>(out), num_rows, self.width);
        else
            self.group->sum(own, static_cast<bf16*>(out), num_rows, self.width);
    }
};

}  // namespace quire
