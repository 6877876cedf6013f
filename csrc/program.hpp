// Interpreter of layer programs: a stretch of ops in one call, without returns to Python in between, since the
// weights that a step reads evict Python's code and data from the caches. quire/kernels/program.py defines each op's meaning.
#pragma once

#include <variant>

#include "kernels.hpp"
#include "low_rank.hpp"

namespace quire {

struct NormWeights {
    const void *weight = nullptr, *bias = nullptr;
    float eps = 0;
    bool is_layer_norm = false;  // else RMSNorm
    bool is_wide = false;        // as in Norm
    float offset = 0;
    long num_heads = 1;  // as in Norm
};

// An activation [num_tokens, width]: memory of its own, or columns from `offset` on of another activation, `base`. External
// ones are passed to each run, the others live in scratch memory.
struct Buffer {
    long width, base, offset;  // base -1: none
    bool is_external;
};

// Ops name activations by index; -1: none. `layer` is an index of the caches.
struct NormOp {
    long x, residual, summed, out;
    NormWeights norm;
};
struct LinearOp {
    long x, out, number;  // `number`: by which adapters have its factors, here and below
    LinearWeights layer;
};
struct ExpertsOp {
    long x, scored, out;  // scored -1: x
    ExpertWeights weights;
};
struct QKNormOp {  // over each head, or over all heads together, in place
    long query, key;
    NormWeights query_norm, key_norm;
    long num_query_rows, query_width, num_key_rows, key_width;  // rows of a token, and the width of each
};
struct HeadNormOp {  // over each head; x and out may be one
    long x, out;
    NormWeights norm;
    long num_rows, width;  // rows of a token, and the width of each
};
struct RotaryWriteOp {
    long query, key, value, layer;  // value -1: the cache has none; key -1: nothing is written
    RotaryParameters rotary;
};
struct AttentionOp {
    long query, out, layer;
    AttentionParameters attention;
};
struct ShortConvOp {
    long x, out, layer;
    const float *weight, *bias;
    long taps, length;  // as in ShortConv
};
struct DeltaNetOp {
    long x, gates, shares, decays, out, layer;  // `layer`: an index of the states
    DeltaNetWeights weights;
};
struct MambaOp {
    long x, out, layer;  // `layer`: an index of the states
    MambaWeights weights;
};
struct GateOp {  // in place
    long x, gate;
    bool is_sigmoid;
};
struct PositionScaleOp {  // rows times factors[their position], in place
    long x;
    const float* factors;
};
struct SumOp {  // out = x * factor + y, clipped; y -1: none, limit 0: not clipped
    long x, y, out;
    float factor, limit;
};
// The ranks of tensor parallelism exchange an activation: each has computed some of its columns, x, and gets all, out.
struct GatherOp {
    long x, out;
    ColumnExchange exchange;
};
// A linear layer of which each rank of tensor parallelism has some inputs: their partial sums are added over the ranks.
struct SummedLinearOp {
    long x, out, number;
    LinearWeights layer;
    SumExchange exchange;
};
struct HeadLinearOp {
    long x, out, passed;
    std::vector<LinearWeights> heads;
};
struct CountLayerOp {
    volatile std::int64_t* progress;  // one more; other threads read it
};
using ProgramOp = std::variant<NormOp, LinearOp, ExpertsOp, QKNormOp, HeadNormOp, RotaryWriteOp, AttentionOp, ShortConvOp, DeltaNetOp, MambaOp,
                               GateOp, PositionScaleOp, SumOp, GatherOp, SummedLinearOp, HeadLinearOp, CountLayerOp>;

// The inputs of a step beside its activations.
struct ProgramStep {
    long num_tokens;
    const std::int64_t *positions, *slots;
    const std::int32_t *block_tables, *query_starts, *context_lens, *seen_ends;
    long table_stride, num_seqs;
    const std::int32_t *read, *committed, *write, *commit_to, *snapshots;  // as in DeltaNet; null: no layer has states
};

// The ops and the caches that they use, kept between the steps.
template <typename T>
class Program {
public:
    Program(std::vector<ProgramOp> ops, std::vector<Buffer> buffers) : ops_(std::move(ops)), buffers_(std::move(buffers)) {}

    void use_caches(std::vector<LayerCache> caches, const std::vector<std::uintptr_t>& states, long block_size) {
        caches_ = std::move(caches), states_ = states, block_size_ = block_size;
    }

    // Time each op of the runs to come; the sums in seconds, once that is over. Between two runs, like these.
    void start_timing() { seconds_.assign(ops_.size(), 0.0), is_timed_ = true; }
    std::vector<double> stop_timing() {
        is_timed_ = false;
        return std::move(seconds_);
    }

    // `externals`: addresses of the external activations, in the order of the buffers.
    void run(const ProgramStep& step, const std::vector<T*>& externals, const StepAdapters<T>* adapters = nullptr) const;

private:
    std::vector<ProgramOp> ops_;
    std::vector<Buffer> buffers_;
    std::vector<LayerCache> caches_;
    std::vector<std::uintptr_t> states_;
    long block_size_ = 0;
    bool is_timed_ = false;
    mutable std::vector<double> seconds_;

    class Run;
};

}  // namespace quire
