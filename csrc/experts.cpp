// Mixtures of experts: rows sorted by expert, and the linear layers of the experts that are used as one work list.
//
// A piece of work is some strips of one expert's layer times the rows of that expert, computed by the kernel of linear
// layers, which finds all other threads at work and stays in its own. So one barrier, not one for each expert, is between
// scores, inner activations and results; experts without a row are not read. An expert with many rows is a linear layer of
// all threads. A row's results are added in the order of its scores, in float32, whatever rows are beside it. Ranks of tensor
// parallelism have the same choices, and exchange the inner activations of all experts at once, or add up their results.
#include <algorithm>
#include <cstring>
#include <limits>

#include "aligned.hpp"
#include "exp.hpp"
#include "linear_pieces.hpp"
#include "thread_pool.hpp"
#include "vec.hpp"

namespace quire::ISA {

namespace {

constexpr long SCRATCH_BYTES = 64 << 20;  // rows that are computed at once
constexpr long PIECE_BYTES = 1 << 19;     // weights that one row is multiplied with, some 40 us of reading
constexpr long TURNS = 16;                // pieces for each thread, if rows are few
constexpr long MANY_ROWS = 64;            // an expert with as many is computed by itself
constexpr float LEAST_SUM = 1e-20f;       // added to a sum of sigmoids, so that no weight is 0 / 0
constexpr long ROWS_AT_ONCE = 16;         // rows that a thread chooses experts for, gathers or adds up

// The numbers of the `num_chosen` greatest values, the greatest first: of equal ones the lower number. With values that are
// NaN numbers that exist.
void choose_greatest(const float* values, long count, long num_chosen, std::int32_t* ids) {
    long num_kept = 0;
    for (long i = 0; i < count; i++) {
        if (num_kept == num_chosen && !(values[i] > values[ids[num_kept - 1]])) continue;
        long at = num_kept < num_chosen ? num_kept++ : num_kept - 1;
        for (; at > 0 && values[i] > values[ids[at - 1]]; at--) ids[at] = ids[at - 1];
        ids[at] = static_cast<std::int32_t>(i);
    }
}

// Sums of exp(score - highest) in the order of the experts.
float sum_of_powers(const float* scores, long num_experts, float highest) {
    float sum = 0;
    for (long i = 0; i < num_experts; i += LANES) {
        const long count = std::min<long>(LANES, num_experts - i);
        const Floats powers = exp(load_some(scores + i, count) - splat(highest));
        for (long lane = 0; lane < count; lane++) sum += powers[lane];
    }
    return sum;
}

// Experts by their scores alone, weighted by a softmax.
void choose_by_score(const float* scores, long num_experts, const Routing& routing, std::int32_t* ids, float* weights) {
    choose_greatest(scores, num_experts, routing.num_chosen, ids);
    const float highest = scores[ids[0]];
    float sum = 0;
    for (long i = 0; i < routing.num_chosen; i++) sum += weights[i] = exp(splat(scores[ids[i]] - highest))[0];
    if (!routing.is_normalized) sum = sum_of_powers(scores, num_experts, highest);
    for (long i = 0; i < routing.num_chosen; i++) weights[i] /= sum;
}

// The shares of all experts: sigmoids of their scores, or their softmax.
void compute_shares(const float* scores, long num_experts, bool is_sigmoid, float* shares) {
    const float highest = is_sigmoid ? 0 : *std::max_element(scores, scores + num_experts);
    const float sum = is_sigmoid ? 0 : sum_of_powers(scores, num_experts, highest);
    for (long i = 0; i < num_experts; i += LANES) {
        const long count = std::min<long>(LANES, num_experts - i);
        const Floats values = load_some(scores + i, count);
        const Floats found = is_sigmoid ? splat(1.0f) / (exp(-values) + splat(1.0f)) : exp(values - splat(highest)) / splat(sum);
        store_some(shares + i, found, count);
    }
}

// The keys of experts outside of the groups with the greatest sums of their greatest keys become those of no choice.
void keep_best_groups(float* keys, long num_experts, const Routing& routing) {
    static thread_local Aligned<float> sum_memory;
    static thread_local Aligned<std::int32_t> id_memory;
    const long size = num_experts / routing.num_groups;
    float* sums = sum_memory.at_least(routing.num_groups);
    std::int32_t* ids = id_memory.at_least(routing.num_groups + routing.num_group_keys);
    for (long group = 0; group < routing.num_groups; group++) {
        const float* of_group = keys + group * size;
        const long num_keys = std::min(routing.num_group_keys, size);
        choose_greatest(of_group, size, num_keys, ids);
        sums[group] = of_group[ids[0]];
        for (long i = 1; i < num_keys; i++) sums[group] += of_group[ids[i]];
    }
    choose_greatest(sums, routing.num_groups, routing.num_kept_groups, ids);
    for (long group = 0; group < routing.num_groups; group++)
        if (std::find(ids, ids + routing.num_kept_groups, group) == ids + routing.num_kept_groups)
            std::fill_n(keys + group * size, size, -std::numeric_limits<float>::infinity());
}

// The experts of a row in their order, and their weights. Scores that are NaN give experts that exist, and weights that
// are NaN.
void choose(const float* scores, long num_experts, const Routing& routing, std::int32_t* ids, float* weights) {
    if (routing.is_by_score()) {
        choose_by_score(scores, num_experts, routing, ids, weights);
    } else {
        static thread_local Aligned<float> memory;
        float *shares = memory.at_least(2 * num_experts), *keys = shares + num_experts;
        compute_shares(scores, num_experts, routing.is_sigmoid, shares);
        for (long i = 0; i < num_experts; i++) keys[i] = routing.bias ? shares[i] + routing.bias[i] : shares[i];
        if (routing.num_groups > 1) keep_best_groups(keys, num_experts, routing);
        choose_greatest(keys, num_experts, routing.num_chosen, ids);
        float sum = 0;
        for (long i = 0; i < routing.num_chosen; i++) sum += weights[i] = shares[ids[i]];
        if (routing.is_normalized)
            for (long i = 0; i < routing.num_chosen; i++) weights[i] /= sum + LEAST_SUM;
    }
    if (routing.factor != 1)
        for (long i = 0; i < routing.num_chosen; i++) weights[i] *= routing.factor;
    if (routing.scales)
        for (long i = 0; i < routing.num_chosen; i++) weights[i] *= routing.scales[ids[i]];
}

// Some rows, through all steps.
template <typename T>
class SomeRows {
public:
    // partial: of ranks that add up their results, where this one's are stored, [rows of op, outputs]; else null.
    SomeRows(const Experts<T>& op, float* partial, long first, long num_rows)
        : weights_(op.weights), x_(op.x + first * op.x_stride), x_stride_(op.x_stride),
          scored_(op.scored + first * op.scored_stride), scored_stride_(op.scored_stride), out_(op.out + first * op.out_stride),
          out_stride_(op.out_stride), partial_(partial ? partial + first * op.out_stride : nullptr), num_rows_(num_rows),
          num_experts_(static_cast<long>(weights_.in.size())), width_(weights_.in.front().in_features),
          num_outputs_(weights_.out[0].out_features), num_places_(places_of(weights_)) {}

