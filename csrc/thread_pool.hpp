// Thread pool of the kernels: dynamic work sharing.
//
// Work is cut into chunks that free threads take one at a time. The caller waits only for chunks in progress: a thread
// that sleeps or is descheduled costs its help, not the latency until it runs again, which a team with a barrier pays at
// every kernel (docs/kernels.md has figures). Results do not depend on which thread computes a chunk.
#pragma once

#include <atomic>
#include <algorithm>

namespace quire {

// The chunks 0 to count - 1, each taken once.
class Chunks {
public:
    explicit Chunks(long count) : count_(count) {}

    // The next free chunk; `count` or more: all are taken.
    long take() { return next_.fetch_add(1, std::memory_order_relaxed); }
    long count() const { return count_; }

    // Leave no chunk to take: the job ends as soon as the chunks in progress have ended.
    void cancel() { next_.store(count_, std::memory_order_relaxed); }

private:
    std::atomic<long> next_{0};
    long count_;
};

using Work = void (*)(void* body, Chunks& chunks);

// Threads that compute, the caller's included: OMP_NUM_THREADS, else the CPUs of the process, unless a number was set.
long num_threads();
void set_num_threads(long count);

// Call `work` with `body` here and in as many more threads as there are, all at once, and return when all have returned.
// An exception in any of the threads cancels the chunks not yet taken; the first one is rethrown here, once no thread
// uses `body` any more.
// Here alone while the threads are at work already: for another model, or for the work that this is a part of.
void work_together(long num_chunks, Work work, void* body);

// Wait until threads that are at work have set `count` to `expected`.
void wait_for(const std::atomic<long>& count, long expected);

// Run body(chunks) in all threads: body takes chunks until none is left. With one chunk or one thread, here alone.
template <typename Body>
void share(long num_chunks, Body&& body) {
    if (num_chunks > 0) work_together(num_chunks, [](void* body, Chunks& chunks) { (*static_cast<Body*>(body))(chunks); }, &body);
}

// Run body(begin, end) for parts of [0, count) of `size` indices each.
template <typename Body>
void share_range(long count, long size, Body&& body) {
    share((count + size - 1) / size, [&](Chunks& chunks) {
        for (long i; (i = chunks.take()) < chunks.count();) body(i * size, std::min(count, (i + 1) * size));
    });
}

// For tests: run chunks and return how many were run, but throw std::bad_alloc from the first chunk that the caller (or a
// helper) takes at index `failing` or above; -1: from none. More chunks than threads must follow `failing`.
long fail_in_chunk(long num_chunks, long failing, bool in_helper);

}  // namespace quire
