// One token per row of logits, and logprobs: a row is one thread's, and nothing sorts it.
//
// Greedy: one pass over the row, at the speed of memory. Drawn: a second pass for the weights, which stay in the
// second-level cache (a vocabulary of 151,936 is 608 KB), and a search in the sums of their blocks. top_k needs no weights but
// those of the k: tokens that reach a bound from the first pass, then the k of them. top_p needs the sum of all weights;
// tokens below half of what would be dropped if all weighed the same are out, and among the rest the sum is followed from
// the top. Bytes moved: the logits once from memory, if a row fits into the cache.
#include <cmath>

#include "thread_pool.hpp"
#include "ranking.hpp"
#include "sampling_softmax.hpp"

namespace quire::ISA {
namespace {

struct Scratch {
    BlockMaxima maxima;
    Weights weights, kept_weights;
    Candidates reached, kept;
    PrefixSearch search;
    Aligned<std::uint64_t> order;
};

Scratch& scratch() {
    static thread_local Scratch of_thread;
    return of_thread;
}

// Tokens that reach a bound, up to a place in the order.
void keep_up_to(Place last, const Candidates& reached, Candidates& kept, bool with_weights) {
    kept.begin(reached.count);
    for (long i = 0; i < reached.count; i += LANES) {
        const long left = reached.count - i;
        const Integers keys = load_some_keys(reached.keys.data() + i, left), ids = load_some_keys(reached.ids.data() + i, left);
        const Mask mask = lanes_where(last.holds(keys, ids)) & first_lanes(left);
        if (with_weights)
            kept.append(keys, ids, load_some(reached.weights.data() + i, left), mask);
        else
            kept.append(keys, ids, mask);
    }
}

// The first `num` tokens of the row scanned, into `kept`.
void keep_first(long num, Scratch& s) {
    s.maxima.collect(s.maxima.bound(num), s.reached);
    keep_up_to(s.search.last_of(s.reached, Measure::tokens, static_cast<double>(num)), s.reached, s.kept, false);
}

// Draw from the fewest tokens of `from`, in order, whose weights come to `limit`.
long draw_up_to(double limit, const Candidates& from, Candidates& kept, double uniform, Scratch& s) {
    keep_up_to(s.search.last_of(from, Measure::weights, limit), from, kept, true);
    s.kept_weights.of(kept.weights.data(), kept.count);
    return kept.ids.data()[s.kept_weights.draw(uniform)];
}

long draw_top_k(long top_k, double top_p, double uniform, const Scale& scale, Scratch& s) {
    keep_first(top_k, s);
    Candidates& first = s.kept;
    const std::int32_t* keys = first.keys.data();
    s.weights.of(first.count, scale, [=](long i) { return logits_of(load_keys(keys + i)); });
    if (top_p >= 1) return first.ids.data()[s.weights.draw(uniform)];
    std::copy(s.weights.values(), s.weights.values() + first.count, first.weights.data());
    return draw_up_to(top_p * s.weights.total(), first, s.reached, uniform, s);
}

// A prefix of the order that drops less than (1 - top_p) * total holds what top_p keeps. Were the last token kept below
// `bound`, it and all after it would weigh less than vocab_size * bound, but they weigh more than that. Half: for rounding.
long draw_top_p(const float* row, long vocab_size, double top_p, double uniform, Scratch& s) {
    const double total = s.weights.total();
    const Floats bound = splat(std::max(static_cast<float>(0.5 * (1 - top_p) * total / vocab_size), 1e-38f));
    const float* weights = s.weights.values();
    s.reached.begin(vocab_size);
    for (long i = 0; i < vocab_size; i += LANES) {
        const Floats lanes = load(weights + i);
        const Mask mask = lanes_where((Integers)(lanes >= bound));
        if (!mask) continue;
        s.reached.append(keys_of(load_some(row + i, vocab_size - i)), LANE_NUMBERS + static_cast<std::int32_t>(i), lanes, mask);
    }
    return draw_up_to(top_p * total, s.reached, s.kept, uniform, s);
}

long choose(const TokenChoice& op, long index, Scratch& s) {
    const float* row = op.logits + index * op.stride;
    const long vocab_size = op.vocab_size;
    s.maxima.of(row, vocab_size);
    if (!op.temperatures || op.temperatures[index] == 0 || !s.maxima.has_distribution()) return s.maxima.argmax();
    const Scale scale(s.maxima.highest(), op.temperatures[index], op.log_min_ps[index]);
    const double top_p = op.top_ps[index], uniform = op.uniforms[index];
    if (op.top_ks[index] < vocab_size) return draw_top_k(op.top_ks[index], top_p, uniform, scale, s);
    s.weights.of(vocab_size, scale, [=](long i) { return load_some(row + i, vocab_size - i); });
    return top_p < 1 ? draw_top_p(row, vocab_size, top_p, uniform, s) : s.weights.draw(uniform);
}

// The first `num` tokens of the row scanned, in order.
void rank_first(long num, Scratch& s, std::int64_t* ids) {
    if (num == 0) return;
    keep_first(num, s);
    std::uint64_t* order = s.order.at_least(num);
    for (long i = 0; i < num; i++) order[i] = order_of(s.kept.keys.data()[i], s.kept.ids.data()[i]);
    std::sort(order, order + num);
    for (long i = 0; i < num; i++) ids[i] = static_cast<std::uint32_t>(order[i]);
}

void record(const TopLogprobs& op, long entry, Scratch& s) {
    const float* row = op.logits + op.rows[entry] * op.stride;
    const long vocab_size = op.vocab_size, num = op.counts[entry];
    std::int64_t *ids = op.ids + entry * op.width, *ranks = op.ranks + entry * op.width;
    s.maxima.of(row, vocab_size);
    ids[0] = op.tokens[entry];
    ranks[0] = s.maxima.rank(ids[0]);
    rank_first(num, s, ids + 1);
    for (long i = 1; i <= num; i++) ranks[i] = i;
    s.weights.of(vocab_size, Scale(s.maxima.highest()), [=](long i) { return load_some(row + i, vocab_size - i); });
    const double highest = s.maxima.highest(), log_total = std::log(s.weights.total());
    for (long i = 0; i <= num; i++)
        op.logprobs[entry * op.width + i] =
            s.maxima.has_distribution() ? static_cast<float>((row[ids[i]] - highest) - log_total) : __builtin_nanf("");
}

void mask(const TokenMasks& op, long entry) {
    const std::uint32_t* words = op.bits + entry * op.num_words;
    float* row = op.logits + op.rows[entry] * op.stride;
    const Words forbidden = (Words)splat(-__builtin_inff()), numbers = (Words)LANE_NUMBERS;
    for (long i = 0; i < op.vocab_size; i += LANES) {
        const std::uint32_t bits = words[i / 32] >> (i % 32) & 0xffffu;
        if (bits == 0xffffu) continue;
        Words lanes = forbidden;
        if (bits) {
            const Words is_allowed = 0u - ((bits >> numbers) & 1u);
            lanes = ((Words)load_some(row + i, op.vocab_size - i) & is_allowed) | (forbidden & ~is_allowed);
        }
        store_some(row + i, (Floats)lanes, op.vocab_size - i);
    }
}

}  // namespace

void choose_tokens(const TokenChoice& op) {
    share_range(op.num_rows, 1, [&](long begin, long end) {
        for (long row = begin; row < end; row++) op.tokens[row] = choose(op, row, scratch());
    });
}

void mask_logits(const TokenMasks& op) {
    share_range(op.num_entries, 1, [&](long begin, long end) {
        for (long entry = begin; entry < end; entry++) mask(op, entry);
    });
}

void top_logprobs(const TopLogprobs& op) {
    share_range(op.num_rows, 1, [&](long begin, long end) {
        for (long entry = begin; entry < end; entry++) record(op, entry, scratch());
    });
}

}  // namespace quire::ISA