    static long places_of(const ExpertWeights& weights) { return weights.routing.num_chosen + weights.routing.has_shared; }

    void operator()() {
        static thread_local Memory memory;
        choose_experts(memory);
        sort_rows(memory);
        gather(memory);
        const InnerRows own = own_inner(), whole = whole_inner();
        T* computed = memory.inner.at_least(own.num_elements);
        float* results = memory.results.at_least(num_choices() * num_outputs_);
        multiply<false>([&](long expert) { return rows_of(expert); }, [&](long expert) { return computed + own.before(first_[expert]); });
        const T* inner = exchanged(computed, own, whole, memory);
        multiply<true>([&](long expert) { return LayerRows<T>{inner + whole.before(first_[expert]), count_[expert], weights_.out[expert].in_features}; },
                       [&](long expert) { return results + first_[expert] * num_outputs_; });
        add_up(results);
    }

private:
    struct Memory {
        Aligned<float> scores, shares, results;
        Aligned<std::int32_t> ids;
        Aligned<long> numbers;
        Aligned<T> gathered, inner, whole_inner;
    };
    const ExpertWeights& weights_;
    const T* x_;
    long x_stride_;
    const T* scored_;
    long scored_stride_;
    T* out_;
    long out_stride_;
    float* partial_;
    long num_rows_, num_experts_, width_, num_outputs_, num_places_;
    // Choices of all rows, [row][place]: experts and their shares, and each one's place among the rows in their order
    // by expert. The other way round: the row of each. Of the experts: their first one, how many, and those that are used, the
    // ones with most rows first.
    std::int32_t* ids_ = nullptr;
    float* shares_ = nullptr;
    long *sorted_ = nullptr, *row_of_ = nullptr, *first_ = nullptr, *count_ = nullptr, *used_ = nullptr;
    long num_used_ = 0;
    long* piece_ = nullptr;  // used experts: each one's first piece of work
    T* gathered_ = nullptr;

