"""Drives a real scheduler over a real cache and the fake executor."""

import math
import random
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any

from quire.cache.block_table import NULL_BLOCK
from quire.cache.disk_tier import DiskTier
from quire.cache.loads import Loads
from quire.cache.stored_blocks import StoredBlocks
from quire.core.config import (
    Batching,
    CacheConfig,
    DiskWritePolicy,
    MemoryPolicy,
    PreemptionMode,
    SchedulerConfig,
    SchedulingPolicy,
)
from quire.core.deltas import SequenceDelta
from quire.core.errors import InvalidRequestError
from quire.core.kv_identity import NO_STATES, StateParts
from quire.core.plan import UNMEASURED, MeasuredRates, StepPlan, decode_plan, decode_result, encode
from quire.core.pooling import GENERATE, BeamTask, PinTask, Scope
from quire.core.sampling_params import BeamSearchParams, SamplingParams, as_sampling_params
from quire.core.sequence import NO_ROW, Request
from quire.core.step_times import StepTimes
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.kv_disk import KVDisk
from quire.scheduling.scheduler import make_scheduler
from quire.scheduling.waiting_lines import Lack
from support.beam_reference import Found, reference_search
from support.fake_executor import VOCAB_SIZE, FakeExecutor, expected_tokens

if TYPE_CHECKING:  # it needs the extension
    from support.scripted_store import ScriptedStore


