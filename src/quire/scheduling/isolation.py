"""Isolation of the request that makes steps fail, by group testing (Dorfman 1943), bisected.

After a failed step the requests that it computed for are suspects. They are computed again in halves, one group at a
time, and a group with a failing step is halved again. A suspect is cleared when all of its tokens are computed again;
cleared and uninvolved requests are held meanwhile, so a failure never has another cause than the group. A group of one
that fails is the culprit if a probe, a request of one token that no client sent, succeeds after it: then the device and
the engine work, and the culprit is failed alone. Where the probe fails, or MAX_FRUITLESS isolations of the same
requests in succession have found no culprit, or steps fail that compute for no request, the engine has to end.

Nothing that a failed step computed is kept, so the tokens of all other requests are the same as without it. Runs
between steps; costs nothing while no step fails.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from quire.core.deltas import SequenceDelta
from quire.core.pooling import Scope
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.scheduling.scheduler import Scheduler

PROBE_ID = -(1 << 62)  # requests of clients count up from 0, pins down from -1
MAX_FRUITLESS = 3     # isolations without a culprit, each of some requests of the one before and within QUIET_STEPS
QUIET_STEPS = 128     # steps without a failure, after which earlier ones are forgotten


@dataclass(frozen=True, slots=True)
class _Accusation:
    """A request with a failing step although it was computed alone, until the probe shows whether it is the cause."""

    request_id: int
    reason: str


class Isolation:
    """The state of one isolation, or of none. Decides what the scheduler may run in the next step."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: list[list[int]] = []      # suspects that wait to be tested; the last group is next
        self._testing: list[int] = []           # suspects that are computed now, and no other request
        self._targets: dict[int, int] = {}      # tokens that each branch of a suspect has to have computed
        self._cleared: frozenset[int] = frozenset()  # suspects of the last isolation, if it has found no culprit
        self._accusation: _Accusation | None = None
        self.is_active = self._has_culprit = False  # active: some requests are held until suspects have been tested
        self._num_fruitless = self._num_quiet_steps = self._num_blank = 0

    def start_step(self) -> None:
        """Hold every request that the next step must not compute for; release all if no suspect is left."""
        self._advance()
        if self.is_active:
            tested = {PROBE_ID} if self._accusation is not None else set(self._testing)
            self._scheduler.hold_all_but(tested)

    def record_failure(self, suspects: Iterable[int], reason: str, *, is_certain: bool) -> bool:
        """Take a step that has failed and was undone. Return False if the engine has to end.

        `is_certain`: the failure arose while the only suspect was planned or recorded.
        """
        alive = [each for each in suspects if each in self._scheduler.queues.requests]
        if self._accusation is not None or not self._may_go_on(alive):
            return False
        was_alone = len(alive) == 1 and (is_certain or self._testing == alive)
        untested = [each for each in self._testing if each not in alive]
        self._testing, self.is_active = [], bool(self.is_active or alive)
        if untested:
            self._groups.append(untested)
        if was_alone:
            self._accuse(_Accusation(alive[0], reason))
        elif alive:
            self._suspect(alive)
        return True

    def record_success(self, deltas: list[SequenceDelta]) -> list[SequenceDelta]:
        """Take a step that has succeeded, and return its deltas, without those of a probe.

        The error of a request that is thereby known to make steps fail is one more.
        """
        self._num_blank = 0
        if not self.is_active:
            self._num_quiet_steps += 1
            return deltas
        deltas = [delta for delta in deltas if delta.request_id != PROBE_ID]
        if self._accusation is None or PROBE_ID in self._scheduler.queues.requests:
            return deltas
        accused, self._accusation = self._accusation, None
        self._has_culprit = True
        if not self._scheduler.abort(accused.request_id):
            return deltas                                               # its client has disconnected
        return [*deltas, SequenceDelta(accused.request_id, 0, [], error=accused.reason)]

    def _may_go_on(self, alive: list[int]) -> bool:
        """Count failures for which no request answers: one in succession is borne, as are some isolations in vain."""
        if not alive:
            self._num_blank += 1
        if not self.is_active and (self._num_quiet_steps >= QUIET_STEPS or self._cleared.isdisjoint(alive)):
            self._num_fruitless = 0
        return self._num_blank <= 1 and (self.is_active or self._num_fruitless < MAX_FRUITLESS)

    def _suspect(self, alive: list[int]) -> None:
        """Split suspects in two groups, the first of which is tested next."""
        requests = self._scheduler.queues.requests
        for each in alive:
            self._targets[each] = max(sequence.num_tokens for sequence in requests[each].live)
        middle = (len(alive) + 1) // 2
        self._groups += [group for group in (alive[middle:], alive[:middle]) if group]

    def _accuse(self, accusation: _Accusation) -> None:
        self._accusation = accusation
        self._scheduler.requeue_running()
        params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
        self._scheduler.add(Request(PROBE_ID, pack_tokens([0]), params, seed=0, max_tokens=1, scope=Scope("probe")))

    def _advance(self) -> None:
        """Drop suspects that are cleared or have ended; test the next group when none is left of this one."""
        if self._accusation is not None:
            return
        self._testing = [each for each in self._testing if not self._is_cleared(each)]
        while not self._testing and self._groups:
            self._testing = [each for each in self._groups.pop() if not self._is_cleared(each)]
            self._scheduler.requeue_running()
        if not self._testing:
            self._end()

    def _is_cleared(self, request_id: int) -> bool:
        request = self._scheduler.queues.requests.get(request_id)
        if request is None:
            return True
        return min(sequence.num_computed_tokens for sequence in request.live) >= self._targets[request_id]

    def _end(self) -> None:
        """Let all requests run together again."""
        self._num_fruitless = 0 if self._has_culprit else self._num_fruitless + 1
        self.is_active = self._has_culprit = False
        self._num_quiet_steps, self._cleared = 0, frozenset(self._targets)
        self._targets.clear()
        self._scheduler.release_all()
