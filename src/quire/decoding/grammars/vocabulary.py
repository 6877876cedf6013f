"""Vocabulary of grammars: llguidance's form of a model's tokenizer, with masks as wide as the model's output."""

from typing import NamedTuple

from llguidance import LLTokenizer


class TokenizerText(NamedTuple):
    """A tokenizer that spells every text exactly: its tokenizer.json, the number of its tokens, its end of sequence."""

    json: str
    vocab_size: int
    eos_token_id: int | None = None


def read_vocabulary(text: TokenizerText, vocab_size: int, eos_token_ids: frozenset[int]) -> LLTokenizer:
    """Return the tokenizer for a model with `vocab_size` tokens; those that the tokenizer has not are never allowed.

    `eos_token_ids`, the model's, may end an output that is complete, as may the tokenizer's own. ValueError for a
    tokenizer that llguidance cannot use. Holds the interpreter lock: 1.2 s for 151,646 tokens.
    """
    ends = eos_token_ids if text.eos_token_id is None else eos_token_ids | {text.eos_token_id}
    known = sorted(token for token in ends if token < text.vocab_size)
    return LLTokenizer(text.json, n_vocab=max(vocab_size, text.vocab_size), eos_token=known or None)
