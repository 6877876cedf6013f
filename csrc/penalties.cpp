// Penalties change a few logits of a row, each once, however often its token occurs.
#include <vector>

#include "thread_pool.hpp"
#include "sampling.hpp"

namespace quire {
namespace {

// Occurrences of each token of a vocabulary in an output. Between rows all counts are 0, so a row clears only its own.
class Counts {
public:
    void edit(const Penalties& op, long entry) {
        if (static_cast<long>(counts_.size()) < op.vocab_size) counts_.resize(op.vocab_size);
        const std::int32_t* tokens = op.token_ids + op.token_rows[entry] * op.token_stride;
        const long num_tokens = op.num_tokens[entry];
        float* logits = op.logits + op.logit_rows[entry] * op.stride;
        for (long i = op.num_prompt_tokens[entry]; i < num_tokens; i++) counts_[tokens[i]]++;
        for (long i = 0; i < num_tokens; i++) {
            std::int32_t& count = counts_[tokens[i]];
            if (count == DONE) continue;
            const float times = static_cast<float>(count), once = count ? 1.0f : 0.0f;
            float& logit = logits[tokens[i]];
            logit = logit > 0 ? logit / op.repetition[entry] : logit * op.repetition[entry];
            logit = logit - op.frequency[entry] * times - op.presence[entry] * once;
            count = DONE;
        }
        for (long i = 0; i < num_tokens; i++) counts_[tokens[i]] = 0;
    }

private:
    static constexpr std::int32_t DONE = -1;
    std::vector<std::int32_t> counts_;
};

}  // namespace

void penalize(const Penalties& op) {
    share_range(op.num_entries, 1, [&](long begin, long end) {
        static thread_local Counts counts;
        for (long entry = begin; entry < end; entry++) counts.edit(op, entry);
    });
}

}  // namespace quire
