"""Grammars of rows, driven by tests: a model's tokenizer, rows that start in plans, masks as sets of tokens."""

from collections.abc import Sequence
from concurrent.futures import wait
from pathlib import Path

import numpy as np

from quire.core.plan import NewRow, RowDrafts, StepPlan
from quire.core.sampling_params import SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.grammars.compiler import GrammarCache
from quire.decoding.grammars.constrained import TokenizerText, read_vocabulary
from quire.decoding.grammars.rows import GrammarRows, StepMasks
from quire.text.tokenizer import Tokenizer


def tokenizer_text(tokenizer: Tokenizer) -> TokenizerText:
    text = tokenizer.exact_json()
    assert text is not None
    return TokenizerText(text, tokenizer.vocab_size, tokenizer.eos_token_id)


class Vocabulary:
    """A tokenizer, and caches of grammars over it; `num_more` tokens are the model's alone."""

    def __init__(self, folder: Path, num_more: int = 0) -> None:
        self.tokenizer = Tokenizer.from_folder(folder)
        self.vocab_size = self.tokenizer.vocab_size + num_more
        assert self.tokenizer.eos_token_id is not None
        self.eos = self.tokenizer.eos_token_id
        self.library = read_vocabulary(tokenizer_text(self.tokenizer), self.vocab_size, frozenset())

    def cache(self) -> GrammarCache:
        return GrammarCache(lambda: self.library)

    def rows(self, *, jumps_forward: bool = True, cache: GrammarCache | None = None) -> GrammarRows:
        return GrammarRows(cache or self.cache(), self.vocab_size, jumps_forward=jumps_forward)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def text(self, token_ids: Sequence[int]) -> str:
        return self.tokenizer.decode(token_ids)


def new_row(
    row: int, constraint: StructuredOutputsParams | None, output: Sequence[int] = (), *, logprobs: int | None = None
) -> NewRow:
    """A row with a prompt of two tokens and some output."""
    params = SamplingParams(max_tokens=1000, structured_outputs=constraint, logprobs=logprobs)
    return NewRow(row, [5, 6, *output], 2, [], params, seed=row)


def start(
    rows: GrammarRows, outputs: dict[int, list[int]], drafts: dict[int, list[int]] | None = None, *, waits: bool = True
) -> StepMasks:
    """Start a step that samples behind the outputs of some rows, and behind each of their drafts; fill its masks."""
    drafts = drafts or {}
    known = np.zeros((8, 500), np.int32)
    sampled, num_tokens = list[int](), list[int]()
    for row, output in outputs.items():
        tokens = [5, 6, *output, *drafts.get(row, [])]
        known[row, : len(tokens)] = tokens
        for place in range(1 + len(drafts.get(row, []))):
            sampled.append(row)
            num_tokens.append(2 + len(output) + place)
    planned = [RowDrafts(row, 2 + len(outputs[row]), own) for row, own in drafts.items()]
    step = rows.start_step(np.array(sampled), np.array(num_tokens), known, planned, np.array(list(outputs)))
    assert step is not None
    if waits:
        wait(step._filling)
        step.finish_masks()
    return step


def begin(rows: GrammarRows, *new_rows: NewRow) -> None:
    rows.apply(StepPlan(new_rows=list(new_rows)))


def allowed(step: StepMasks, vocab_size: int) -> dict[int, frozenset[int]]:
    """The tokens that each mask allows, by sample."""
    masks = step.masks()
    bits = np.unpackbits(masks.bits.view(np.uint8), axis=1, bitorder="little")
    assert all(own.all() or not own[vocab_size:].any() for own in bits), "tokens that the model does not have"
    return {
        sample: frozenset(np.flatnonzero(own[:vocab_size]).tolist())
        for sample, own in zip(masks.samples.tolist(), bits, strict=True)
    }
