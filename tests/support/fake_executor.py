"""An executor that computes nothing and checks everything: what the scheduler tests run on.

Instead of keys and values each slot of its cache holds a digest of the whole prefix that ends there. A step writes
digests and then looks at every position of every context: a wrong table, a missing copy, a block freed too early or a
token computed twice shows at once. The next token is a pure function of the prefix and the branch's seed, so what a
request must come to is known without running any scheduler (`expected_tokens`).
"""

from collections import deque
from functools import reduce
from typing import NamedTuple

from quire.cache.block_table import NULL_BLOCK
from quire.cache.prefix_tree import NONE
from quire.core.deltas import TokenLogprobs
from quire.core.plan import (
    UNMEASURED,
    BlockCopy,
    GraphCounts,
    MeasuredRates,
    NewRow,
    RowDrafts,
    RowFork,
    RowResult,
    StepPlan,
    StepResult,
)
from quire.core.sampling_params import SamplingParams, branch_seed, num_candidates

VOCAB_SIZE = 50
EMPTY = -1
DRAW, SCORE = 0x5EED, 0x5C0E  # integers: hashes of strings differ from process to process


def extend_digest(digest: int, token: int) -> int:
    """Digest of a prefix with one more token."""
    return hash((digest, token))


def next_token(digest: int, seed: int) -> int:
    """The token that the fake model draws after a prefix."""
    return hash((digest, seed, DRAW)) % VOCAB_SIZE


def next_logprobs(token_ids: list[int]) -> list[float]:
    """The logprobs of all tokens after a prefix, as beams see them. No two are equal."""
    digest = reduce(extend_digest, token_ids, 0)
    weights = [hash((digest, token, SCORE)) % (1 << 20) for token in range(VOCAB_SIZE)]
    return [-(weight * VOCAB_SIZE + token) / (1 << 24) for token, weight in enumerate(weights)]


def expected_tokens(
    prompt: list[int], params: SamplingParams, seed: int, max_tokens: int, eos: frozenset[int]
) -> list[list[int]]:
    """What each branch must come to, computed alone and without any cache."""
    branches = []
    stops = eos | set(params.stop_token_ids or ())
    for index in range(params.n):
        own_seed, digest, output = branch_seed(seed, index), 0, list[int]()
        for token in prompt:
            digest = extend_digest(digest, token)
        while len(output) < max_tokens:
            token = next_token(digest, own_seed)
            output.append(token)
            digest = extend_digest(digest, token)
            if token in stops and len(output) >= params.min_tokens:
                break
        branches.append(output)
    return branches


class FakeState(NamedTuple):
    """The state of a slot: a digest of the first tokens of a sequence, and the tokens behind them."""

    committed: int
    digest: int
    ring: tuple[int, ...]


def _written_slots(plan: StepPlan) -> list[int]:
    return [slot for state in plan.states for slot in (state.write, *(slot for _, slot in state.snapshots))]


