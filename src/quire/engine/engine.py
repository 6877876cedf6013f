"""The step loop: schedule, execute, update (Yu et al. 2022)."""

import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING

import msgspec

from quire.core.block_map import BlockEntry, BlockHolder, BlockMap, Tier
from quire.core.deltas import Admission, BlockLife, SequenceDelta
from quire.core.errors import InvalidRequestError, RankLostError
from quire.core.outputs import KVStats
from quire.core.owner_labels import UNLABELLED
from quire.core.plan import StepPlan
from quire.core.sequence import NO_ROW, Request
from quire.core.step_times import StepTiming, StepWork, chunk_work
from quire.engine.kv_disk import KVDisk
from quire.engine.messages import EngineState
from quire.execution.executor import Executor
from quire.scheduling.fair_share import FairShare
from quire.scheduling.isolation import PROBE_ID, Isolation
from quire.scheduling.queues import RequestQueues
from quire.scheduling.scheduler import Scheduler

if TYPE_CHECKING:  # they load the kernels and llguidance, which a simulated engine does not need
    from quire.decoding.grammars.constrained import ConstrainedDecoding
    from quire.engine.adapters.store import AdapterStore
    from quire.engine.kv_consumer import KVPeers

log = logging.getLogger(__name__)

PREPARATION_WAIT_S = 0.005  # for a grammar or an adapter, if nothing else is to be done; commands are handled between
UNLOADABLE = "its LoRA adapter cannot be loaded any more: the files have changed, or are gone"
TEXT_ALONE = "the model reads text alone"
NO_ADAPTERS = "LoRA adapters are not served: enable_lora is off"


_MAX_REPEATS = 63               # repeats that are kept behind a whole plan
_RUN_BYTES = 128                # Python's own, besides the content
_encode = msgspec.msgpack.Encoder().encode


class RecentPlans:
    """Ring of the latest plans, as events of a record, in at most `max_bytes`. `on_fault`: called when a step failed.

    Plans that compute for the same rows as a whole one before them are kept as their new blocks, which are encoded
    together: in each step the encoder would have to come into the CPU's caches again. Keeping whole plans as objects
    would cost more than encoding them: their lists would not be in the caches any more when they are freed.
    """

    def __init__(self, max_bytes: int, encode_whole: Callable[[float, StepPlan], bytes]) -> None:
        self._encode_whole = encode_whole
        self.on_fault: Callable[[Exception, Scheduler], object] = lambda error, scheduler: None
        self.num_bytes = 0              # without the repeats that are not encoded yet
        self._max_bytes = max_bytes
        self._runs = deque[tuple[bytes, int]]()     # events of a whole plan and its repeats, and their number
        self._num_given_up = 0                      # steps
        self._whole = b""                           # the last whole plan's event; empty: it was given up
        self._rows, self._counts, self._num_samples = list[int](), list[int](), 0                   # its own
        self._repeats = list[tuple[str, float, list[int], list[int], list[int]]]()      # fields of a `Repeated`

    def add(self, now_s: float, plan: StepPlan) -> None:
        """Keep the next plan, and give up the oldest beyond the bound."""
        if (
            plan.rows == self._rows and plan.counts == self._counts and len(plan.sample_rows) == self._num_samples
            and self._whole and len(self._repeats) < _MAX_REPEATS
            and not (plan.new_rows or plan.copies or plan.drafts or plan.swap_outs or plan.row_forks or plan.swap_ins)
        ):  # fmt: skip
            self._repeats.append(("repeated", now_s, plan.table_rows, plan.table_columns, plan.table_blocks))
        else:
            self._end_run()
            self._rows, self._counts, self._num_samples = plan.rows, plan.counts, len(plan.sample_rows)
            self._whole = self._encode_whole(now_s, plan)
            self.num_bytes += len(self._whole) + _RUN_BYTES
            self._give_up()

    def events(self) -> tuple[bytes, int, int]:
        """Return the events that are kept, their number, and the steps before them since the start."""
        self._end_run()
        return b"".join(run for run, _ in self._runs), sum(number for _, number in self._runs), self._num_given_up

    def _end_run(self) -> None:
        """Encode the repeats of the last whole plan."""
        if self._whole:
            number = len(self._repeats)
            repeats = _encode(self._repeats)[1 if number < 16 else 3 :]     # without the head of a list of msgpack
            self._runs.append((self._whole + repeats, 1 + number))
            self.num_bytes += len(repeats)
            self._whole = b""
            self._repeats.clear()
            self._give_up()

    def _give_up(self) -> None:
        """Give up the oldest runs beyond the bound."""
        while self.num_bytes > self._max_bytes and self._runs:
            run, number = self._runs.popleft()
            self.num_bytes -= len(run) + _RUN_BYTES
            self._num_given_up += number
        if self.num_bytes > self._max_bytes:
            self.num_bytes, self._whole = 0, b""
            self._num_given_up += 1