    long num_choices() const { return num_rows_ * num_places_; }

    // Inner activations of all experts in their order, a row for each choice; those of a shared expert, of another width, are
    // behind all others.
    struct InnerRows {
        long width, num_elements;
        long before(long num_rows) const { return num_rows * width; }
    };
    InnerRows inner_rows(long width, long shared_width) const {
        return {width, num_rows_ * (weights_.routing.num_chosen * width + (weights_.routing.has_shared ? shared_width : 0))};
    }
    InnerRows own_inner() const { return inner_rows(weights_.in.front().out_features, weights_.in.back().out_features); }
    InnerRows whole_inner() const { return inner_rows(weights_.out.front().in_features, weights_.out.back().in_features); }

    const T* exchanged(const T* computed, const InnerRows& own, const InnerRows& whole, Memory& memory) const {
        if (!weights_.routed_exchange.gather) return computed;
        T* inner = memory.whole_inner.at_least(whole.num_elements);
        const long num_routed = num_rows_ * weights_.routing.num_chosen;
        weights_.routed_exchange(computed, inner, num_routed, sizeof(T));
        if (weights_.routing.has_shared)
            weights_.shared_exchange(computed + own.before(num_routed), inner + whole.before(num_routed), num_rows_, sizeof(T));
        return inner;
    }

    void choose_experts(Memory& memory) {
        const Routing& routing = weights_.routing;
        const long num_scores = weights_.router.out_features, num_routed = num_experts_ - routing.has_shared;
        float* scores = memory.scores.at_least(num_rows_ * num_scores);
        compute_outputs(weights_.router, LayerRows<T>{scored_, num_rows_, scored_stride_}, 0, num_scores, scores, num_scores, true);
        ids_ = memory.ids.at_least(num_choices());
        shares_ = memory.shares.at_least(num_choices());
        share_range(num_rows_, ROWS_AT_ONCE, [&](long begin, long end) {
            for (long row = begin; row < end; row++) {
                const float* of_row = scores + row * num_scores;
                std::int32_t* ids = ids_ + row * num_places_;
                float* shares = shares_ + row * num_places_;
                choose(of_row, num_routed, routing, ids, shares);
                if (!routing.has_shared) continue;
                ids[routing.num_chosen] = static_cast<std::int32_t>(num_routed);
                shares[routing.num_chosen] = routing.is_shared_scored ? (splat(1.0f) / (exp(-splat(of_row[num_routed])) + splat(1.0f)))[0] : 1.0f;
            }
        });
    }

    // Counting sort: the rows of an expert stay in their order.
    void sort_rows(Memory& memory) {
        long* numbers = memory.numbers.at_least(2 * num_choices() + 4 * num_experts_ + 1);
        for (long** each : {&first_, &count_, &used_}) *each = numbers, numbers += num_experts_;
        piece_ = numbers, numbers += num_experts_ + 1;
        sorted_ = numbers, row_of_ = numbers + num_choices();
        std::fill(count_, count_ + num_experts_, 0);
        for (long i = 0; i < num_choices(); i++) count_[ids_[i]]++;
        num_used_ = 0;
        for (long expert = 0, sum = 0; expert < num_experts_; expert++) {
            first_[expert] = sum, sum += count_[expert];
            if (count_[expert] == 0) continue;
            long at = num_used_++;
            for (; at > 0 && count_[expert] > count_[used_[at - 1]]; at--) used_[at] = used_[at - 1];
            used_[at] = expert;
        }
        for (long i = 0; i < num_choices(); i++) {
            const long at = first_[ids_[i]]++;
            sorted_[i] = at, row_of_[at] = i / num_places_;
        }
        for (long expert = 0; expert < num_experts_; expert++) first_[expert] -= count_[expert];
    }

    // Whether the rows of an expert are neighbours in x.
    bool is_run(long expert) const {
        const long first = first_[expert], last = first + count_[expert] - 1;
        return row_of_[last] - row_of_[first] == last - first;
    }

    void gather(Memory& memory) {
        const bool are_runs = std::all_of(used_, used_ + num_used_, [&](long expert) { return is_run(expert); });
        gathered_ = are_runs ? nullptr : memory.gathered.at_least(num_choices() * width_);
        if (are_runs) return;
        share_range(num_used_, 1, [&](long begin, long end) {
            for (long i = begin; i < end; i++) {
                const long expert = used_[i], first = first_[expert];
                for (long at = first; !is_run(expert) && at < first + count_[expert]; at++)
                    std::memcpy(gathered_ + at * width_, x_ + row_of_[at] * x_stride_, width_ * sizeof(T));
            }
        });
    }