class FakeExecutor:
    """Runs plans on digests. `window`: how far back a query looks, as in the cache's configuration.

    `rates`: what it claims to have measured.
    """

    max_steps_in_flight, graphs = 1, GraphCounts()

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        window: int | None = None,
        num_swap_blocks: int = 0,
        rates: MeasuredRates = UNMEASURED,
        num_state_slots: int = 0,
        num_swap_slots: int = 0,
    ) -> None:
        self._block_size = block_size
        self._max_num_seqs = max_num_seqs
        self._budget = budget
        self._window = window
        self._rates = rates
        self._slots = [EMPTY] * (num_blocks * block_size)
        self._swap_slots = [EMPTY] * (num_swap_blocks * block_size)
        self.states: list[FakeState | None] = [None] * num_state_slots
        self._swapped_states: list[FakeState | None] = [None] * num_swap_slots
        self._rows: dict[int, NewRow] = {}
        self._tokens: dict[int, list[int]] = {}  # known ones, by row
        self._tables: dict[int, list[int]] = {}
        self._plans = deque[StepPlan]()
        self.trace: list[tuple[object, ...]] = []
        self.num_computed = 0  # tokens, over all steps
        self.num_swapped = 0   # blocks, out and in
        self.next_logprobs = next_logprobs  # for beams; may be replaced

    @property
    def memory(self) -> list[int]:
        """The slots of the cache, block by block."""
        return self._slots

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)

    def drop(self) -> StepPlan:
        """Forget the oldest plan, and return it."""
        return self._plans.popleft()

    def collect(self) -> StepResult:
        plan = self._plans.popleft()
        self.trace.append((plan.rows, plan.starts, plan.counts, plan.copies, plan.sample_rows, plan.table_blocks))
        assert 0 < sum(plan.counts) <= self._budget
        self.num_computed += sum(plan.counts)
        assert len(set(plan.rows)) == len(plan.rows), "a row advances twice in one step"
        assert all(0 <= row < self._max_num_seqs for row in plan.rows)
        self._apply(plan)
        self._advance_states(plan)
        for entry, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            if entry in plan.stored_entries:
                assert count == 1, "only one token is computed again"
            else:
                self._write(row, start, count)
        for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True):
            self._read(row, start, start + count)
        candidates = [self._candidates(row) for row in plan.sample_rows]
        token_ids, results = self._sample(plan)
        return StepResult(token_ids, candidates if any(candidates) else None, rates=self._rates, rows=results)

    def fail(self, plan: StepPlan) -> None:
        """Leave garbage behind wherever a plan says that something is to be written."""
        self._begin(plan)
        for _, block in plan.swap_outs:
            self._fill(self._swap_slots, block, [EMPTY] * self._block_size)
        for _, block in plan.swap_ins + plan.copies:
            self._fill(self._slots, block, [EMPTY] * self._block_size)
        self._move_states(plan.state_outs, self.states, self._swapped_states)
        for slot in (*(copy.dst for copy in plan.state_ins), *_written_slots(plan)):
            self.states[slot] = None
        for entry, (row, start, count) in enumerate(zip(plan.rows, plan.starts, plan.counts, strict=True)):
            for position in range(start, start + count) if entry not in plan.stored_entries else ():
                self._slots[self._slot(row, position)] = EMPTY

    def _apply(self, plan: StepPlan) -> None:
        self._begin(plan)
        self._copy(plan.swap_outs, self._slots, self._swap_slots)
        self._copy(plan.swap_ins, self._swap_slots, self._slots)
        self.num_swapped += len(plan.swap_outs) + len(plan.swap_ins)
        assert not {copy.dst for copy in plan.copies} & {copy.src for copy in plan.copies}, "a copy of a copy"
        self._copy(plan.copies, self._slots, self._slots)
        self._move_states(plan.state_outs, self.states, self._swapped_states)
        self._move_states(plan.state_ins, self._swapped_states, self.states)

    def _move_states(
        self, copies: list[BlockCopy], sources: "list[FakeState | None]", destinations: "list[FakeState | None]"
    ) -> None:
        assert len({copy.dst for copy in copies}) == len(copies), "two copies into one slot"
        for src, dst in copies:
            assert sources[src] is not None, f"slot {src} is copied, but nothing was ever written there"
            destinations[dst] = sources[src]

    def _advance_states(self, plan: StepPlan) -> None:
        """Read the state of each entry, which must be its row's, then write all."""
        if not self.states:
            assert not plan.states
            return
        reads, writes = [state.read for state in plan.states], _written_slots(plan)
        assert len(set(writes)) == len(writes), f"slots {writes} are written twice"
        for state in plan.states:
            others = [slot for slot in reads if slot == state.write and slot != NONE]
            assert len(others) <= (state.read == state.write), f"slot {state.write} is read by others"
            taken = {slot for _, slot in state.snapshots}
            assert taken.isdisjoint(reads), "a snapshot over a state that is read"
        before = [None if state.read == NONE else self.states[state.read] for state in plan.states]
        entries = zip(plan.rows, plan.starts, plan.counts, plan.states, before, strict=True)
        for row, start, count, state, own in entries:
            tokens, stop = self._tokens[row], start + count
            if state.read == NONE:
                assert state.committed == start == 0, f"row {row} begins at {start}"
            else:
                digest = self._digest(row, state.committed)
                assert own is not None, f"row {row} reads slot {state.read}, where nothing was written"
                assert (own.committed, own.digest) == (state.committed, digest), f"row {row} reads another state"
                held = list(own.ring[: start - state.committed])
                assert held == tokens[state.committed : start], f"row {row} finds {own.ring} at {start}"
            assert state.committed <= state.commit_to <= stop
            self.states[state.write] = FakeState(
                state.commit_to, self._digest(row, state.commit_to), tuple(tokens[state.commit_to : stop])
            )
            for position, slot in state.snapshots:
                assert state.committed < position <= state.commit_to
                self.states[slot] = FakeState(position, self._digest(row, position), ())

    def _copy(self, copies: list[BlockCopy], sources: list[int], destinations: list[int]) -> None:
        size = self._block_size
        assert len({copy.dst for copy in copies}) == len(copies), "two copies into one block"
        for src, dst in copies:
            assert sources[src * size] != EMPTY, f"block {src} is copied, but nothing was ever written there"
            self._fill(destinations, dst, sources[src * size : (src + 1) * size])

    def _fill(self, slots: list[int], block: int, content: list[int]) -> None:
        assert 0 <= block < len(slots) // self._block_size, f"no block {block}"
        slots[block * self._block_size : (block + 1) * self._block_size] = content

    def _begin(self, plan: StepPlan) -> None:
        for fork in plan.row_forks:
            self._fork(fork)
        for new in plan.new_rows:
            self._rows[new.row] = new
            self._tokens[new.row] = list(new.token_ids)
            self._tables[new.row] = list(map(int, new.block_ids))
        for row, column, block in zip(plan.table_rows, plan.table_columns, plan.table_blocks, strict=True):
            table = self._tables[row]
            table.extend([NULL_BLOCK] * (column + 1 - len(table)))
            table[column] = block
        for row, start, drafts in plan.drafts:
            assert start == len(self._tokens[row]), "drafts that do not follow the known tokens"
            self._tokens[row] += drafts

    def _fork(self, fork: RowFork) -> None:
        known = [*self._tokens[fork.source][: fork.num_tokens], fork.token_id]
        if fork.row != fork.source:
            self._tables[fork.row] = list(map(int, fork.block_ids))
        self._tokens[fork.row] = known

    def _candidates(self, row: int) -> TokenLogprobs | None:
        """The likeliest tokens of a beam, behind the one that is sampled. Before that one is known."""
        new = self._rows[row]
        if new.beam is None:
            return None
        logprobs = self.next_logprobs(self._tokens[row])
        ranked = sorted(range(len(logprobs)), key=lambda token: -logprobs[token])
        ids = [ranked[0], *ranked[: num_candidates(new.beam, len(new.eos_token_ids))]]
        return TokenLogprobs(ids, [logprobs[token] for token in ids], [1, *range(1, len(ids))])

    def _slot(self, row: int, position: int) -> int:
        block = self._tables[row][position // self._block_size]
        assert block >= 0, f"row {row} has no block at position {position}"
        return block * self._block_size + position % self._block_size

    def _digest(self, row: int, stop: int) -> int:
        digest = 0
        for token in self._tokens[row][:stop]:
            digest = extend_digest(digest, token)
        return digest

    def _write(self, row: int, start: int, count: int) -> None:
        tokens = self._tokens[row]
        assert count >= 1
        assert start + count <= len(tokens), "more tokens computed than known"
        digest = self._digest(row, start)
        for position in range(start, start + count):
            digest = extend_digest(digest, tokens[position])
            self._slots[self._slot(row, position)] = digest

    def _read(self, row: int, start: int, stop: int) -> None:
        digest = 0
        first_seen = 0 if self._window is None else max(0, start - self._window + 1)
        for position, token in enumerate(self._tokens[row][:stop]):
            digest = extend_digest(digest, token)
            if position >= first_seen:
                assert self._slots[self._slot(row, position)] == digest, f"row {row} reads wrong keys at {position}"

    def _sample(self, plan: StepPlan) -> tuple[list[int], dict[int, RowResult]]:
        """Draw all samples; keep the drafts that equal them."""
        drafts, sampled = {each.row: each for each in plan.drafts}, dict[int, list[int]]()
        places = [
            (row, start + offset)
            for row, start, count in zip(plan.rows, plan.starts, plan.counts, strict=True)
            for offset in range(count)
        ]
        token_ids = []
        for row, flat in zip(plan.sample_rows, plan.sample_tokens, strict=True):
            source, stop = places[flat][0], places[flat][1] + 1
            tokens, first = self._tokens[row], drafts[row].start if row in drafts else len(self._tokens[row])
            assert stop == first + len(sampled.get(row, ())), "sampled out of order, or before all tokens were computed"
            assert self._tokens[source][:stop] == tokens[:stop], "sampled from another prefix"
            token_ids.append(next_token(self._digest(row, stop), self._rows[row].seed))
            sampled.setdefault(row, []).append(token_ids[-1])
        for row, tokens in sampled.items():
            if row not in drafts:
                self._tokens[row] += tokens
        starts = dict(zip(plan.rows, plan.starts, strict=True))
        return token_ids, {row: self._verify(each, starts[row], sampled[row]) for row, each in drafts.items()}

    def _verify(self, drafts: RowDrafts, start: int, sampled: list[int]) -> RowResult:
        num_kept = next((i for i, draft in enumerate(drafts.token_ids) if draft != sampled[i]), len(drafts.token_ids))
        self._tokens[drafts.row][drafts.start :] = kept = sampled[: num_kept + 1]
        return RowResult(kept, num_computed=drafts.start - start + num_kept)