class PromptsLeft:
    """Prompts of running requests that are not computed to their ends, after the last step that computed some."""

    def __init__(self, queues: RequestQueues) -> None:
        self._queues = queues
        self.requests = dict[int, Request]()       # open ones that may have such a prompt, by id
        self.work = StepWork()
        self.chunks: list[tuple[int, int]] = []     # ids of requests, and the tokens that are computed

    def count(self, admitted: Iterable[Request]) -> None:
        """Count anew, with requests that were just admitted."""
        self.requests.update((request.request_id, request) for request in admitted)
        self.work, self.chunks = StepWork(), []
        for request_id, request in list(self.requests.items()):
            num_left = num_computed = 0
            if self._queues.is_running(request):
                num_computed = request.live[0].num_computed_tokens
                num_left = request.live[0].num_prompt_tokens - num_computed
            if num_left > 0:
                self.chunks.append((request_id, num_computed))
                self.work += chunk_work(num_computed, num_left)
            else:
                del self.requests[request_id]


class Engine:
    """A scheduler and an executor. Requests are added; each step returns deltas of their sequences.

    `clock` returns seconds, and is read once per step: the scheduler, which has no clock, plans with what it read, so
    a run with the same requests, results and times has the same plans.
    """

    no_images_reason = TEXT_ALONE  # for which requests with images are refused, where the scheduler plans no encodings

    def __init__(
        self, scheduler: Scheduler, executor: Executor, grammars: "ConstrainedDecoding | None" = None,
        adapters: "AdapterStore | None" = None, clock: Callable[[], float] = time.monotonic,
        disk: KVDisk | None = None, peers: "KVPeers | None" = None,
    ) -> None:  # fmt: skip
        self.scheduler = scheduler
        self.grammars = grammars            # None: requests with grammars are refused
        self.adapters = adapters            # None: requests with adapters are refused
        self.disk = disk                    # None: no keys and values are kept on a disk
        self.peers = peers                  # None: no part in prefill apart from decoding
        self.num_computed_tokens = 0        # computed by the last step
        self.timing: StepTiming | None = None  # how long the last step took; None: it computed nothing
        self.recent: RecentPlans | None = None  # None: plans are not kept
        self.on_submit: Callable[[StepPlan], None] | None = None  # called with each plan before it is submitted
        self._clock = clock
        self.prompts_left = PromptsLeft(scheduler.queues)
        self._isolation = Isolation(scheduler)
        # The requests that may have made the last step fail, and whether the only one was being planned or recorded.
        self._suspects: tuple[list[int], bool] = [], False
        self.executor = executor
        self._in_flight = deque[StepPlan]()  # submitted and not collected

    def add(self, request: Request, age_s: float = 0.0) -> None:
        """Queue a request that was asked `age_s` seconds ago. Raises InvalidRequestError if it could never run."""
        if request.params.structured_outputs is not None and self.grammars is None:
            message = "structured_outputs cannot be used: the model has no tokenizer, or batches are static"
            raise InvalidRequestError(message, param="structured_outputs")
        if request.images:
            self._check_images(request)
        if request.scope.adapter is not None and self.adapters is None:
            raise InvalidRequestError(NO_ADAPTERS, param="model")
        if request.transfer is not None and self.peers is not None:
            self.peers.check(request.transfer)
        if (events := self.scheduler.cache.prefixes.events) is not None and request.scope.adapter is not None:
            events.know_adapter(request.scope.adapter, request.adapter_name, request.adapter_folder)
        request.arrived_s = self._clock() - age_s
        self.scheduler.add(request)

    def _check_images(self, request: Request) -> None:
        """Raise InvalidRequestError for images that the engine does not accept."""
        images = self.scheduler.planner.images
        if images is None:
            raise InvalidRequestError(f"images cannot be used: {self.no_images_reason}", param="images")
        images.inputs.check(request.prompt_token_ids, request.images)
        if (loads := self.scheduler.cache.loads) is not None:
            loads.stored_keys.know(request.images)

    def abort(self, request_id: int) -> bool:
        """Abort a request, and release what it has pinned; return False if it is unknown or has ended."""
        return self.scheduler.abort(request_id)

    def finish(self, request_id: int, index: int) -> bool:
        """Finish one branch at a stop string; return False if it is unknown or has ended."""
        return self.scheduler.finish(request_id, index)

    def step(self) -> list[SequenceDelta]:
        """Run one iteration: choose tokens, compute them, record them.

        If a step fails or is interrupted, every request is recomputed from its known tokens; deltas recorded before are
        returned by the next step.
        """
        self.num_computed_tokens, self.timing = 0, None
        if self._isolation.is_active:
            self._isolation.start_step()
        if self.adapters is not None:
            for request_id in self.adapters.start_step():
                self.scheduler.fail(request_id, UNLOADABLE, param="model")
        if (self.disk is not None or self.peers is not None) and not self._in_flight:
            self.move_blocks()
        try:
            now_s = self._clock()
            plan = self.scheduler.schedule(now_s)
            if self.recent is not None:
                self.recent.add(now_s, plan)
            if not plan.rows:
                if not (deltas := self.scheduler.take_deltas()):
                    self._wait_for_preparation()
                return deltas
            if not self._in_flight:
                self._submit(plan)
            can_be_ahead = len(self._in_flight) < self.executor.max_steps_in_flight and not self._isolation.is_active
            if can_be_ahead and (ahead := self.scheduler.schedule_next()) is not None:
                self._submit(ahead)
            self._in_flight.popleft()
            result = self.executor.collect()
            deltas = self.scheduler.update(plan, result)
        except BaseException as error:
            self._undo(error)
            raise
        if self._in_flight and not self.scheduler.has_requests:
            self._discard()                             # steps of requests that have just ended
            self.scheduler.roll_back()
        step = self.scheduler.step
        self.num_computed_tokens = step.num_tokens
        if step.admitted or self.prompts_left.requests:
            self.prompts_left.count(step.admitted)
        self.timing = StepTiming(plan.kind, result.step_s, result.step_ratio)
        if self.disk is not None:
            self.disk.last_step_s = result.step_s or 0.0
        if self.scheduler.planner.time.num_unmet and not self.scheduler.planner.time.has_warned:
            self._warn_of_target()
        return self._isolation.record_success(deltas)

    @property
    def num_moves_left(self) -> int:
        """Number of operations left for an idle engine: blocks on their way, and leases of other engines."""
        return sum(each.num_left for each in (self.disk, self.peers) if each is not None)

    def move_blocks(self) -> None:
        """Move blocks to and from disks and other engines. For between two steps."""
        for each in (self.disk, self.peers):
            if each is not None:
                each.step()

    def _undo(self, error: BaseException) -> None:
        """Take back a step that has failed or was interrupted: what it affected is queued again."""
        if not self._isolation.is_active:               # else it is the same fault, met again
            self.report_fault(error)
        self._discard()
        is_certain = self.scheduler.step.at is not None
        self._suspects = self.scheduler.roll_back(), is_certain

    def _warn_of_target(self) -> None:
        """Log, once, that steps have no room for prompts within the target."""
        time = self.scheduler.planner.time
        time.has_warned = True
        log.warning(
            "itl_target_ms %.4g cannot be held: beside decodes of %.4g ms no token of a prompt fits, so prompts "
            "advance in one step of %d; the metric quire:itl_target_unmet_total counts such steps",
            time.target_s * 1000, time.decode_s * 1000, time.num_between,
        )  # fmt: skip

    def _wait_for_preparation(self) -> None:
        """Wait for what the next waiting request lacks, if there is one."""
        if self.scheduler.queues.wait_reasons.current == "kv_load":
            reader = self.peers if self.peers is not None and self.peers.is_reading else self.disk
            if reader is not None:
                reader.wait(PREPARATION_WAIT_S)
            return
        preparing = self.adapters if self.scheduler.queues.wait_reasons.current == "adapter" else self.grammars
        if preparing is not None and self.scheduler.has_requests:
            preparing.wait(PREPARATION_WAIT_S)

    def _submit(self, plan: StepPlan) -> None:
        if self.on_submit is not None:
            self.on_submit(plan)
        self.executor.submit(plan)
        self._in_flight.append(plan)

    def _discard(self) -> None:
        """Collect and drop the steps in flight."""
        while self._in_flight:
            self._in_flight.popleft()
            with suppress(Exception):               # no result is wanted: their requests ended, or are recomputed
                self.executor.collect()

    def close(self) -> None:
        """Wait for the steps in flight, whose requests have ended."""
        self._discard()

    def report_fault(self, error: BaseException) -> None:
        """Have the plans before an error of the engine written to a file, where they are kept. Once for each error."""
        if self.recent is not None and isinstance(error, Exception):
            self.recent.on_fault(error, self.scheduler)

    def recover(self, error: Exception) -> list[SequenceDelta]:
        """Recover from a step that has just failed: the next steps isolate the request that makes them fail.

        Returns the deltas recorded before. Raises `error` if no request is the cause (quire.scheduling.isolation, or
        RankLostError), and AssertionError if the failed step has leaked blocks or rows.
        """
        if isinstance(error, RankLostError):
            raise error
        self.scheduler.check()
        reason = f"its step has failed: {error!r}"
        suspects, is_certain = self._suspects
        if not self._isolation.record_failure(suspects, reason, is_certain=is_certain):
            raise error
        return [delta for delta in self.scheduler.take_deltas() if delta.request_id != PROBE_ID]

    def take_block_lives(self) -> list[BlockLife]:
        """Return, once, the measured blocks that were evicted."""
        measured = self.scheduler.measured
        if measured is None:
            return []
        lives, measured.lives = measured.lives, []
        return lives

    @property
    def admissions(self) -> list[Admission]:
        """Requests that the last step admitted."""
        if not self.scheduler.step.admitted:
            return []
        return [
            Admission(
                r.request_id, r.num_preemptions, r.num_cached_tokens, tuple(r.waited), r.num_recomputed_tokens,
                r.num_swapped_blocks, r.num_disk_tokens, r.num_peer_tokens, r.num_stateless_tokens,
            )
            for r in self.scheduler.step.admitted
            if r.request_id != PROBE_ID
        ]  # fmt: skip

    def state(self, kv: KVStats) -> EngineState:
        """Return the state between two steps, with the events since the last call; `kv` are statistics of the cache.

        The adapters of requests, and the shares of clients, are counted when blocks by owner are: that takes time with
        the number of requests.
        """
        scheduler, is_count_due = self.scheduler, kv.blocks_by_owner is not None
        events = scheduler.cache.prefixes.events
        return EngineState(
            num_running=len(scheduler.queues.running),
            num_waiting=len(scheduler.queues.waiting) + len(scheduler.queues.held),
            num_swapped=len(scheduler.queues.swapped),
            kv=kv,
            pins=scheduler.cache.pins.ids,
            num_pinned_blocks=scheduler.limits.num_pinned_blocks,
            num_running_seqs=scheduler.queues.num_running_seqs,
            waits_for=scheduler.queues.wait_reasons.current,
            num_deferred=scheduler.queues.num_deferred,
            prompts_left=self.prompts_left.work,
            step_times=scheduler.planner.time.times,
            num_itl_unmet=scheduler.planner.time.num_unmet,
            graphs=self.executor.graphs,
            adapters=self.adapters.use() if self.adapters is not None and is_count_due else None,
            shares=scheduler.order.served() if isinstance(scheduler.order, FairShare) and is_count_due else None,
            kv_events=b"" if events is None else events.take_events(),
        )

    def kv_stats(self, *, by_owner: bool = True) -> KVStats:
        """Return the state of the KV cache between two steps, and what preemptions have cost.

        With `by_owner`, which takes longer, also the blocks of each owner.
        """
        preemptions = self.scheduler.preemption.stats
        return replace(
            self.scheduler.cache.stats(),
            blocks_by_owner=count_blocks_by_owner(self.scheduler) if by_owner else None,
            preemptions=preemptions.num_preemptions.copy(),
            recomputed_tokens=preemptions.num_recomputed_tokens,
            swap_s=preemptions.swap_s,
            recompute_s=preemptions.recompute_s,
            recovery_saved_s=preemptions.saved_s,
            disk={} if self.disk is None else self.disk.stats(),
            transfer={} if self.peers is None else self.peers.stats(),
            images={} if (images := self.scheduler.planner.images) is None else images.stats(),
        )

    def block_map(self, first: int, count: int, tier: Tier = "kv") -> BlockMap:
        """Return blocks [first, first + count) of a tier between two steps, with their holders."""
        cache = self.scheduler.cache
        blocks = cache.view_blocks(first, count, tier)
        return BlockMap(first, self.kv_stats(), blocks, list_holders(self.scheduler, blocks), cache.view_all(tier))


