// Sampling ops, all of them row by row: a row's answer depends on its logits and settings alone.
#pragma once

#include <cstdint>

namespace quire {

// One token per row of logits, drawn by a uniform number in [0, 1); temperature 0, or no temperatures at all: the highest
// logit. logits: float32 [num_rows, vocab_size], rows `stride` elements apart. Everything else has one entry per row, as
// quire/kernels/reference/sampling.py says.
struct TokenChoice {
    const float* logits;
    long num_rows, vocab_size, stride;
    const float *temperatures, *log_min_ps;
    const std::int32_t* top_ks;
    const double *top_ps, *uniforms;
    std::int64_t* tokens;
};

// Masks of tokens: of some rows of logits, in place, minus infinity for every token that has no bit. Entry i edits row
// `rows[i]`; the bit of token t is bit t % 32 of word t / 32 of its `num_words` words, as many as the vocabulary needs or more.
struct TokenMasks {
    float* logits;
    long vocab_size, stride, num_entries;
    const std::int64_t* rows;
    const std::uint32_t* bits;
    long num_words;
};

// For some rows of logits, the logprob and the rank of one token and of the `counts[i]` most likely ones. ids, logprobs and
// ranks [num_rows, width]; entries past a row's 1 + counts[i] are left unchanged.
struct TopLogprobs {
    const float* logits;
    long vocab_size, stride, num_rows;
    const std::int64_t *rows, *tokens, *counts;  // [num_rows]
    long width;
    std::int64_t* ids;
    float* logprobs;
    std::int64_t* ranks;
};

// Penalties on the tokens that some rows of logits have seen, in place. Entry i edits row `logit_rows[i]`; its tokens are
// the first num_tokens[i] of row `token_rows[i]` of `token_ids`, of which num_prompt_tokens[i] are prompt.
struct Penalties {
    float* logits;
    long stride, vocab_size;
    const std::int32_t* token_ids;
    long token_stride, num_entries;
    const std::int64_t *logit_rows, *token_rows, *num_tokens, *num_prompt_tokens;
    const float *repetition, *presence, *frequency;
};

void penalize(const Penalties&);

// numbers[i] in [0, 1), of 53 bits: Philox4x32-10 (Salmon et al. 2011) with key seeds[i] and counter indices[i].
void draw_uniforms(const std::uint64_t* seeds, const std::int64_t* indices, long count, double* numbers);

}  // namespace quire
