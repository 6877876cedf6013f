"""The fault of one request is its own: whatever breaks, and whenever, the others get what they get alone.

A fault is put in at a named point, at its first hit, its second, and so on until a run no longer comes so far. After
each the accounts of rows and blocks are right, and the next request is answered as ever.
"""

from collections.abc import Callable, Iterator, KeysView, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from quire import LLM, RequestOutput, SamplingParams
from quire.cache.block_pool import BlockPool
from quire.cache.manager import KVCacheManager
from quire.core.deltas import SequenceDelta
from quire.core.errors import EngineError, RequestFailedError
from quire.core.frames import LENGTH_BYTES, frame
from quire.core.sequence import Request
from quire.decoding.sampler import BIAS, SampledTokens, SamplingBatch
from quire.engine.messages import AddRequest, Idle, Report, Stepped
from quire.engine.offline_engine import LocalEngine
from quire.engine.processes.engine_process import EngineLoop
from quire.engine.processes.liveness import Heartbeat
from quire.engine.requests.output_processor import CompletionBuilder, OutputProcessor
from quire.execution import worker
from quire.execution.swapper import Swapper
from quire.kernels.sampling import SamplingOps
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.scheduling import result_recorder
from support.answers import Answer, answers_of
from support.faults import raising
from support.random_model import write_random_model

