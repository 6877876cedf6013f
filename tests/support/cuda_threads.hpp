// CUDA's threads on a CPU: a thread block's threads are coroutines that take turns at barriers and shuffles.
//
// Between two of them a thread runs alone, so a barrier that is missing shows: a thread reads what others have yet to
// write. `run` reports a barrier or a shuffle that not all threads reach. Loads of vectors can be recorded.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#define __global__
#define __device__
#define __launch_bounds__(n)
#define __shared__ static
#define DYNAMIC_SHARED(name) float* name = cuda::dynamic.data()
#define threadIdx (cuda::Index{cuda::current, 0, 0})
#define blockIdx cuda::block
#define gridDim cuda::grid

struct alignas(16) uint4 { unsigned int x, y, z, w; };

namespace cuda {
struct Index { int x, y, z; };
struct Barrier { int size = 0, num_waiting = 0; long long generation = 0; };
struct Warp { Barrier barrier; float values[32]; };

Index block, grid;
int current;
bool is_stuck;
std::vector<float> dynamic;
std::vector<ucontext_t> contexts;
std::vector<std::vector<char>> stacks;
std::vector<bool> is_over;
std::vector<Warp> warps;
Barrier all;
ucontext_t scheduler;
long long num_events;
const std::function<void()>* body;

void wait(Barrier& barrier) {
  const long long generation = barrier.generation;
  if (++barrier.num_waiting == barrier.size) {
    barrier.num_waiting = 0, ++barrier.generation, ++num_events;
    return;
  }
  while (barrier.generation == generation) swapcontext(&contexts[current], &scheduler);
}

void enter() {
  (*body)();
  is_over[current] = true, ++num_events;
}

// Run one thread block. Return false if threads wait for ones that have ended, or wait elsewhere.
bool run_block(int num_threads, bool is_reversed) {
  contexts.assign(num_threads, {}), is_over.assign(num_threads, false);
  stacks.resize(num_threads, std::vector<char>(64 << 10));
  warps.assign(num_threads / 32, {}), all = {num_threads};
  for (Warp& warp : warps) warp.barrier.size = 32;
  std::fill(dynamic.begin(), dynamic.end(), std::numeric_limits<float>::quiet_NaN());
  for (int i = 0; i < num_threads; ++i) {
    getcontext(&contexts[i]);
    contexts[i].uc_stack = {stacks[i].data(), 0, stacks[i].size()};
    contexts[i].uc_link = &scheduler;
    makecontext(&contexts[i], enter, 0);
  }
  for (int left = num_threads; left > 0;) {
    const long long before = num_events;
    for (int i = 0; i < num_threads; ++i) {
      current = is_reversed ? num_threads - 1 - i : i;
      if (is_over[current]) continue;
      swapcontext(&scheduler, &contexts[current]);
      left -= is_over[current];
    }
    if (num_events == before) return false;
  }
  return true;
}

// Run a grid of thread blocks; return 0, or 1 if one was stuck.
int run(Index size, int num_threads, int shared_floats, int is_reversed, const std::function<void()>& kernel) {
  grid = size, body = &kernel;
  dynamic.assign(std::max(shared_floats, 1), 0.0f);
  for (block.z = 0; block.z < grid.z; ++block.z)
    for (block.y = 0; block.y < grid.y; ++block.y)
      for (block.x = 0; block.x < grid.x; ++block.x)
        if (!run_block(num_threads, is_reversed)) return 1;
  return 0;
}
}  // namespace cuda

inline void __syncthreads() { cuda::wait(cuda::all); }
inline float __shfl_xor_sync(unsigned int, float value, int mask) {
  cuda::Warp& warp = cuda::warps[cuda::current / 32];
  warp.values[cuda::current % 32] = value;
  cuda::wait(warp.barrier);
  const float other = warp.values[cuda::current % 32 ^ mask];
  cuda::wait(warp.barrier);
  return other;
}
inline float __uint_as_float(unsigned int bits) { float x; std::memcpy(&x, &bits, 4); return x; }
inline unsigned int __float_as_uint(float x) { unsigned int bits; std::memcpy(&bits, &x, 4); return bits; }
inline float half_to_float(unsigned short bits) { _Float16 x; std::memcpy(&x, &bits, 2); return x; }
inline unsigned short float_to_half(float x) { const _Float16 half = x; unsigned short bits; std::memcpy(&bits, &half, 2); return bits; }
