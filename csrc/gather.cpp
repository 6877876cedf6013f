#include "gather.hpp"

#include <algorithm>
#include <cstring>

#include "aligned.hpp"
#include "thread_pool.hpp"
#include "vec.hpp"

#ifdef __linux__
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace quire {
namespace {

constexpr int SPINS = 400;                // turns of 50 ns that a rank polls before it sleeps
constexpr long SHARED_BYTES = 128 << 10;  // copied at once; of more, threads copy parts
constexpr long ADDED_BYTES = 64 << 10;    // partial sums of a rank that every rank adds; of more, each rank adds some

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

// Sleep while `word` is `seen`, until it is woken. std::atomic::wait sleeps in one process alone.
void sleep_on(std::atomic<std::uint32_t>& word, std::uint32_t seen) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, nullptr, nullptr, 0);
#else
    if (word.load() == seen) sched_yield();
#endif
}

void wake_all(std::atomic<std::uint32_t>& word) {
#ifdef __linux__
    syscall(SYS_futex, &word, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
#endif
}

// Copy rows of `bytes` each, `from_stride` and `to_stride` bytes apart.
void copy_rows(const char* from, long from_stride, char* to, long to_stride, long num_rows, long bytes) {
    if (bytes == 0) return;
    const auto copy = [=](long begin, long end) {
        if (from_stride == bytes && to_stride == bytes)
            std::memcpy(to + begin * bytes, from + begin * bytes, (end - begin) * bytes);
        else
            for (long row = begin; row < end; row++) std::memcpy(to + row * to_stride, from + row * from_stride, bytes);
    };
    if (num_rows * bytes <= SHARED_BYTES) return copy(0, num_rows);
    share_range(num_rows, std::max(1L, SHARED_BYTES / bytes), copy);
}

}  // namespace

RankGroup::RankGroup(std::uintptr_t memory, long rank, long num_ranks, long region_bytes)
    : header_(reinterpret_cast<SharedHeader*>(memory)),
      regions_(reinterpret_cast<char*>(memory) + header_bytes),
      rank_(rank), num_ranks_(num_ranks), region_bytes_(region_bytes) {
    if (num_ranks < 1 || num_ranks > MAX_RANKS || rank < 0 || rank >= num_ranks)
        throw std::invalid_argument("rank " + std::to_string(rank) + " of " + std::to_string(num_ranks));
}

void RankGroup::publish() {
    me().num_published.store(++num_exchanges_);
    if (me().num_asleep.load() > 0) wake_all(me().num_published);
}

void RankGroup::wait_for(long rank) {
    SharedHeader::Rank& other = header_->ranks[rank];
    for (int spins = 0;; spins++) {
        if (header_->is_interrupted.load()) throw Interrupted("the exchange between ranks was interrupted");
        const std::uint32_t seen = other.num_published.load();
        if (static_cast<std::int32_t>(seen - num_exchanges_) >= 0) return;
        if (spins < SPINS) {
            pause();
            continue;
        }
        other.num_asleep.fetch_add(1);
        if (!header_->is_interrupted.load()) sleep_on(other.num_published, seen);
        other.num_asleep.fetch_sub(1);
    }
}

// Each number is lowered, so that a rank that is about to sleep on it does not, and none looks as if it had been published.
void RankGroup::interrupt() {
    constexpr std::uint32_t far = 1 << 20;
    header_->is_interrupted.store(1);
    for (long rank = 0; rank < num_ranks_; rank++) {
        header_->ranks[rank].num_published.fetch_sub(far);
        wake_all(header_->ranks[rank].num_published);
    }
}

void RankGroup::resume() {
    for (long rank = 0; rank < num_ranks_; rank++) header_->ranks[rank].num_published.store(0);
    header_->is_interrupted.store(0);
}

void RankGroup::meet() {
    publish();
    wait_for_all();
}

void RankGroup::wait_for_all() {
    for (long rank = 0; rank < num_ranks_; rank++)
        if (rank != rank_) wait_for(rank);
}

