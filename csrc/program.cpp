#include "program.hpp"

#include <chrono>

#include "aligned.hpp"
#include "thread_pool.hpp"

namespace quire {
namespace {

constexpr long TOKENS_AT_ONCE = 8;  // tokens for which a thread normalizes or scales the heads

template <template <typename> class Kernel, typename T>
void call(const ForBoth<Kernel>& kernel, const Kernel<T>& arguments) {
    if constexpr (sizeof(T) == sizeof(bf16))
        kernel.bf16(arguments);
    else
        kernel.float32(arguments);
}

template <typename T>
void call_norm(const NormWeights& norm, const T* x, long x_stride, const T* residual, T* summed, T* out, long num_rows, long width) {
    call(norm.is_layer_norm ? chosen->layer_norm : chosen->rms_norm,
         Norm<T>{x, residual, summed, out, num_rows, x_stride, static_cast<const T*>(norm.weight),
                 static_cast<const T*>(norm.bias), width, norm.eps, norm.is_wide, norm.offset, norm.num_heads});
}

}  // namespace

// One run: where each activation is, and each op's call of its kernel.
template <typename T>
class Program<T>::Run {
public:
    Run(const Program& program, const ProgramStep& step, const std::vector<T*>& externals, const StepAdapters<T>* adapters)
        : program_(program), step_(step), adapters_(adapters), rows_(program.buffers_.size()) {
        static thread_local ISA::Aligned<T> memory;  // kept from step to step
        const auto size = [&](const Buffer& buffer) {
            const bool is_scratch = buffer.base < 0 && !buffer.is_external;
            return is_scratch ? rounded_up(step.num_tokens * buffer.width, 64 / sizeof(T)) : 0;  // whole cache lines
        };
        long total = 0;
        for (const Buffer& buffer : program.buffers_) total += size(buffer);
        T* scratch = memory.at_least(total);
        auto external = externals.begin();
        for (std::size_t i = 0; i < rows_.size(); i++) {
            const Buffer& buffer = program.buffers_[i];
            if (buffer.base >= 0) {  // the base comes before its views
                rows_[i] = {rows_[buffer.base].at + buffer.offset, rows_[buffer.base].stride};
                continue;
            }
            rows_[i] = {buffer.is_external ? *external++ : scratch, buffer.width};
            scratch += size(buffer);
        }
    }

    void operator()(const NormOp& op) const {
        const T* residual = op.residual < 0 ? nullptr : at(op.residual);
        T* summed = op.summed < 0 ? nullptr : at(op.summed);
        call_norm<T>(op.norm, at(op.x), stride(op.x), residual, summed, at(op.out), step_.num_tokens, program_.buffers_[op.x].width);
    }

    void operator()(const LinearOp& op) const {
        multiply(multiplied(op.layer, op.x, at(op.out), stride(op.out), IS_FLOAT), op.number);
    }

    void operator()(const SummedLinearOp& op) const {
        static thread_local ISA::Aligned<float> memory;  // kept from step to step
        const long width = op.layer.out_features;
        float* own = memory.at_least(step_.num_tokens * width);
        multiply(multiplied(op.layer, op.x, own, width, true), op.number);
        op.exchange(own, at(op.out), step_.num_tokens, IS_FLOAT);
    }

    void operator()(const ExpertsOp& op) const {
        const long scored = op.scored < 0 ? op.x : op.scored;
        call(chosen->experts, Experts<T>{at(op.x), step_.num_tokens, stride(op.x), at(scored), stride(scored), at(op.out), stride(op.out), op.weights});
    }

    void operator()(const QKNormOp& op) const {
        share_range(step_.num_tokens, TOKENS_AT_ONCE, [&](long begin, long end) {
            for (long token = begin; token < end; token++) {
                normalize(op.query_norm, op.query, op.query, token, op.num_query_rows, op.query_width);
                normalize(op.key_norm, op.key, op.key, token, op.num_key_rows, op.key_width);
            }
        });
    }

    void operator()(const HeadNormOp& op) const {
        share_range(step_.num_tokens, TOKENS_AT_ONCE, [&](long begin, long end) {
            for (long token = begin; token < end; token++) normalize(op.norm, op.x, op.out, token, op.num_rows, op.width);
        });
    }

    void operator()(const RotaryWriteOp& op) const {
        const long key = op.key < 0 ? op.query : op.key, value = op.value < 0 ? key : op.value;
        const std::int64_t* slots = op.key < 0 ? nullptr : step_.slots;
        call(chosen->kv_write,
             KVWrite<T>{op.rotary, at(op.query), stride(op.query), at(key), at(value), stride(key), stride(value),
                        step_.positions, slots, program_.caches_[op.layer], step_.num_tokens, program_.block_size_});
    }

    void operator()(const AttentionOp& op) const {
        call(chosen->attention,
             Attention<T>{op.attention, at(op.query), stride(op.query), program_.caches_[op.layer], at(op.out), stride(op.out),
                          step_.block_tables, step_.query_starts, step_.context_lens, step_.seen_ends, step_.table_stride,
                          step_.num_seqs, program_.block_size_});
    }

