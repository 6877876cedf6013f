#include "gang.hpp"

#include <omp.h>
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

constexpr int SPINS = 2000;         // turns of 50 ns that a thread without work looks out for some before it sleeps
constexpr int SPINS_TO_YIELD = 400;  // that the caller waits for a chunk before it offers its CPU

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

// The door of a job: its number, whether it is open, how many more may come in, how many have.
//
// A helper comes in by one compare-and-swap of the whole word, so it can neither enter a job that has been closed nor
// mistake one for the next. The caller closes the door when no chunk is left and waits for those inside, no one else.
struct Door {
    static constexpr std::uint64_t ENTERED = 1, WELCOME = 1u << 12, OPEN = 1u << 24, NUMBER = 1u << 25, COUNT = WELCOME - 1;

    static std::uint64_t next(std::uint64_t door, long helpers) { return (door / NUMBER + 1) * NUMBER + OPEN + helpers * WELCOME; }
    static bool has_room(std::uint64_t door) { return (door & OPEN) && (door & COUNT) < (door / WELCOME & COUNT); }
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

class Gang {
public:
    void run(long num_helpers, Chunks& chunks, Work work, void* body) {
        hire(num_helpers);
        chunks_ = &chunks;
        work_ = work;
        body_ = body;
        num_left_.store(0, std::memory_order_relaxed);
        door_.store(Door::next(door_.load(std::memory_order_relaxed), num_helpers));
        if (num_asleep_.load() > 0) {
            bell_.fetch_add(1);
            bell_.notify_all();
        }
        work_or_cancel();
        const std::uint64_t entered = door_.fetch_and(~Door::OPEN) & Door::COUNT;
        for (int spins = 0; num_left_.load(std::memory_order_acquire) != entered; spins++)
            if (spins < SPINS_TO_YIELD)
                pause();
            else
                sched_yield();
        failure_.rethrow_if_any();
    }

    std::atomic_flag in_use;

private:
    alignas(64) std::atomic<std::uint64_t> door_{0};
    alignas(64) std::atomic<std::uint64_t> num_left_{0};
    Chunks* chunks_ = nullptr;
    Work work_ = nullptr;
    void* body_ = nullptr;
    Failure failure_;
    alignas(64) std::atomic<std::uint32_t> bell_{0};
    std::atomic<long> num_asleep_{0};
    long num_helpers_ = 0;
    bool may_hire_ = true;

    // Threads that are asked for are kept. Signals are the main thread's. Where the system refuses a thread, the work is
    // shared among those that exist.
    void hire(long num_helpers) {
        if (num_helpers <= num_helpers_ || !may_hire_) return;
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_BLOCK, &all, &before);
        try {
            for (; num_helpers_ < num_helpers; num_helpers_++) std::thread([this] { help(); }).detach();
        } catch (const std::exception&) {
            may_hire_ = false;
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

    // A job that this thread has left is out of chunks: coming in once more finds nothing to do.
    bool try_to_help() {
        std::uint64_t door = door_.load();
        if (!Door::has_room(door) || !door_.compare_exchange_strong(door, door + Door::ENTERED)) return false;
        work_or_cancel();
        num_left_.fetch_add(1, std::memory_order_release);
        return true;
    }

    void sleep() {
        const std::uint32_t rung = bell_.load();
        num_asleep_.fetch_add(1);
        if (!Door::has_room(door_.load())) bell_.wait(rung);
        num_asleep_.fetch_sub(1);
    }
};

// Never destroyed: its threads outlive main(). A child that was forked has none of them and hires its own.
Gang* gang = new Gang;
[[maybe_unused]] const int is_registered = pthread_atfork(nullptr, nullptr, [] { gang = new Gang; });

}  // namespace

long num_threads() { return omp_get_max_threads(); }

void work_together(long num_chunks, Work work, void* body) {
    Chunks chunks(num_chunks);
    const long helpers = std::min<long>(std::min(num_threads(), num_chunks) - 1, Door::COUNT);
    if (helpers < 1 || gang->in_use.test_and_set(std::memory_order_acquire)) return work(body, chunks);
    struct Use {
        ~Use() { gang->in_use.clear(std::memory_order_release); }
    } use;
    gang->run(helpers, chunks, work, body);
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
