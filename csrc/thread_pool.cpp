#include "thread_pool.hpp"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <cstdint>
#include <exception>
#include <new>
#include <thread>
#include <utility>

namespace quire {
namespace {

constexpr int SPINS = 2000;         // turns of 50 ns that an idle thread polls for work before it sleeps
constexpr int SPINS_TO_YIELD = 400;  // turns that a thread waits for work of the others before it yields its CPU

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

// The gate of a job, one word: its number, whether it is open, how many helpers may enter, how many have entered.
//
// A helper enters by one compare-and-swap of the whole word, so it can neither enter a job that has been closed nor
// mistake one for the next. The caller closes the gate when no chunk is left and waits for the helpers inside only.
struct JobGate {
    static constexpr std::uint64_t ENTERED = 1, CAPACITY = 1u << 12, OPEN = 1u << 24, NUMBER = 1u << 25, MAX_HELPERS = CAPACITY - 1;

    static std::uint64_t next(std::uint64_t gate, long helpers) { return (gate / NUMBER + 1) * NUMBER + OPEN + helpers * CAPACITY; }
    static bool has_room(std::uint64_t gate) { return (gate & OPEN) && (gate & MAX_HELPERS) < (gate / CAPACITY & MAX_HELPERS); }
};

// The first exception of a job, from whichever thread.
class Failure {
public:
    void keep(std::exception_ptr failure) {
        if (!is_kept_.test_and_set()) failure_ = std::move(failure);
    }

    // After all threads have left the job. Keeps nothing: the next job begins without a failure.
    void rethrow_if_any() {
        if (!failure_) return;
        const std::exception_ptr failure = std::exchange(failure_, nullptr);
        is_kept_.clear();
        std::rethrow_exception(failure);
    }

private:
    std::atomic_flag is_kept_;
    std::exception_ptr failure_;
};

class ThreadPool {
public:
    void run(long num_helpers, Chunks& chunks, Work work, void* body) {
        start_helpers(num_helpers);
        chunks_ = &chunks;
        work_ = work;
        body_ = body;
        num_left_.store(0, std::memory_order_relaxed);
        gate_.store(JobGate::next(gate_.load(std::memory_order_relaxed), num_helpers));
        if (num_asleep_.load() > 0) {
            wake_count_.fetch_add(1);
            wake_count_.notify_all();
        }
        work_or_cancel();
        wait_for(num_left_, gate_.fetch_and(~JobGate::OPEN) & JobGate::MAX_HELPERS);
        failure_.rethrow_if_any();
    }

    std::atomic_flag in_use;

private:
    alignas(64) std::atomic<std::uint64_t> gate_{0};
    alignas(64) std::atomic<long> num_left_{0};
    Chunks* chunks_ = nullptr;
    Work work_ = nullptr;
    void* body_ = nullptr;
    Failure failure_;
    alignas(64) std::atomic<std::uint32_t> wake_count_{0};
    std::atomic<long> num_asleep_{0};
    long num_helpers_ = 0;
    bool may_start_threads_ = true;

    // Started threads are kept. Signals are the main thread's. If the system refuses a thread, the existing ones share
    // the work.
    void start_helpers(long num_helpers) {
        if (num_helpers <= num_helpers_ || !may_start_threads_) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before);
        try {
            for (; num_helpers_ < num_helpers; num_helpers_++) std::thread([this] { help(); }).detach();
        } catch (const std::exception&) {
            may_start_threads_ = false;
        }
        pthread_sigmask(SIG_SETMASK, &before, nullptr);
    }

    void work_or_cancel() noexcept {
        try {
            work_(body_, *chunks_);
        } catch (...) {
            failure_.keep(std::current_exception());
            chunks_->cancel();
        }
    }

    [[noreturn]] void help() {
        for (int spins = 0;; spins++) {
            if (try_to_help())
                spins = 0;
            else if (spins < SPINS)
                pause();
            else {
                sleep();
                spins = 0;
            }
        }
    }

    // A job that this thread has left has no chunks: entering it again finds nothing to do.
    bool try_to_help() {
        std::uint64_t gate = gate_.load();
        if (!JobGate::has_room(gate) || !gate_.compare_exchange_strong(gate, gate + JobGate::ENTERED)) return false;
        work_or_cancel();
        num_left_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void sleep() {
        const std::uint32_t seen = wake_count_.load();
        num_asleep_.fetch_add(1);
        if (!JobGate::has_room(gate_.load())) wake_count_.wait(seen);
        num_asleep_.fetch_sub(1);
    }
};

// Never destroyed: its threads outlive main(). A forked child has none of them and starts its own.
ThreadPool* pool = new ThreadPool;
[[maybe_unused]] const int is_registered = pthread_atfork(nullptr, nullptr, [] { pool = new ThreadPool; });

std::atomic<long> thread_count{1};  // until Python sets it: quire/core/host_limits.py knows of quotas and of OMP_NUM_THREADS

}  // namespace

void wait_for(const std::atomic<long>& count, long expected) {
    for (int spins = 0; count.load(std::memory_order_acquire) != expected; spins++)
        if (spins < SPINS_TO_YIELD)
            pause();
        else
            sched_yield();
}

long num_threads() { return thread_count.load(std::memory_order_relaxed); }

void set_num_threads(long count) { thread_count.store(std::max(count, 1L), std::memory_order_relaxed); }

void work_together(long num_chunks, Work work, void* body) {
    Chunks chunks(num_chunks);
    const long helpers = std::min<long>(std::min(num_threads(), num_chunks) - 1, JobGate::MAX_HELPERS);
    if (helpers < 1 || pool->in_use.test_and_set(std::memory_order_acquire)) return work(body, chunks);
    struct Use {
        ~Use() { pool->in_use.clear(std::memory_order_release); }
    } use;
    pool->run(helpers, chunks, work, body);
}

long fail_in_chunk(long num_chunks, long failing, bool in_helper) {
    const std::thread::id caller = std::this_thread::get_id();
    std::atomic<long> num_run{0};
    std::atomic_flag has_failed;
    share(num_chunks, [&](Chunks& chunks) {
        const bool is_to_fail = (std::this_thread::get_id() != caller) == in_helper;
        for (long i; (i = chunks.take()) < chunks.count(); num_run++) {
            if (failing < 0 || i < failing) continue;
            if (is_to_fail) {
                has_failed.test_and_set();
                throw std::bad_alloc();
            }
            while (!has_failed.test()) std::this_thread::yield();  // else the other threads might take all chunks
        }
    });
    return num_run;
}

}  // namespace quire