    void operator()(const ShortConvOp& op) const {
        call(chosen->short_conv,
             ShortConv<T>{at(op.x), stride(op.x), at(op.out), stride(op.out), op.weight, op.bias, op.taps,
                          program_.buffers_[op.out].width, static_cast<T*>(program_.caches_[op.layer].keys), op.length, step_.positions,
                          step_.slots, step_.block_tables, step_.query_starts, step_.table_stride, step_.num_seqs, program_.block_size_});
    }

    void operator()(const DeltaNetOp& op) const {
        call(chosen->delta_net,
             DeltaNet<T>{op.weights, at(op.x), stride(op.x), at(op.gates), stride(op.gates), at(op.shares), stride(op.shares),
                         at(op.decays), stride(op.decays), at(op.out), stride(op.out), reinterpret_cast<void*>(program_.states_[op.layer]),
                         step_.context_lens, step_.query_starts, step_.read, step_.committed, step_.write, step_.commit_to,
                         step_.snapshots, step_.num_seqs});
    }

    void operator()(const MambaOp& op) const {
        call(chosen->mamba,
             Mamba<T>{op.weights, at(op.x), stride(op.x), at(op.out), stride(op.out), reinterpret_cast<void*>(program_.states_[op.layer]),
                      step_.context_lens, step_.query_starts, step_.read, step_.committed, step_.write, step_.commit_to, step_.snapshots,
                      step_.num_seqs});
    }

    void operator()(const GateOp& op) const {
        const long width = program_.buffers_[op.x].width;
        call(chosen->gate, Gate<T>{at(op.x), stride(op.x), at(op.gate), stride(op.gate), step_.num_tokens, width, op.is_sigmoid});
    }

    void operator()(const PositionScaleOp& op) const {
        const long width = program_.buffers_[op.x].width;
        share_range(step_.num_tokens, TOKENS_AT_ONCE, [&](long begin, long end) {
            for (long token = begin; token < end; token++) {
                T* row = at(op.x) + token * stride(op.x);
                call(chosen->sum, Sum<T>{row, nullptr, row, width, op.factors[step_.positions[token]]});
            }
        });
    }

    void operator()(const SumOp& op) const {
        call(chosen->sum, Sum<T>{at(op.x), op.y < 0 ? nullptr : at(op.y), at(op.out), step_.num_tokens * stride(op.x), op.factor, op.limit});
    }

    void operator()(const GatherOp& op) const {
        op.exchange(at(op.x), at(op.out), step_.num_tokens, sizeof(T));
    }

    void operator()(const HeadLinearOp& op) const {
        call(chosen->head_linear, HeadLinear<T>{at(op.x), step_.num_tokens, stride(op.x), at(op.out), stride(op.out), op.passed, op.heads});
    }

    void operator()(const CountLayerOp& op) const { *op.progress = *op.progress + 1; }

private:
    struct Rows {
        T* at;
        long stride;
    };
    const Program& program_;
    const ProgramStep& step_;
    const StepAdapters<T>* adapters_;  // null: no row has one
    std::vector<Rows> rows_;

    static constexpr bool IS_FLOAT = sizeof(T) == sizeof(float);

    // The norm of a token's rows.
    void normalize(const NormWeights& norm, long x, long out, long token, long num_rows, long width) const {
        const T* rows = at(x) + token * stride(x);
        call_norm<T>(norm, rows, width, nullptr, nullptr, at(out) + token * stride(out), num_rows, width);
    }
    void multiply(const Linear<T>& linear, long number) const {
        if (adapters_) return adapters_->linear(linear, number);
        call(chosen->linear, linear);
    }
    Linear<T> multiplied(const LinearWeights& layer, long x, void* out, long out_stride, bool out_is_float) const {
        return {at(x), step_.num_tokens, layer.in_features, stride(x), static_cast<const T*>(layer.packed), layer.out_features,
                layer.bias, out, out_stride, out_is_float, layer.activation, layer.format, layer.quantization};
    }
    T* at(long index) const { return rows_[index].at; }
    long stride(long index) const { return rows_[index].stride; }
};

template <typename T>
void Program<T>::run(const ProgramStep& step, const std::vector<T*>& externals, const StepAdapters<T>* adapters) const {
    const Run run(*this, step, externals, adapters);
    if (!is_timed_) {
        for (const ProgramOp& op : ops_) std::visit(run, op);
        return;
    }
    auto begun = std::chrono::steady_clock::now();
    for (std::size_t i = 0; i < ops_.size(); i++) {
        std::visit(run, ops_[i]);
        const auto ended = std::chrono::steady_clock::now();
        seconds_[i] += std::chrono::duration<double>(ended - begun).count();
        begun = ended;
    }
}

template class Program<bf16>;
template class Program<float>;

}  // namespace quire