void RankGroup::exchange(const char* own, char* rows, long num_rows, const std::vector<long>& bounds, long element_bytes) {
    char* region = regions_ + (num_exchanges_ & 1) * region_bytes_;
    const long row_bytes = bounds.back() * element_bytes;
    const auto first = [&](long rank) { return bounds[rank] * element_bytes; };
    const auto bytes = [&](long rank) { return (bounds[rank + 1] - bounds[rank]) * element_bytes; };
    const auto place = [&](long rank) { return region + first(rank) * num_rows; };  // place of its rows, one after the other
    copy_rows(own, bytes(rank_), place(rank_), bytes(rank_), num_rows, bytes(rank_));
    publish();
    copy_rows(own, bytes(rank_), rows + first(rank_), row_bytes, num_rows, bytes(rank_));
    for (long step = 1; step < num_ranks_; step++) {
        const long rank = (rank_ + step) % num_ranks_;
        wait_for(rank);
        copy_rows(place(rank), bytes(rank), rows + first(rank), row_bytes, num_rows, bytes(rank));
    }
}

void RankGroup::gather(const void* own, void* rows, long num_rows, const std::vector<long>& bounds, long element_bytes) {
    if (static_cast<long>(bounds.size()) != num_ranks_ + 1) throw std::invalid_argument("columns of another number of ranks");
    const long row_bytes = bounds.back() * element_bytes, own_bytes = (bounds[rank_ + 1] - bounds[rank_]) * element_bytes;
    const long rows_at_once = region_bytes_ / row_bytes;
    if (rows_at_once < 1) throw std::invalid_argument("a row of " + std::to_string(row_bytes) + " bytes does not fit into a region");
    for (long begin = 0; begin < num_rows; begin += rows_at_once)
        exchange(static_cast<const char*>(own) + begin * own_bytes, static_cast<char*>(rows) + begin * row_bytes,
                 std::min(rows_at_once, num_rows - begin), bounds, element_bytes);
}

// Few sums are added by every rank, which is one exchange. Of many each rank adds some columns, and gathers those of the
// others: fewer bytes are read, and the order is the same.
template <typename T>
void RankGroup::sum_at_once(const float* own, T* out, long num_rows, long width) {
    const float* region = reinterpret_cast<float*>(regions_ + (num_exchanges_ & 1) * region_bytes_);
    const long count = num_rows * width;  // elements of each rank's partial sums, one rank's after the other's
    copy_rows(reinterpret_cast<const char*>(own), width * sizeof(float), (char*)(region + rank_ * count), width * sizeof(float),
              num_rows, width * sizeof(float));
    meet();
    const auto add = [&](T* to, long to_stride, long first, long stop) {
        share_range(num_rows, std::max(1L, (SHARED_BYTES / 4) / (width * num_ranks_)), [=, this](long begin, long end) {
            for (long row = begin; row < end; row++)
                for (long i = first; i < stop; i += ISA::LANES) {
                    const long lanes = std::min<long>(ISA::LANES, stop - i);
                    const float* from = region + row * width + i;
                    ISA::Floats sums = ISA::load_some(from, lanes);
                    for (long rank = 1; rank < num_ranks_; rank++) sums = sums + ISA::load_some(from + rank * count, lanes);
                    ISA::store_some(to + row * to_stride + i - first, sums, lanes);
                }
        });
    };
    if (count * static_cast<long>(sizeof(float)) <= ADDED_BYTES) return add(out, width, 0, width);
    std::vector<long> bounds;
    for (long rank = 0; rank <= num_ranks_; rank++) bounds.push_back(width * rank / num_ranks_);
    const long first = bounds[rank_], stop = bounds[rank_ + 1];
    static thread_local ISA::Aligned<T> memory;
    T* columns = memory.at_least(num_rows * (stop - first));
    add(columns, stop - first, first, stop);
    gather(columns, out, num_rows, bounds, sizeof(T));
}

template <typename T>
void RankGroup::sum(const float* own, T* out, long num_rows, long width) {
    const long row_bytes = num_ranks_ * width * sizeof(float), rows_at_once = region_bytes_ / row_bytes;
    if (rows_at_once < 1)
        throw std::invalid_argument("partial sums of " + std::to_string(row_bytes) + " bytes do not fit into a region");
    for (long begin = 0; begin < num_rows; begin += rows_at_once)
        sum_at_once(own + begin * width, out + begin * width, std::min(rows_at_once, num_rows - begin), width);
}

template void RankGroup::sum(const float*, float*, long, long);
template void RankGroup::sum(const float*, bf16*, long, long);

}  // namespace quire
