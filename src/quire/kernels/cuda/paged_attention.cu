// PagedAttention in CUDA C++ (Kwon et al. 2023, sections 4.1 and 5.1), cut as vLLM's design page describes it.
//
// A thread block attends for one query head of one token: over its whole context (v1, PARTITION 0), or over one
// partition of it (v2), which `combine` folds with the others. A warp takes every NUM_WARPS-th block of the KV cache. In
// it a group of GROUP threads takes one key: each reads every GROUP-th vector of 16 bytes, and shuffles add up the dot
// product. The scores of all keys are in shared memory, so softmax is two reductions over the thread block. For the
// values a warp goes over its blocks again: LANES threads read one row, each VECTOR elements of it, and sum weight times
// value; then the lanes of other rows, then the other warps are folded.
//
// The host defines ELEMENT (0 float, 1 half, 2 bfloat16), HEAD_DIM, BLOCK_SIZE and PARTITION. No header is needed.

#ifdef __CUDACC__
#define DYNAMIC_SHARED(name) extern __shared__ float name[]
__device__ inline float half_to_float(unsigned short bits) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
  return x;
}
__device__ inline unsigned short float_to_half(float x) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
  return bits;
}
#endif

#if ELEMENT == 0
typedef float Element;
__device__ inline float to_float(Element x) { return x; }
__device__ inline Element to_element(float x) { return x; }
#elif ELEMENT == 1
typedef unsigned short Element;
__device__ inline float to_float(Element x) { return half_to_float(x); }
__device__ inline Element to_element(float x) { return float_to_half(x); }
#else
typedef unsigned short Element;
__device__ inline float to_float(Element x) { return __uint_as_float((unsigned int)x << 16); }
__device__ inline Element to_element(float x) {  // to the nearest, ties to even
  const unsigned int bits = __float_as_uint(x);
  return (bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16;
}
#endif

constexpr int NUM_THREADS = 128, WARP = 32, NUM_WARPS = NUM_THREADS / WARP;
constexpr int VECTOR = 16 / sizeof(Element), NUM_VECTORS = HEAD_DIM / VECTOR;
constexpr int GROUP = BLOCK_SIZE < WARP ? WARP / BLOCK_SIZE : 1;       // threads of a key
constexpr int VECTORS_PER_THREAD = (NUM_VECTORS + GROUP - 1) / GROUP;  // vectors of a key
__device__ constexpr int power_of_2(int least) { return least <= 1 ? 1 : 2 * power_of_2((least + 1) / 2); }
constexpr int LANES = power_of_2(NUM_VECTORS) < WARP ? power_of_2(NUM_VECTORS) : WARP;  // threads of a value
constexpr int VECTORS_PER_LANE = (NUM_VECTORS + LANES - 1) / LANES;
constexpr unsigned int ALL = 0xFFFFFFFFu;
constexpr float NOTHING = -3.402823466e38f;  // below every score

union Vector {
  uint4 whole;
  Element elements[VECTOR];
};

__device__ inline Vector load(const Element* from) {
  Vector vector;
  vector.whole = *reinterpret_cast<const uint4*>(from);
  return vector;
}

// The sum, or the highest, of a value of each thread of the block, in every thread. `of_warps` is shared memory.
template <bool IS_SUM>
__device__ inline float reduce(float value, float* of_warps) {
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  for (int mask = WARP / 2; mask >= 1; mask /= 2) {
    const float other = __shfl_xor_sync(ALL, value, mask);
    value = IS_SUM ? value + other : fmaxf(value, other);
  }
  if (lane == 0) of_warps[warp] = value;
  __syncthreads();
  value = of_warps[0];
  for (int i = 1; i < NUM_WARPS; ++i) value = IS_SUM ? value + of_warps[i] : fmaxf(value, of_warps[i]);
  return value;
}

// The position at which a partition of v2 begins: FINE of PARTITION tokens, then 8 for each doubling of the context, the
// longest of LONGEST tokens. So 131,072 tokens are 48 partitions of 512 to 8,192 tokens, not 256.
constexpr int FINE = 16, DOUBLINGS = 4, LONGEST = FINE * PARTITION;
__device__ inline int partition_begin(int partition) {
  if (partition < FINE) return partition * PARTITION;
  const int level = (partition - FINE) / 8 < DOUBLINGS ? (partition - FINE) / 8 : DOUBLINGS - 1;
  return (LONGEST << level) + (partition - FINE - 8 * level) * (2 * PARTITION << level);
}

// grid (num_heads, num_seqs, partitions, 1 for v1). Sequences that advance by another number of tokens than one are left
// out. Shared memory: a float for each token of the longest partition, or of the longest context.
//
// out [num_tokens, num_heads, HEAD_DIM]; partials [num_seqs, num_heads, partitions, HEAD_DIM] and highests, totals
// [num_seqs, num_heads, partitions] are v2's. query [num_tokens, num_heads, HEAD_DIM] with strides; keys and values
// [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM].
extern "C" __global__ void __launch_bounds__(NUM_THREADS) attend(
    Element* out, float* partials, float* highests, float* totals, const Element* query, const Element* keys,
    const Element* values, const int* tables, const int* query_starts, const int* context_lens, int num_kv_heads,
    int table_stride, long long token_stride, long long head_stride, float scale, int window) {
  const int head = blockIdx.x, sequence = blockIdx.y, partition = blockIdx.z;
  const int token = query_starts[sequence], context = context_lens[sequence];
  const int begin = partition_begin(partition), behind = partition_begin(partition + 1);  // v1: 0
  const int end = PARTITION > 0 && behind < context ? behind : context;
  if (query_starts[sequence + 1] - token != 1 || begin >= context) return;
  const int first_seen = window > 0 && context > window ? context - window : 0;
  const int first = begin > first_seen ? begin : first_seen;  // the keys of this thread block: first to end
  const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
  const int kv_head = head / (gridDim.x / num_kv_heads);
  const int* table = tables + (long long)sequence * table_stride;

  // 1. The query goes to shared memory, in the order in which the threads of a group read it.
  __shared__ Vector query_vectors[GROUP][VECTORS_PER_THREAD];
  __shared__ float of_warps[2][NUM_WARPS];
  DYNAMIC_SHARED(scores);
  const Element* own = query + token * token_stride + head * head_stride;
  for (int i = threadIdx.x; i < NUM_VECTORS; i += NUM_THREADS) query_vectors[i % GROUP][i / GROUP] = load(own + i * VECTOR);
  __syncthreads();

  // 2. Scores: a block of the cache for each warp, a key for each group, vectors of it for each thread.
  const int rank = lane % GROUP;
  float highest = NOTHING;
  for (int block = first / BLOCK_SIZE + warp; block * BLOCK_SIZE < end; block += NUM_WARPS) {
    const long long physical = table[block];
    for (int offset = lane / GROUP; offset < BLOCK_SIZE; offset += WARP / GROUP) {
      const int position = block * BLOCK_SIZE + offset;
      const bool is_seen = position >= first && position < end;
      float score = 0.0f;
      if (is_seen) {
        const Element* key = keys + ((physical * BLOCK_SIZE + offset) * num_kv_heads + kv_head) * HEAD_DIM;
        for (int j = 0; j < VECTORS_PER_THREAD; ++j) {
          if (j * GROUP + rank >= NUM_VECTORS) break;
          const Vector vector = load(key + (j * GROUP + rank) * VECTOR);
          for (int k = 0; k < VECTOR; ++k) {
            score += to_float(query_vectors[rank][j].elements[k]) * to_float(vector.elements[k]);
          }
        }
      }
      for (int mask = GROUP / 2; mask >= 1; mask /= 2) score += __shfl_xor_sync(ALL, score, mask);
      if (rank == 0 && is_seen) {
        scores[position - first] = score * scale;
        highest = fmaxf(highest, score * scale);
      }
    }
  }

  // 3. Softmax: the highest score, then weights and their sum.
  highest = reduce<false>(highest, of_warps[0]);
  float total = 0.0f;
  for (int i = threadIdx.x; i < end - first; i += NUM_THREADS) {
    scores[i] = expf(scores[i] - highest);
    total += scores[i];
  }
  total = reduce<true>(total, of_warps[1]);

  // 4. Values: LANES threads for each row, WARP / LANES rows at once in each warp.
  float sums[VECTORS_PER_LANE][VECTOR] = {};
  for (int block = first / BLOCK_SIZE + warp; block * BLOCK_SIZE < end; block += NUM_WARPS) {
    const long long physical = table[block];
    for (int offset = lane / LANES; offset < BLOCK_SIZE; offset += WARP / LANES) {
      const int position = block * BLOCK_SIZE + offset;
      if (position < first || position >= end) continue;
      const Element* value = values + ((physical * BLOCK_SIZE + offset) * num_kv_heads + kv_head) * HEAD_DIM;
      for (int j = 0; j < VECTORS_PER_LANE; ++j) {
        if (j * LANES + lane % LANES >= NUM_VECTORS) break;
        const Vector vector = load(value + (j * LANES + lane % LANES) * VECTOR);
        for (int k = 0; k < VECTOR; ++k) sums[j][k] += scores[position - first] * to_float(vector.elements[k]);
      }
    }
  }

  // 5. Fold: the rows of a warp by shuffles, then the upper half of the warps into the lower one until one is left.
  __shared__ float folded[NUM_WARPS / 2][LANES][VECTORS_PER_LANE * VECTOR];
  for (int j = 0; j < VECTORS_PER_LANE * VECTOR; ++j) {
    for (int mask = WARP / 2; mask >= LANES; mask /= 2) {
      sums[j / VECTOR][j % VECTOR] += __shfl_xor_sync(ALL, sums[j / VECTOR][j % VECTOR], mask);
    }
  }
  for (int half = NUM_WARPS / 2; half >= 1; half /= 2) {
    if (warp >= half && warp < 2 * half && lane < LANES) {
      for (int j = 0; j < VECTORS_PER_LANE * VECTOR; ++j) folded[warp - half][lane][j] = sums[j / VECTOR][j % VECTOR];
    }
    __syncthreads();
    if (warp < half && lane < LANES) {
      for (int j = 0; j < VECTORS_PER_LANE * VECTOR; ++j) sums[j / VECTOR][j % VECTOR] += folded[warp][lane][j];
    }
    __syncthreads();
  }

  // 6. The first LANES threads hold the answer. A window may have left a partition without a key: total 0.
  const long long row = ((long long)sequence * gridDim.x + head) * gridDim.z + partition;
  if (PARTITION > 0 && threadIdx.x == 0) highests[row] = highest, totals[row] = total;
  if (warp > 0 || lane >= LANES) return;
  for (int j = 0; j < VECTORS_PER_LANE; ++j) {
    const int dim = (j * LANES + lane) * VECTOR;
    for (int k = 0; k < VECTOR && dim < HEAD_DIM; ++k) {
      const float mean = total > 0.0f ? sums[j][k] / total : 0.0f;
      if (PARTITION > 0) partials[row * HEAD_DIM + dim + k] = mean;
      else out[((long long)token * gridDim.x + head) * HEAD_DIM + dim + k] = to_element(mean);
    }
  }
}

#if PARTITION > 0
__device__ inline int count_partitions(int context) {
  if (context <= LONGEST) return (context + PARTITION - 1) / PARTITION;
  int level = 0;
  while (level + 1 < DOUBLINGS && context > 2 * LONGEST << level) ++level;
  const int tokens = 2 * PARTITION << level;
  return FINE + 8 * level + (context - (LONGEST << level) + tokens - 1) / tokens;
}

// grid (num_heads, num_seqs): the mean of a row's partitions, weighed. Shared memory: a float for each partition.
extern "C" __global__ void __launch_bounds__(NUM_THREADS) combine(
    Element* out, const float* partials, const float* highests, const float* totals, const int* query_starts,
    const int* context_lens, int max_partitions) {
  const int head = blockIdx.x, sequence = blockIdx.y, token = query_starts[sequence];
  const int num_partitions = count_partitions(context_lens[sequence]);
  if (query_starts[sequence + 1] - token != 1 || num_partitions == 0) return;
  const long long row = ((long long)sequence * gridDim.x + head) * max_partitions;
  __shared__ float of_warps[2][NUM_WARPS];
  DYNAMIC_SHARED(weights);
  float highest = NOTHING;
  for (int i = threadIdx.x; i < num_partitions; i += NUM_THREADS) highest = fmaxf(highest, highests[row + i]);
  highest = reduce<false>(highest, of_warps[0]);
  float total = 0.0f;
  for (int i = threadIdx.x; i < num_partitions; i += NUM_THREADS) {
    weights[i] = totals[row + i] * expf(highests[row + i] - highest);
    total += weights[i];
  }
  total = reduce<true>(total, of_warps[1]);
  for (int dim = threadIdx.x; dim < HEAD_DIM; dim += NUM_THREADS) {
    float sum = 0.0f;
    for (int i = 0; i < num_partitions; ++i) sum += weights[i] * partials[(row + i) * HEAD_DIM + dim];
    const float mean = num_partitions > 1 ? sum / total : partials[row * HEAD_DIM + dim];  // one partition: v1's bits
    out[((long long)token * gridDim.x + head) * HEAD_DIM + dim] = to_element(mean);
  }
}
#endif