CURSED = 300   # a token of the victims' prompts alone
VICTIM: tuple[list[int], SamplingParams] = ([7, 8, CURSED], SamplingParams(max_tokens=9, ignore_eos=True, seed=9))
ASKED: tuple[tuple[list[int], SamplingParams], ...] = (
    ([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], SamplingParams(max_tokens=20, ignore_eos=True, temperature=0.0, logprobs=1)),
    ([20] * 9, SamplingParams(max_tokens=16, ignore_eos=True, seed=2, top_k=9, logit_bias={5: 2.0}, prompt_logprobs=1)),
    ([20] * 9, SamplingParams(max_tokens=16, ignore_eos=True, seed=3, allowed_token_ids=[4, 5, 6, 7, 8])),
    ([1, 2, 3, 4, 5, 6, 7, 8, 11], SamplingParams(max_tokens=11, ignore_eos=True, n=2, seed=1, presence_penalty=0.5)),
)
OPTIONS: dict[str, Any] = {
    "max_model_len": 32, "block_size": 8, "num_kv_blocks": 8, "num_swap_blocks": 24, "preemption_mode": "swap",
    "max_num_batched_tokens": 24, "max_num_seqs": 8,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("random-model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, **OPTIONS) as opened:
        yield opened


@pytest.fixture(scope="module")
def alone(llm: LLM) -> list[list[Answer]]:
    return [answers_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in ASKED]


# --- numbers that are none --------------------------------------------------------------------------------------------


def cursed_forward(value: float) -> Callable[[Decoder, ForwardBatch, KVCache], Tensor]:
    """Return a forward pass in which one token's hidden state is no number."""
    forward = Decoder.forward

    def run(model: Decoder, batch: ForwardBatch, cache: KVCache) -> Tensor:
        hidden = forward(model, batch, cache)
        hidden[batch.token_ids == CURSED] = value
        return hidden

    return run


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
@pytest.mark.parametrize("params", [{}, {"logprobs": 2}, {"n": 3}, {"allowed_token_ids": [3, 4]}], ids=str)
def test_request_without_numbers_fails_and_its_mates_do_not_notice(
    llm: LLM, alone: list[list[Answer]], monkeypatch: pytest.MonkeyPatch, value: float, params: dict[str, Any]
) -> None:
    monkeypatch.setattr(Decoder, "forward", cursed_forward(value))
    streams = [llm.stream([prompt], own) for prompt, own in ASKED]
    last = [next(stream) for stream in streams]
    with pytest.raises(RequestFailedError, match="NaN or infinite"):
        llm.generate([VICTIM[0]], SamplingParams(max_tokens=4, **params), use_tqdm=False)
    last = [[output, *stream][-1] for output, stream in zip(last, streams, strict=True)]
    assert [answers_of(output) for output in last] == alone
    assert_at_rest(llm)


def test_nothing_of_a_prompt_without_numbers_is_found_again(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bit that fell over once must not fail all that begins alike until it is evicted."""
    prompt, params = [*[40 + i for i in range(24)], CURSED], SamplingParams(max_tokens=4, temperature=0.0)
    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "forward", cursed_forward(np.nan))
        with pytest.raises(RequestFailedError):
            llm.generate([prompt], params, use_tqdm=False)
    assert_at_rest(llm)
    output = llm.generate([prompt], params, use_tqdm=False)[0]
    assert (output.num_cached_tokens, len(output.outputs[0].token_ids)) == (0, 4)


def test_prompt_logprobs_without_numbers_fail_their_request(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decoder, "forward", cursed_forward(np.nan))
    with pytest.raises(RequestFailedError, match="NaN or infinite"):
        llm.generate([[7, CURSED, 8, 9]], SamplingParams(max_tokens=4, prompt_logprobs=0), use_tqdm=False)
    assert_at_rest(llm)


def assert_at_rest(llm: LLM) -> None:
    llm._engine.engine.scheduler.check()
    stats = llm.kv_stats()
    assert (stats.used_blocks, stats.swap_used_blocks) == (0, 0)
    assert isinstance(llm._runner, LocalEngine)
    assert not llm._runner.unread
    assert len(llm._runner.outputs) == 0


# --- named points -----------------------------------------------------------------------------------------------------


class Injected(RuntimeError):
    """A fault that a test has put in."""


class OverError(Exception):
    """The engine has come to rest."""


class Run:
    """All of ASKED through the engine process's own loop, in this process: their ends, and the members of each step."""

    def __init__(self, llm: LLM, asked: Sequence[tuple[list[int], SamplingParams]] = ASKED) -> None:
        self.ids: list[int] = []
        self.failed: dict[int, Exception] = {}
        self.answers: dict[int, list[Answer]] = {}
        self._engine, self._outputs = llm._engine.engine, OutputProcessor(llm.tokenizer)
        self._commands = SimpleQueue[bytes]()
        for prompt, params in asked:
            (prepared,) = llm._prepare(llm._tokenize(prompt), params)
            self._send(prepared.request)
            self._outputs.add(prepared, external_id=str(len(self.ids)), arrival_s=0.0)
            self.ids.append(prepared.request.request_id)
        with pytest.raises(OverError):
            EngineLoop(self._engine, self._commands, self._take, Heartbeat(lambda: 0, lambda: None)).run()
        assert len(self._outputs) == 0, "a request waits in vain"

    def _send(self, request: Request) -> None:
        self._commands.put(frame(AddRequest(request))[LENGTH_BYTES:])

    def _take(self, report: Report) -> None:
        self._engine.scheduler.check()
        if isinstance(report, Idle):
            raise OverError
        if not isinstance(report, Stepped):
            return
        processed = self._outputs.process(report.deltas, 0.0)
        for request_id, error in processed.failed:
            self.failed[self.ids.index(request_id)] = error
            self._engine.abort(request_id)
        for request_id in processed.ready:
            output: RequestOutput = self._outputs.output(request_id)
            if output.finished:
                self.answers[self.ids.index(request_id)] = answers_of(output)


class NthHit:
    """Calls through, but for one call: that one fails."""

    def __init__(self, llm: LLM, inner: Callable[..., Any], nth: int, is_hit: Callable[..., bool]) -> None:
        self._scheduler, self._inner, self._nth, self._is_hit = llm._engine.engine.scheduler, inner, nth, is_hit
        self.num_hits = 0
        self.concerned: set[int] = set()   # requests: that of a delta, or all that ran when it failed

    def __get__(self, owner: object, _: type) -> Callable[..., Any]:
        return lambda *arguments, **options: self(owner, *arguments, **options)

    def __call__(self, *arguments: Any, **options: Any) -> Any:  # noqa: ANN401 (of whatever it stands for)
        if self._is_hit(*arguments):
            self.num_hits += 1
            if self.num_hits == self._nth:
                deltas = {each.request_id for each in arguments if isinstance(each, SequenceDelta)}
                self.concerned = deltas or {request.request_id for request in self._scheduler.queues.running}
                raise Injected("here")
        return self._inner(*arguments, **options)


def moves(direction: str) -> Callable[..., bool]:
    def is_hit(swapper: Swapper, sources: object, destinations: object, copies: list[Any], rate: object) -> bool:
        return bool(copies) and rate is getattr(swapper, f"{direction}_rate")

    return is_hit


def always(*_: object) -> bool:
    return True


POINTS: dict[str, tuple[Any, str, Callable[..., bool]]] = {
    "allocate": (BlockPool, "allocate", always),
    "end of a step": (KVCacheManager, "end_step", always),
    "record": (result_recorder, "SequenceDelta", always),
    "free": (KVCacheManager, "free", always),
    "forward": (Decoder, "forward", always),
    "swap out": (Swapper, "_move", moves("out")),
    "swap in": (Swapper, "_move", moves("in")),
    "logits": (Decoder, "logits", always),
    "detokenize": (CompletionBuilder, "extend", always),
    "sample": (worker, "sample", always),
}

PASSING = ("forward", "swap out", "swap in", "end of a step", "sample")

# Requests that fail with a hit: exactly one, or none, because the step is computed again in groups that succeed, and
# samples are drawn again.
MAY_FAIL: dict[str, Callable[[KeysView[int]], bool]] = {
    **dict.fromkeys(PASSING, lambda failed: not failed),
    **dict.fromkeys(("detokenize", "record", "free"), lambda failed: len(failed) == 1),
    "allocate": lambda failed: len(failed) <= 1,        # none where it is for several requests at once
    "logits": lambda failed: failed <= {1},             # whose prompt is scored with logits of its own
}


@pytest.mark.parametrize("point", POINTS)
def test_any_hit_of_any_point_may_fail(
    llm: LLM, alone: list[list[Answer]], monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    owner, name, is_hit = POINTS[point]
    nth, num_failed = 0, 0
    while True:  # each of the first twelve hits, then every fifteenth
        nth += 1 if nth < 12 else 15
        with monkeypatch.context() as patched:
            injected = NthHit(llm, getattr(owner, name), nth, is_hit)
            patched.setattr(owner, name, injected)
            run = Run(llm)
        if injected.num_hits < nth:
            break
        assert run.failed.keys() <= {run.ids.index(request_id) for request_id in injected.concerned}
        assert MAY_FAIL[point](run.failed.keys())
        num_failed += len(run.failed)
        for index, expected in enumerate(alone):
            assert index in run.failed or run.answers[index] == expected, f"hit {nth} changed request {index}"
        assert all(isinstance(error, EngineError | Injected) for error in run.failed.values())
        assert_at_rest(llm)
    assert nth > 1, "the point is never reached"
    assert run.failed == {}
    assert [run.answers[index] for index in range(len(ASKED))] == alone, "the next requests are not right"
    assert (num_failed == 0) == (point in PASSING)


def test_row_that_cannot_be_sampled_fails_alone(
    llm: LLM, alone: list[list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is that its parameters do to the sampler."""
    sample = worker.sample

    def fail_for_bias(samples: SamplingBatch, logits: Tensor, ops: SamplingOps) -> SampledTokens:
        if samples.using(BIAS).size:
            raise IndexError("no such token")
        return sample(samples, logits, ops)

    monkeypatch.setattr(worker, "sample", fail_for_bias)
    run = Run(llm)
    assert run.failed.keys() == {1}
    assert "IndexError" in str(run.failed[1])
    assert [run.answers[index] for index in (0, 2, 3)] == [alone[index] for index in (0, 2, 3)]
    assert_at_rest(llm)


def test_prompt_logprobs_that_cannot_be_had_fail_their_request_alone(
    llm: LLM, alone: list[list[Answer]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "prompt_logprobs", fail)
    run = Run(llm)
    assert run.failed.keys() == {1}
    assert [run.answers[index] for index in (0, 2, 3)] == [alone[index] for index in (0, 2, 3)]


def test_request_that_a_failed_step_did_not_reach_is_answered(
    folder: Path, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [
        ([1, 7], SamplingParams(max_tokens=9, ignore_eos=True, seed=1, n=3)),
        ([2, 7, 8], SamplingParams(max_tokens=9, ignore_eos=True, seed=2)),
    ]
    alone = [answers_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in asked]
    with LLM(folder, **OPTIONS | {"max_num_batched_tokens": 3, "num_kv_blocks": 16}) as narrow:
        injected = NthHit(narrow, Decoder.forward, 2, always)
        monkeypatch.setattr(Decoder, "forward", injected)
        run = Run(narrow, asked)
        assert len(injected.concerned) == 2, "both ran"
        assert not run.failed, "the fault has passed"
        assert run.answers == dict(enumerate(alone))
        assert_at_rest(narrow)


def poisoned_forward(token: int) -> Callable[[Decoder, ForwardBatch, KVCache], Tensor]:
    """Return a forward pass that fails for every batch with a certain token."""
    forward = Decoder.forward

    def run(model: Decoder, batch: ForwardBatch, cache: KVCache) -> Tensor:
        hidden = forward(model, batch, cache)
        if bool((batch.token_ids == token).any()):
            raise Injected("here")
        return hidden

    return run


@pytest.mark.parametrize("num_poisoned", [1, 3])
def test_request_that_makes_steps_fail_fails_alone(
    llm: LLM, alone: list[list[Answer]], monkeypatch: pytest.MonkeyPatch, num_poisoned: int
) -> None:
    monkeypatch.setattr(Decoder, "forward", poisoned_forward(CURSED))
    run = Run(llm, [*[VICTIM] * num_poisoned, *ASKED])
    assert run.failed.keys() == set(range(num_poisoned))
    assert all(isinstance(error, RequestFailedError) and "Injected" in str(error) for error in run.failed.values())
    assert [run.answers[num_poisoned + index] for index in range(len(ASKED))] == alone
    assert_at_rest(llm)


def test_device_that_fails_every_step_ends_the_engine(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(Decoder, "forward", raising(Injected))
        with pytest.raises(Injected):
            Run(llm, ASKED * 3)
    for request_id in list(llm._engine.engine.scheduler.queues.requests):
        llm._engine.engine.abort(request_id)
    assert_at_rest(llm)