def make_request(
    request_id: int,
    prompt: list[int],
    params: SamplingParams,
    eos: frozenset[int] = frozenset(),
    beam: BeamSearchParams | None = None,
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
        task=GENERATE if beam is None else BeamTask(beam),
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
    num_swap_blocks: int = 0
    num_state_slots: int = 0
    num_swap_slots: int = 0
    mode: PreemptionMode = "auto"
    rates: MeasuredRates = UNMEASURED
    policy: MemoryPolicy = "paged"
    batching: Batching = "continuous"
    scheduling_policy: SchedulingPolicy = "priority"
    max_kv_share: float = 1.0
    itl_target_s: float = math.inf
    ttft_target_s: float = math.inf
    measured_share: float = 0.0
    outputs: dict[tuple[int, int], list[int]] = field(default_factory=dict)
    reasons: dict[tuple[int, int], str] = field(default_factory=dict)
    logprobs: dict[tuple[int, int], float] = field(default_factory=dict)  # deltas of whole answers of beam searches
    late: dict[tuple[int, int], SequenceDelta] = field(default_factory=dict)  # ends by deadlines
    num_steps: int = 0
    num_pinned: int = 0
    now_s: float = 0.0  # when requests arrive, and the next step is planned
    sends: bool = False  # plans and results cross a process boundary as bytes
    executor_class: type[FakeExecutor] = FakeExecutor
    make_disk: "Callable[[Harness], KVDisk] | None" = None
    unprepared: Callable[[Request], Lack | None] = lambda request: None

    def __post_init__(self) -> None:
        cache_config = CacheConfig(
            self.num_blocks, self.block_size, self.window, self.caching, self.num_swap_blocks, self.policy,
            measured_share=self.measured_share, finds_whole_blocks=self.num_state_slots > 0,
            num_state_slots=self.num_state_slots, num_swap_slots=self.num_swap_slots,
        )
        config = SchedulerConfig(
            self.max_num_seqs, self.budget, self.max_model_len, self.mode, self.batching, self.scheduling_policy,
            self.max_kv_share, itl_target_s=self.itl_target_s, ttft_target_s=self.ttft_target_s,
        )  # fmt: skip
        self.scheduler = make_scheduler(config, cache_config, self.unprepared)
        self.cache = self.scheduler.cache
        self.executor = self.executor_class(
            self.num_blocks,
            self.block_size,
            self.max_num_seqs,
            self.budget,
            self.window,
            self.num_swap_blocks,
            self.rates,
            self.num_state_slots,
            self.num_swap_slots,
        )
        self.requests: dict[int, Request] = {}
        self.disk = None if self.make_disk is None else self.make_disk(self)

    def add(
        self,
        prompt: int | list[int],
        eos: Iterable[int] = (),
        salt: str | None = None,
        *,
        is_pin: bool = False,
        priority: int = 0,
        client_id: str = "",
        weight: float = 1.0,
        **params: object,
    ) -> Request:
        """Queue a request with a prompt of its own, so many tokens long, or with this one."""
        sampling = SamplingParams(**params)  # type: ignore[arg-type]
        who = client_id, weight
        return self._add(prompt, sampling, None, eos, salt, is_pin=is_pin, priority=priority, who=who)

    def add_beams(
        self,
        prompt: int | list[int],
        beam: BeamSearchParams,
        eos: Iterable[int] = (),
        salt: str | None = None,
        *,
        priority: int = 0,
        client_id: str = "",
        ttft_deadline_ms: int | None = None,
        deadline_ms: int | None = None,
    ) -> Request:
        """Queue a beam search."""
        params = as_sampling_params(beam)
        params.ttft_deadline_ms, params.deadline_ms = ttft_deadline_ms, deadline_ms
        return self._add(prompt, params, beam, eos, salt, priority=priority, who=(client_id, 1.0))

    def _add(
        self,
        prompt: int | list[int],
        params: SamplingParams,
        beam: BeamSearchParams | None,
        eos: Iterable[int],
        salt: str | None,
        *,
        is_pin: bool = False,
        priority: int = 0,
        who: tuple[str, float] = ("", 1.0),
    ) -> Request:
        request_id = len(self.requests)
        if isinstance(prompt, int):
            prompt = [(request_id * 7 + i) % VOCAB_SIZE for i in range(prompt)]
        request = make_request(request_id, prompt, params, frozenset(eos), beam)
        request.scope, request.priority = Scope(salt), priority
        if is_pin:
            request.task = PinTask()
        request.client_id, request.weight = who
        request.arrived_s = self.now_s
        self.scheduler.add(request)
        self.requests[request_id] = request
        return request

    def pin(self, prefix: list[int], salt: str | None = None) -> Request:
        """Queue a request that pins its prompt."""
        return self.add(prefix, salt=salt, is_pin=True, max_tokens=1, temperature=0.0)

    def step(self, *, fails: bool = False) -> list[SequenceDelta]:
        """Run one step and check every invariant after it."""
        plan = self.schedule()
        if plan.is_empty:
            for delta in (ended := self.scheduler.take_deltas()):
                self.take(delta)
            return ended
        if fails:
            self.fail(plan)
            return []
        return self.execute(plan)

    def execute(self, plan: StepPlan) -> list[SequenceDelta]:
        """Run a step that has been planned, and check every invariant after it."""
        self.executor.submit(decode_plan(encode(plan)) if self.sends else plan)
        result = self.executor.collect()
        deltas = self.scheduler.update(plan, decode_result(encode(result)) if self.sends else result)
        self.num_steps += 1
        self.check()
        for delta in deltas:
            self.take(delta)
        return deltas

    def take(self, delta: SequenceDelta) -> None:
        """Take down what a step has given."""
        key = delta.request_id, delta.index
        assert key not in self.reasons, "a delta after the last"
        self.outputs.setdefault(key, []).extend(delta.token_ids)
        if delta.finish_reason is not None or delta.error is not None:
            self.reasons[key] = delta.finish_reason or "error"
        if delta.is_late:
            self.late[key] = delta
        if delta.cumulative_logprob is not None:
            self.logprobs[key] = delta.cumulative_logprob

    def fail(self, plan: StepPlan) -> list[int]:
        """Let a step that has been planned end in garbage. Return the requests that it concerned."""
        self.executor.fail(plan)
        return self._undo()

    def fail_step(self, *, is_run: bool) -> list[int]:
        """Plan a step that is run and loses its result, or leaves garbage. Return the requests that it concerned."""
        plan = self.schedule()
        if not is_run:
            return self.fail(plan)
        if not plan.is_empty:
            self.executor.submit(plan)
            self.executor.collect()
        return self._undo()

    def _undo(self) -> list[int]:
        concerned = self.scheduler.roll_back()
        self.check()
        return concerned

    def schedule(self) -> StepPlan:
        """Make a plan, and check the admitted requests: none past a victim, none new while anything is swapped out."""
        if self.disk is not None:
            self.disk.step()
        scheduler, before = self.scheduler, list(self.scheduler.queues.running)
        swapped = list(scheduler.queues.swapped)  # they return before anything new, whatever their client's share
        plan = scheduler.schedule(self.now_s)
        before = [request for request in before if request.live]  # the others were late
        assert not before or before[0] in scheduler.queues.running, "the first in order gave way"
        for victim in (request for request in before if request not in scheduler.queues.running):
            assert all(
                request.queue_key < victim.queue_key
                or (self.max_kv_share < 1 and (request.client_id != victim.client_id or request in swapped))
                for request in scheduler.step.admitted
            ), "let in past a victim"
        if scheduler.queues.swapped:
            resumed = [request.num_preemptions > 0 for request in scheduler.step.admitted]
            assert all(resumed), "let in past a swapped request"
            first = scheduler.queues.swapped[0].queue_key
            assert all(request.queue_key < first for request in scheduler.step.admitted), "returned out of order"
        return plan

    def check(self) -> None:
        """Check every invariant, and that requests with different salts have no block in common."""
        self.scheduler.check()
        salts: dict[int, str | None] = {}
        for request in self.scheduler.queues.running:
            for sequence in request.live:
                for block in self.cache.block_ids(sequence.seq_id) if sequence.row != NO_ROW else ():
                    if block != NULL_BLOCK:
                        assert salts.setdefault(block, request.scope) == request.scope

    def run(self, max_steps: int = 100_000) -> None:
        """Step until nothing is left; everything but what is pinned must have been given back then."""
        while self.scheduler.has_requests:
            assert self.num_steps < max_steps, "no end in sight"
            self.step()
        self.assert_empty()

    def assert_empty(self) -> None:
        """Everything has been given back but what is pinned."""
        assert self.cache.num_free_blocks == self.num_blocks - self.cache.pins.num_blocks
        assert self.cache.swap_space.num_free_blocks == self.num_swap_blocks
        if self.cache.states is not None:
            stats = self.cache.states.stats()
            assert stats["used_slots"] == stats["swap_used_slots"] == 0

    def expected(self, request: Request) -> list[list[int]]:
        """What the branches of a request must come to."""
        return expected_tokens(
            request.prompt_token_ids, request.params, request.seed, request.max_tokens, request.eos_token_ids
        )

    def assert_right(self, request: Request, *, whole: bool = True) -> None:
        """Every branch gave just the tokens that it gives alone; the first of them, if it was ended early."""
        if isinstance(request.task, BeamTask):
            self._assert_beams_right(request, whole=whole)
            return
        for index, tokens in enumerate(self.expected(request)):
            got = self.outputs.get((request.request_id, index), [])
            assert got == (tokens if whole else tokens[: len(got)])


    def searched(self, request: Request) -> list[Found]:
        """What a beam search must come to."""
        assert isinstance(request.task, BeamTask)
        return reference_search(
            lambda output: self.executor.next_logprobs(request.prompt_token_ids + output),
            request.task.params,
            request.max_tokens,
            request.eos_token_ids,
        )

    def _assert_beams_right(self, request: Request, *, whole: bool) -> None:
        """A search gives its answers in order, with their logprobs; none, if it was ended early."""
        found = self.searched(request)
        keys = [(request.request_id, index) for index in range(len(found))]
        if not whole and (keys[0] not in self.outputs or any(key in self.late for key in keys)):
            return
        assert [self.outputs[key] for key in keys] == [each.token_ids for each in found]
        assert [self.reasons[key] for key in keys] == [each.finish_reason for each in found]
        assert [self.logprobs[key] for key in keys] == [each.logprob for each in found]


def random_beams(rng: random.Random) -> BeamSearchParams:
    """A random beam search, as far as the scheduler looks at it."""
    return BeamSearchParams(
        beam_width=rng.choice([1, 2, 3, 4, 6]),
        max_tokens=rng.randint(1, 24),
        ignore_eos=rng.random() < 0.5,
        length_penalty=rng.choice([-1.0, 0.0, 0.5, 1.0, 2.0]),
    )


def random_params(rng: random.Random, *, crowded: bool) -> dict[str, Any]:
    """Random sampling parameters as far as the scheduler looks at them."""
    max_tokens = rng.randint(20 if crowded else 1, 40)
    if crowded and rng.random() < 0.8:
        return {"n": rng.choice([1, 1, 2, 3]), "max_tokens": max_tokens, "ignore_eos": True}
    return {
        "n": rng.choice([1, 1, 1, 2, 3, 5]),
        "max_tokens": max_tokens,
        "min_tokens": rng.randint(0, max_tokens),
        "stop_token_ids": rng.sample(range(VOCAB_SIZE), rng.choice([0, 0, 2])),
        "ignore_eos": rng.random() < 0.8,
    }


def random_times(rng: random.Random) -> StepTimes | None:
    """Return prices, a step itself for about 1, most of them so that a few tokens take as long."""
    prices = (rng.choice([0.0, rng.uniform(0, most)]) for most in (0.5, 0.05, 0.05, 0.5))
    return rng.choice([None, *[StepTimes(rng.uniform(0.5, 2), *prices, rng.choice([1.0, 1.3]))] * 4])


def random_run(
    seed: int,
    *,
    crowded: bool = False,
    windowed: bool = False,
    sends: bool = False,
    late: bool = False,
    executor_class: type[FakeExecutor] = FakeExecutor,
    store: "ScriptedStore | None" = None,
    stateful: bool = False,
) -> Harness:
    """Random pool, limits, requests, beams, stops, aborts, pins, failures; safety after each step, liveness at the end.

    Crowded: long answers that come in all at once, in a pool for few of them, so that most are preempted.
    Windowed: with a sliding window, prefix caching and small blocks, whatever else is drawn.
    Late: with deadlines, on a clock whose steps take any time.
    Store: of a disk tier; then with prefix caching, whatever else is drawn.
    Stateful: of a model with states, in few slots; without a window.
    """
    slots = random.Random(f"slots of {seed}")
    deadlines = random.Random(f"deadlines of {seed}")
    rng, policies, times = (random.Random(text) for text in (seed, f"policies of {seed}", f"times of {seed}"))
    block_size = rng.choice([1, 2, 3, 4] if crowded or windowed else [1, 2, 3, 4, 4, 8, 16])
    longest_prompt = rng.choice([3, 12] if crowded else [3, 12, 40])
    typical_blocks = (longest_prompt + 40 * (1 if crowded else rng.randint(1, 2))) // block_size + 1
    harness = Harness(
        num_blocks=max(2, int(typical_blocks * rng.uniform(0.7, 1.5 if crowded else 3.0))),
        block_size=block_size,
        max_num_seqs=24 if crowded else rng.choice([1, 8, 8, 16]),
        budget=rng.choice([1, 2, 3, 7, 16, 64]),
        max_model_len=rng.choice([60, 1 << 20]),
        window=rng.choice([*[None] * (0 if windowed else 3), rng.randint(1, 24)]) if not stateful else None,
        caching=rng.random() < 0.7 or windowed or store is not None,
        num_swap_blocks=rng.choice([0, 1, typical_blocks // 2, *[10 * typical_blocks] * 4]),
        mode=rng.choice(["auto", "recompute", "swap", "swap"]),
        rates=MeasuredRates(
            *(rng.choice([None, *[rng.uniform(1, 100)] * 5]) for _ in range(3)), step_times=random_times(times)
        ),
        itl_target_s=times.choice([math.inf, *[times.uniform(0.1, 8)] * 3]),
        ttft_target_s=times.choice([math.inf, 10 ** times.uniform(0, 3)]),
        scheduling_policy=policies.choice(["priority", "fair", "fair"]),
        max_kv_share=policies.choice([1.0, 1.0, policies.random() or 1.0]),
        sends=sends,
        executor_class=executor_class,
        num_state_slots=slots.choice([1, 2, 3, 6, 12, 40, 100]) if stateful else 0,
        num_swap_slots=slots.choice([0, 1, 30, 30, 30]) if stateful else 0,
        make_disk=None if store is None else partial(make_disk, store=store),
    )
    num_clients = policies.choice([1, 2, 5])
    prompts = RandomPrompts(rng, longest_prompt)
    arrivals_left = rng.randint(*((6, 20) if crowded else (1, 12)))
    arrival_rate = 1.0 if crowded else rng.choice([0.1, 1.0])
    early_end_rate, failure_rate = rng.choice([0, 0.03]), rng.choice([0, 0, 0.02])
    priorities = rng.choice([[0], [0], [0, 1], [-100, 0, 3, 100]])
    beam_rate, pin_rate, ended_early = rng.choice([0.0, 0.0, 0.3, 1.0]), rng.choice([0, 0, 0.3]), set[int]()
    while arrivals_left or harness.scheduler.has_requests:
        if arrivals_left and rng.random() < arrival_rate:
            arrivals_left -= 1
            with suppress(InvalidRequestError):
                eos, salt = rng.sample(range(VOCAB_SIZE), rng.choice([1, 2])), rng.choice([None, None, "salt"])
                prompt, client_id = prompts.draw(harness), f"client {policies.randrange(num_clients)}"
                asked = random_deadlines(deadlines) if late else {}
                if rng.random() < pin_rate:
                    harness.pin(prompt, salt)
                elif rng.random() < beam_rate:
                    priority = rng.choice(priorities)
                    beams = random_beams(rng)
                    harness.add_beams(prompt, beams, eos, salt, priority=priority, client_id=client_id, **asked)
                else:
                    params = random_params(rng, crowded=crowded)
                    if stateful and slots.random() < 0.3:
                        params["structured_outputs"] = StructuredOutputsParams(regex=".*")  # its rows may be late
                    who = {"client_id": client_id, "weight": policies.choice([0.5, 1.0, 3.0])}
                    harness.add(prompt, eos, salt, priority=rng.choice(priorities), **who, **params, **asked)
        if harness.requests and rng.random() < early_end_rate:
            victim = rng.choice(list(harness.requests))
            is_abort = rng.random() < 0.5
            scheduler = harness.scheduler
            if victim in harness.cache.pins.ids:
                assert scheduler.abort(victim)
            elif scheduler.abort(victim) if is_abort else scheduler.finish(victim, rng.randrange(5)):
                ended_early.add(victim)
            harness.check()
        harness.step(fails=rng.random() < failure_rate)
        harness.now_s += deadlines.choice([0.0, 0.01, deadlines.random()])
        assert harness.num_steps < 20_000, "no end in sight"
    for pin in harness.cache.pins.ids:
        harness.num_pinned += 1
        assert harness.scheduler.abort(pin)
        harness.check()
    harness.assert_empty()
    ended_early |= {request_id for request_id, _ in harness.late}
    for request in harness.requests.values():
        harness.assert_right(request, whole=request.request_id not in ended_early)
    return harness


def make_disk(harness: Harness, store: "ScriptedStore", policy: DiskWritePolicy = "all") -> KVDisk:
    """Give a harness a disk tier over a store, as after a restart; its clock goes on with each look."""
    stored = StoredBlocks(store.num_slots, harness.block_size)
    num_states = len(harness.executor.states)
    parts = StateParts(harness.cache.num_blocks, 3) if num_states else NO_STATES
    store.open(harness.executor.memory, harness.block_size, harness.executor.states, parts)
    stored.recover(store.recovered())
    loads = harness.cache.loads = Loads(harness.cache, 1 << 21)
    loads.disk = DiskTier(harness.cache, stored, store.scope_key, policy, parts)
    return KVDisk(loads, loads.disk, store, count(0.0, 0.0005).__next__)  # type: ignore[arg-type]


def random_store(seed: int) -> "ScriptedStore":
    """Return a store that is slow, small, spoilt, or hangs."""
    from support.scripted_store import ScriptedStore

    rng = random.Random(f"disk of {seed}")
    return ScriptedStore(
        rng.choice([0, 1, 20, *[200] * 5]),
        rng,
        most_turns=rng.choice([0, 3, 10]),
        bad_rate=rng.choice([0.0, 0.0, 0.2]),
        never_rate=rng.choice([0.0, 0.0, 0.2]),
        num_staged=rng.choice([1, 99, 99]),
    )


def random_deadlines(rng: random.Random) -> dict[str, Any]:
    """Random deadlines, or none."""
    return {field: rng.choice([None, rng.randint(1, 6000)]) for field in ("ttft_deadline_ms", "deadline_ms")}


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
