"""Ring of the latest steps of an engine, and its rates in the last second, ten seconds and minute: `GET /debug/top`.

The server fills it from the report that an engine sends after each step, so an engine does nothing for it. It has a
fixed size: NUM_STEPS records, and sums of a minute by second.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, get_args

import numpy as np

from quire.core.deltas import WAIT_REASONS
from quire.core.step_times import StepKind
from quire.engine.messages import EngineState, Stepped
from quire.engine.requests.output_processor import ProcessedStep

NUM_STEPS = 3600
WINDOWS_S = (1, 10, 60)
_KINDS = (None, *get_args(StepKind))       # None: nothing was computed
_REASONS = (None, *WAIT_REASONS)
_COUNTS = (
    "tokens", "outputs", "rows", "waiting", "free", "cached", "used", "preempted", "hits", "drafts", "accepted"
)  # fmt: skip
_RECORD = np.dtype(
    [("number", "i8"), ("start", "f8"), ("seconds", "f4"), *((name, "u4") for name in _COUNTS), ("kind", "u1"),
     ("reason", "u1")]
)  # fmt: skip
_SUMS = (
    "steps", "computed_tokens", "prompt_tokens", "output_tokens", "finished_requests", "preemptions",
    "cached_tokens", "draft_tokens", "accepted_tokens",
)  # fmt: skip


class StepRing:
    """The latest steps of one engine. `numbers` yields the number of each step, over all engines of the server."""

    def __init__(self, numbers: Iterator[int], clock: Callable[[], float] = time.monotonic) -> None:
        self.state = EngineState(0, 0, 0)           # as last reported
        self.shares: dict[str, float] | None = None  # as in `EngineState`, when they were counted last
        self.blocks_by_owner: dict[str, int] = {}   # likewise
        self.next = 0                               # the number behind that of the last step
        self._numbers, self._clock = numbers, clock
        self._records = np.zeros(NUM_STEPS, _RECORD)
        self._num_recorded = self._num_hits = 0
        self._by_second = deque[tuple[int, list[int]]](maxlen=max(WINDOWS_S) + 1)  # _SUMS of each second with steps

    def record(self, step: Stepped, processed: ProcessedStep) -> None:
        """Record a step of the engine."""
        self.set_state(step.state)
        kv, timing, state = step.state.kv, step.timing, step.state
        assert kv is not None, "a step without statistics"
        num_hits, self._num_hits = kv.prefix_hits_tokens - self._num_hits, kv.prefix_hits_tokens
        num_drafts = num_accepted = 0
        for delta in step.deltas:
            num_drafts += delta.num_draft_tokens
            num_accepted += delta.num_accepted_tokens
        number = next(self._numbers)
        self.next = number + 1
        self._records[self._num_recorded % NUM_STEPS] = (
            number, step.started_s, np.nan if timing is None or timing.seconds is None else timing.seconds,
            step.num_computed_tokens, processed.num_output_tokens, state.num_running_seqs, state.num_waiting,
            kv.free_blocks, kv.cached_blocks, kv.used_blocks, len(step.preempted), num_hits, num_drafts, num_accepted,
            _KINDS.index(None if timing is None else timing.kind), _REASONS.index(state.waits_for),
        )  # fmt: skip
        self._num_recorded += 1
        self._add((
            1, step.num_computed_tokens, processed.num_prompt_tokens, processed.num_output_tokens,
            len(processed.finished), len(step.preempted), num_hits, num_drafts, num_accepted,
        ))  # fmt: skip

    def _add(self, counts: tuple[int, ...]) -> None:
        second = int(self._clock())
        if self._by_second and self._by_second[-1][0] == second:
            sums = self._by_second[-1][1]
            sums[:] = map(int.__add__, sums, counts)
        else:
            self._by_second.append((second, list(counts)))

    def set_state(self, state: EngineState) -> None:
        """Store the state of the last report."""
        self.state = state
        if state.shares is not None:
            self.shares = state.shares
        if state.kv is not None and state.kv.blocks_by_owner is not None:
            self.blocks_by_owner = state.kv.blocks_by_owner

    def engine_died(self) -> None:
        """Forget the state of an engine that has died; its steps stay."""
        self.state, self.shares, self.blocks_by_owner, self._num_hits = EngineState(0, 0, 0), None, {}, 0

    def rates(self) -> dict[str, dict[str, float]]:
        """Return sums per second over the last whole seconds, keyed by the length of the window in seconds."""
        now = int(self._clock())
        rates = {}
        for window in WINDOWS_S:
            recent = [sums for second, sums in self._by_second if now - window <= second < now]
            totals = map(sum, zip(*recent, strict=True)) if recent else [0] * len(_SUMS)
            rates[str(window)] = {name: total / window for name, total in zip(_SUMS, totals, strict=True)}
        return rates

    def steps(self, since: int) -> dict[str, list[Any]]:
        """Return the steps from a number on that are still here, oldest first: one list for each of their fields."""
        at = self._num_recorded % NUM_STEPS
        kept = self._records[:at] if self._num_recorded < NUM_STEPS else np.roll(self._records, -at)
        kept = kept[np.searchsorted(kept["number"], since) :]
        columns: dict[str, list[Any]] = {name: kept[name].tolist() for name in ("number", "start", *_COUNTS)}
        seconds = np.round(kept["seconds"].astype(np.float64), 7).tolist()
        return columns | {
            "seconds": [None if each != each else each for each in seconds],  # noqa: PLR0124 (NaN: not measured)
            "kind": [_KINDS[each] for each in kept["kind"].tolist()],
            "reason": [_REASONS[each] for each in kept["reason"].tolist()],
        }
