"""Drafts of heads in tests: recorded, counted, always as long as they can be, and read from wrong places.

Test modules import the fixtures.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from quire import LLM, SamplingParams
from quire.decoding.sampler import SamplingBatch
from quire.execution.batch import IntArray, StepInputs
from quire.execution.drafter import DraftRows
from quire.execution.drafting import draft_model as module
from quire.execution.drafting.draft_model import HeadDrafter, Spans
from quire.execution.drafting.drafters import AdaptiveLength
from quire.kernels.tensors import floats
from quire.model.language_model import ForwardBatch
from support.answers import Answer, answers_of
from support.every_way import VOCAB_SIZE

Drafts = dict[tuple[int, ...], list[int]]


@pytest.fixture
def no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Raise the errors of drafters, which are logged elsewhere."""

    def fail(*_: object) -> None:
        raise  # noqa: PLE0704 (in an except block of the drafter)

    monkeypatch.setattr(module.log, "exception", fail)


@pytest.fixture
def as_many_as_possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draft as many tokens as there can be, whatever they cost."""
    monkeypatch.setattr(AdaptiveLength, "limits", lambda _self, _rows, longest, _num_rows: longest)


@pytest.fixture
def drafts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Drafts]:
    """Record the likeliest drafts behind known tokens: of equal tokens they must be equal, whatever was before."""
    found, draft = Drafts(), HeadDrafter.draft

    def choose(samples: SamplingBatch, logits: Tensor, ops: object) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        values = floats(logits)
        return values.argmax(axis=1), np.isfinite(values.max(axis=1))

    def recorded(
        model: HeadDrafter, rows: DraftRows, limits: IntArray, step: StepInputs
    ) -> Mapping[int, Sequence[int]]:
        own = draft(model, rows, limits, step)
        for row, num_tokens in zip(rows.rows.tolist(), rows.num_tokens.tolist(), strict=True):
            if row in own:
                known = tuple(model._batch.token_ids[row, :num_tokens].tolist())
                other = found.setdefault(known, list(own[row]))
                count = min(len(other), len(own[row]))
                assert list(own[row])[:count] == other[:count], f"other drafts behind {len(known)} tokens"
                if len(own[row]) > len(other):
                    found[known] = list(own[row])
        return own

    monkeypatch.setattr(module, "choose_drafts", choose)
    monkeypatch.setattr(HeadDrafter, "draft", recorded)
    yield found
    assert found, "nothing was drafted"


def answers(
    model: Path, params: Sequence[SamplingParams], prompts: Sequence[Sequence[int]], **settings: Any  # noqa: ANN401
) -> list[list[Answer]]:
    """Return the answers to prompts, twice: the second time they are prefix hits."""
    with LLM(model, **{"max_model_len": 160, "block_size": 8, "max_num_batched_tokens": 23} | settings) as llm:
        found = [
            answers_of(output)
            for _ in range(2)
            for output in llm.generate([list(each) for each in prompts], list(params), use_tqdm=False)
        ]
        assert llm.kv_stats().used_blocks == 0
    return found


# --- oracles ----------------------------------------------------------------------------------------------------------


def following(token: int) -> int:
    """Return the token behind a token: a permutation of all in one cycle."""
    return (token + 37) % VOCAB_SIZE


class Acceptance:
    """Counts of verified and accepted drafts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_drafted = self.num_accepted = 0

        def counted(_: AdaptiveLength, row: int, num_drafts: int, num_accepted: int) -> None:
            self.num_drafted += num_drafts
            self.num_accepted += num_accepted

        monkeypatch.setattr(AdaptiveLength, "record", counted)


@pytest.fixture
def acceptance(monkeypatch: pytest.MonkeyPatch) -> Acceptance:
    return Acceptance(monkeypatch)


def ask_oracle(folder: Path, **settings: Any) -> None:  # noqa: ANN401
    rng = random.Random(7)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(40)]
    prompts = [[*shared[: rng.randrange(40)], rng.randrange(VOCAB_SIZE)] for _ in range(6)]
    params = [SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True, n=1 + place % 2) for place in range(6)]
    for prompt, (own, *_) in zip(prompts * 2, answers(folder, params, prompts, **settings), strict=True):
        assert list(own.token_ids[:2]) == [following(prompt[-1]), following(following(prompt[-1]))]


# --- faults -----------------------------------------------------------------------------------------------------------


def no_tails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HeadDrafter, "_write_tails", lambda *_: None)


def tails_of_rejected_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = HeadDrafter._computed
    monkeypatch.setattr(HeadDrafter, "_computed", lambda self, rows, step: computed(
        self, DraftRows(*(each[:0] for each in rows)), step
    ))  # fmt: skip


def shifted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads the embedding of the token before."""
    batch_of = HeadDrafter._batch_of

    def shifted(self: HeadDrafter, spans: Spans, tables: NDArray[np.int32]) -> ForwardBatch:
        batch = batch_of(self, spans, tables)
        rows = spans.rows[np.repeat(np.arange(len(spans.rows)), spans.stops - spans.starts)]
        batch.token_ids[:] = self._batch.token_ids[rows, np.maximum(batch.positions - 1, 0)]
        return batch

    monkeypatch.setattr(HeadDrafter, "_batch_of", shifted)


def shifted_states(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head reads the hidden state of the token but one before."""
    before = HeadDrafter._hidden_before

    def shifted(self: HeadDrafter, step: Spans, places: IntArray, inputs: StepInputs, batch: ForwardBatch) -> Tensor:
        assert inputs.hidden is not None
        hidden = np.concatenate([inputs.hidden[:1], inputs.hidden[:-1]])
        return before(self, step, places, inputs._replace(hidden=hidden), batch)

    monkeypatch.setattr(HeadDrafter, "_hidden_before", shifted)