    LayerRows<T> rows_of(long expert) const {
        if (is_run(expert)) return {x_ + row_of_[first_[expert]] * x_stride_, count_[expert], x_stride_};
        return {gathered_ + first_[expert] * width_, count_[expert], width_};
    }

    // One layer of all used experts, the one back or the one in. `rows` and `out` of an expert.
    template <bool is_back, typename RowsOf, typename OutOf>
    void multiply(RowsOf&& rows, OutOf&& out) {
        const std::vector<LinearWeights>& layers = is_back ? weights_.out : weights_.in;
        const auto outputs = [&](long expert, long first, long end) {
            compute_outputs(layers[expert], rows(expert), first, end, out(expert), layers[expert].out_features, is_back);
        };
        long next = 0;
        for (; next < num_used_ && count_[used_[next]] >= MANY_ROWS; next++)
            outputs(used_[next], 0, layers[used_[next]].out_features);
        const long num_small = num_used_ - next;
        piece_[0] = 0;
        for (long i = 0; i < num_small; i++) piece_[i + 1] = piece_[i] + num_pieces(layers[used_[next + i]], count_[used_[next + i]], num_small);
        share(piece_[num_small], [&](Chunks& chunks) {
            for (long piece; (piece = chunks.take()) < chunks.count();) {
                const long* border_behind = std::partition_point(piece_, piece_ + num_small + 1, [&](long first) { return first <= piece; });
                const long i = border_behind - piece_ - 1, expert = used_[next + i];
                const long number = piece - piece_[i], count = piece_[i + 1] - piece_[i];
                const long out_features = layers[expert].out_features, steps = (out_features + PIECE_STEP - 1) / PIECE_STEP;
                const auto border = [&](long n) { return std::min(steps * n / count * PIECE_STEP, out_features); };
                outputs(expert, border(number), border(number + 1));
            }
        });
    }

    // Enough for every thread to have several; but rounding or widening an expert's rows, which each piece does again, is to
    // be little beside the products.
    static long num_pieces(const LinearWeights& layer, long num_rows, long num_experts) {
        const long threads = num_threads(), steps = (layer.out_features + PIECE_STEP - 1) / PIECE_STEP;
        if (threads == 1) return 1;
        const long bytes = num_strips(layer.out_features) * (is_gated(layer.activation) ? 2 : 1) * strip_bytes<T>(layer);
        const long wanted = std::max((TURNS * threads + num_experts - 1) / num_experts, bytes / (PIECE_BYTES * num_rows));
        return std::clamp(wanted, 1L, steps);
    }

    void add_up(const float* results) const {
        share_range(num_rows_, ROWS_AT_ONCE, [&](long begin, long end) {
            for (long row = begin; row < end; row++)
                for (long i = 0; i < num_outputs_; i += LANES) {
                    const long count = std::min<long>(LANES, num_outputs_ - i);
                    Floats sum = {};
                    for (long place = row * num_places_; place < (row + 1) * num_places_; place++)
                        sum += load_some(results + sorted_[place] * num_outputs_ + i, count) * splat(shares_[place]);
                    if (partial_)
                        store_some(partial_ + row * out_stride_ + i, sum, count);
                    else
                        store_some(out_ + row * out_stride_ + i, sum, count);
                }
        });
    }
};

}  // namespace

template <typename T>
void experts(const Experts<T>& op) {
    const ExpertWeights& weights = op.weights;
    // Ranks that exchange inner columns are to take the same rows at once, so the sizes are those of all ranks.
    const long widest = std::max(weights.out.front().in_features, weights.out.back().in_features);
    const long place_bytes = weights.in.front().in_features * static_cast<long>(sizeof(T) + sizeof(float)) + widest * static_cast<long>(sizeof(T));
    const long at_once = std::max(1L, SCRATCH_BYTES / (place_bytes * SomeRows<T>::places_of(weights)));
    static thread_local Aligned<float> memory;
    float* partial = weights.result_exchange.sum ? memory.at_least(op.num_rows * op.out_stride) : nullptr;
    for (long first = 0; first < op.num_rows; first += at_once)
        SomeRows<T>(op, partial, first, std::min(at_once, op.num_rows - first))();
    if (weights.result_exchange.sum) weights.result_exchange(partial, op.out, op.num_rows, sizeof(T) == sizeof(float));
}

template void experts(const Experts<bf16>&);
template void experts(const Experts<float>&);

}  // namespace quire::ISA
