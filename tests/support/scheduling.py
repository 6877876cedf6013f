"""Drives a real scheduler over a real cache and the fake executor."""

import random
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from quire.cache.block_table import NULL_BLOCK
from quire.cache.manager import KVCacheManager
from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.errors import InvalidRequestError
from quire.core.outputs import SequenceDelta
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import NO_ROW, Request
from quire.scheduling.scheduler import Scheduler
from support.fake_executor import VOCAB_SIZE, FakeExecutor, expected_tokens


def make_request(
    request_id: int, prompt: list[int], params: SamplingParams, eos: frozenset[int] = frozenset()
) -> Request:
    """A request as the engine would make it."""
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt,
        params=params,
        seed=params.seed if params.seed is not None else request_id,
        max_tokens=params.max_tokens or 1,
        eos_token_ids=frozenset() if params.ignore_eos else eos,
        stop_token_ids=frozenset(params.stop_token_ids or ()),
    )


@dataclass
class Harness:
    """A scheduler, its cache and a checking executor; collects what each branch came to."""

    num_blocks: int
    block_size: int = 4
    max_num_seqs: int = 8
    budget: int = 16
    max_model_len: int = 1 << 20
    window: int | None = None
    caching: bool = False
    outputs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.cache = KVCacheManager(CacheConfig(self.num_blocks, self.block_size, self.window, self.caching))
        config = SchedulerConfig(self.max_num_seqs, self.budget, self.max_model_len)
        self.scheduler = Scheduler(config, self.cache)
        self.executor = FakeExecutor(self.num_blocks, self.block_size, self.max_num_seqs, self.budget, self.window)
        self.requests: dict[int, Request] = {}

    def add(
        self, prompt: int | list[int], eos: Iterable[int] = (), salt: str | None = None, **params: object
    ) -> Request:
        """Queue a request with a prompt of its own, so many tokens long, or with this one."""
        request_id = len(self.requests)
        if isinstance(prompt, int):
            prompt = [(request_id * 7 + i) % VOCAB_SIZE for i in range(prompt)]
        request = make_request(request_id, prompt, SamplingParams(**params), frozenset(eos))  # type: ignore[arg-type]
        request.cache_salt = salt
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    def step(self) -> list[SequenceDelta]:
        """Run one step and check every invariant after it."""
        before = list(self.scheduler.running)
        plan = self.scheduler.schedule()
        if plan.is_empty:
            return []
        for victim in (request for request in before if request not in self.scheduler.running):
            assert all(request.arrival < victim.arrival for request in self.scheduler.admitted), "let in past a victim"
        self.executor.submit(plan)
        deltas = self.scheduler.update(plan, self.executor.collect())
        self.num_steps += 1
        self.check()
        for delta in deltas:
            key = delta.request_id, delta.index
            assert key not in self.reasons, "a delta after the last"
            self.outputs.setdefault(key, []).extend(delta.token_ids)
            if delta.finish_reason is not None:
                self.reasons[key] = delta.finish_reason
        return deltas

    def check(self) -> None:
        """Check every invariant, and that requests with different salts have no block in common."""
        self.scheduler.check()
        salts: dict[int, str | None] = {}
        for request in self.scheduler.running:
            for sequence in request.live:
                for block in self.cache.block_ids(sequence.seq_id) if sequence.row != NO_ROW else ():
                    if block != NULL_BLOCK:
                        assert salts.setdefault(block, request.cache_salt) == request.cache_salt

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left; everything must have been given back then."""
        while self.scheduler.has_requests:
            assert self.num_steps < max_steps, "no end in sight"
            self.step()
        assert self.cache.num_free_blocks == self.num_blocks

    def expected(self, request: Request) -> list[list[int]]:
        """What the branches of a request must come to."""
        return expected_tokens(
            request.prompt_token_ids, request.params, request.seed, request.max_tokens, request.eos_token_ids
        )

    def assert_right(self, request: Request, *, whole: bool = True) -> None:
        """Every branch gave just the tokens that it gives alone; the first of them, if it was ended early."""
        for index, tokens in enumerate(self.expected(request)):
            got = self.outputs.get((request.request_id, index), [])
            assert got == (tokens if whole else tokens[: len(got)])


def random_params(rng: random.Random) -> dict[str, Any]:
    """Random sampling parameters as far as the scheduler looks at them."""
    max_tokens = rng.randint(1, 40)
    return {
        "n": rng.choice([1, 1, 1, 2, 3, 5]),
        "max_tokens": max_tokens,
        "min_tokens": rng.randint(0, max_tokens),
        "stop_token_ids": rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 2])),
        "ignore_eos": rng.random() < 0.8,
    }


def random_run(seed: int) -> Harness:
    """Random pool, limits, arrivals, prompts, n, stops and aborts; safety after each step, liveness at the end."""
    rng = random.Random(seed)
    block_size, longest_prompt = rng.choice([1, 2, 3, 4, 4, 8, 16]), rng.choice([3, 12, 40])
    typical_blocks = (longest_prompt + 40 * rng.randint(1, 2)) // block_size + 1
    harness = Harness(
        num_blocks=max(2, int(typical_blocks * rng.uniform(0.7, 3.0))),
        block_size=block_size,
        max_num_seqs=rng.choice([1, 8, 8, 16]),
        budget=rng.choice([1, 2, 3, 7, 16, 64]),
        max_model_len=rng.choice([60, 1 << 20]),
        window=rng.choice([None, None, None, rng.randint(1, 24)]),
        caching=rng.random() < 0.7,
    )
    prompts = RandomPrompts(rng, longest_prompt)
    arrivals_left, arrival_rate, early_end_rate = rng.randint(1, 12), rng.choice([0.1, 1.0]), rng.choice([0, 0.03])
    ended_early: set[int] = set()
    while arrivals_left or harness.scheduler.has_requests:
        if arrivals_left and rng.random() < arrival_rate:
            arrivals_left -= 1
            with suppress(InvalidRequestError):
                eos = rng.sample(range(VOCAB_SIZE), 2)
                harness.add(prompts.draw(harness), eos, rng.choice([None, None, "salt"]), **random_params(rng))
        if harness.requests and rng.random() < early_end_rate:
            victim = rng.choice(list(harness.requests))
            is_abort = rng.random() < 0.5
            scheduler = harness.scheduler
            if scheduler.abort(victim) if is_abort else scheduler.finish(victim, rng.randrange(5)):
                ended_early.add(victim)
            harness.check()
        harness.step()
        assert harness.num_steps < 20_000, "no end in sight"
    assert harness.cache.num_free_blocks == harness.num_blocks
    for request in harness.requests.values():
        harness.assert_right(request, whole=request.request_id not in ended_early)
    return harness


class RandomPrompts:
    """Prompts that share beginnings with each other, and with what earlier requests were answered."""

    def __init__(self, rng: random.Random, longest: int) -> None:
        self._rng, self._longest = rng, longest
        self._alphabet = rng.choice([2, VOCAB_SIZE])
        self._earlier: list[list[int]] = []

    def draw(self, harness: Harness) -> list[int]:
        """The beginning of an earlier prompt, or of an answer to it, then tokens of its own."""
        rng, length = self._rng, self._rng.randint(1, self._longest)
        begun = list[int]()
        if self._earlier and rng.random() < 0.7:
            request_id = rng.randrange(len(harness.requests)) if harness.requests else 0
            answered = harness.outputs.get((request_id, 0), [])
            known = harness.requests[request_id].prompt_token_ids + answered if harness.requests else []
            begun = rng.choice([known, known, rng.choice(self._earlier)])
            begun = begun[: rng.choice([len(begun), rng.randint(0, len(begun))])][:length]
        prompt = begun + [rng.randrange(self._alphabet) for _ in range(length - len(begun))]
        self._earlier.append(prompt)
        return prompt