def count_blocks_by_owner(scheduler: Scheduler) -> dict[str, int]:
    """Return how many blocks the requests of each label hold. Linear in their tables; nothing without labels."""
    seq_ids = defaultdict[str, list[int]](list)
    for request in scheduler.queues.running:
        if request.owner != UNLABELLED:
            seq_ids[request.owner] += [sequence.seq_id for sequence in request.live if sequence.row != NO_ROW]
    return {owner: scheduler.cache.count_blocks(ids) for owner, ids in seq_ids.items()}


def list_holders(scheduler: Scheduler, blocks: Iterable[BlockEntry]) -> list[BlockHolder]:
    """Return the sequences, and the pins and leases, that hold any of these blocks, in order of arrival."""
    seen = {owner.holder for entry in blocks for owner in entry.owners}
    known = {
        sequence.seq_id: BlockHolder(
            sequence.seq_id, "sequence", sequence.num_computed_tokens, request.request_id, sequence.index, request.owner
        )
        for request in (*scheduler.queues.running, *scheduler.queues.swapped)
        for sequence in request.live
        if sequence.seq_id in seen
    }
    pins, leases = scheduler.cache.pins, scheduler.cache.leases
    request_ids = [-1 - holder for holder in sorted(seen - known.keys(), reverse=True)]
    others = (
        BlockHolder(-1 - each, "pin", pins[each].table.num_tokens, each) if each in pins
        else BlockHolder(-1 - each, "lease", leases[each].num_tokens, each)
        for each in request_ids
    )  # fmt: skip
    return [*known.values(), *others]
