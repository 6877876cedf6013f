"""Sealing of events: what a record has in place of tokens, salts and names of clients.

The scheduler looks at tokens in two ways only: the prefix cache compares a token with one that has the same tokens
before it in the same scope, and some tokens end a sequence. So a token becomes a number that depends on its position,
the number before it and itself, by BLAKE2b with a key that the process draws and never writes: two tokens have the same
number where all tokens before them are equal, too, and a file cannot be searched for a known prompt. A token that ends
its sequence becomes END. Salts and clients become digests with the same key. Parameters that only change what is
sampled, texts and grammars are left out.
"""

from array import array
from collections.abc import Iterable
from dataclasses import replace
from hashlib import blake2b
from secrets import token_bytes
from struct import Struct as Layout

import msgspec

from quire.core.deltas import TokenLogprobs
from quire.core.plan import RowResult, StepResult
from quire.core.pooling import BeamTask, Scope
from quire.core.sampling_params import BeamSearchParams, RepetitionDetectionParams, RepetitionDetector, SamplingParams
from quire.core.sequence import Request, Sequence
from quire.core.structured_outputs import StructuredOutputsParams
from quire.core.token_ids import PackedTokens
from quire.scheduling.async_scheduling import must_see_tokens
from quire.scheduling.scheduler import Scheduler

END = 0
_FIRST = 1                       # the number before the first token
_ANY_GRAMMAR = StructuredOutputsParams(regex=".*")  # a model's states stay behind what a late mask may take back
_place = Layout("=qqq").pack
_PLAIN_CLIENTS = ("", "operator")


class Sealer:
    """Seals the requests and results of one run. `scheduler` has been given all that was sealed before.

    `keeps_tokens`: tokens and parameters stay as they are; salts and clients do not.
    """

    def __init__(self, scheduler: Scheduler, *, keeps_tokens: bool = False) -> None:
        self._scheduler, self._keeps_tokens, self._key = scheduler, keeps_tokens, token_bytes(32)
        self._ends: dict[int, frozenset[int]] = {}                          # tokens that end a request, by its id
        self._detections: dict[int, RepetitionDetectionParams] = {}         # what else does, likewise
        self._repeats: dict[int, tuple[RepetitionDetector, list[int]]] = {}  # and its outputs, by sequence

    # --- requests -------------------------------------------------------------------------------------------------

    def request(self, request: Request) -> Request:
        """Return a request that is scheduled alike."""
        salt, adapter = map(self._name, request.scope)
        scope, client_id = Scope(salt, adapter), self._client(request.client_id)
        if self._keeps_tokens:
            return replace(request, scope=scope, client_id=client_id, owner="")
        ends = request.eos_token_ids | request.stop_token_ids
        detection = request.params.repetition_detection
        if len(self._ends) > 2 * len(self._scheduler.queues.requests) + 64:
            self._forget()
        self._ends[request.request_id] = ends
        if detection is not None:
            self._detections[request.request_id] = detection
        given, task = request.params, request.task
        params = SamplingParams(
            n=given.n, max_tokens=given.max_tokens, min_tokens=given.min_tokens,
            ttft_deadline_ms=given.ttft_deadline_ms, deadline_ms=given.deadline_ms,
            prompt_logprobs=None if request.reads_cache or request.keeps_state else 0,
            presence_penalty=1.0 if must_see_tokens(request) and not isinstance(task, BeamTask) else 0.0,
            structured_outputs=None if given.structured_outputs is None else _ANY_GRAMMAR,
        )  # fmt: skip
        if isinstance(task, BeamTask):
            beam = task.params
            task = BeamTask(BeamSearchParams(
                beam.beam_width, beam.max_tokens, ignore_eos=beam.ignore_eos, length_penalty=beam.length_penalty
            ))  # fmt: skip
        return Request(
            request.request_id, self._prompt(request.prompt_token_ids), params, request.seed, request.max_tokens,
            frozenset({END}) if ends or detection else frozenset(), task=task, scope=scope, priority=request.priority,
            client_id=client_id, weight=request.weight,
        )  # fmt: skip

    def _forget(self) -> None:
        requests = self._scheduler.queues.requests
        self._ends = {number: ends for number, ends in self._ends.items() if number in requests}
        self._detections = {number: each for number, each in self._detections.items() if number in requests}
        live = {sequence.seq_id for request in requests.values() for sequence in request.live}
        self._repeats = {seq_id: kept for seq_id, kept in self._repeats.items() if seq_id in live}

    def _client(self, client_id: str) -> str:
        """Return the number of a key as it is; a connection has an address."""
        is_key = client_id in _PLAIN_CLIENTS or client_id.startswith("key:")
        return client_id if is_key else self._name(client_id) or ""

    def _name(self, text: str | None) -> str | None:
        return None if text is None else blake2b(text.encode(), digest_size=8, key=self._key).hexdigest()

    # --- tokens ---------------------------------------------------------------------------------------------------

    def _prompt(self, token_ids: Iterable[int]) -> PackedTokens:
        sealed, last = array("i"), _FIRST
        for position, token in enumerate(token_ids):
            last = self._number(position, last, token)
            sealed.append(last)
        return sealed

    def _number(self, position: int, before: int, token: int) -> int:
        digest = blake2b(_place(position, before, token), digest_size=4, key=self._key).digest()
        return int.from_bytes(digest, "big") >> 1 or 1

    def _next(self, request: Request, sequence: Sequence, num_before: int, before: int, token: int) -> int:
        """Return the number of a sampled token behind `num_before` others, the last of which is `before`."""
        is_end = token in self._ends[request.request_id]
        if (detection := self._detections.get(request.request_id)) is not None:
            detector, output = self._repeats.setdefault(sequence.seq_id, (RepetitionDetector(detection), []))
            is_end |= not is_end and detector.append(output, token)
            output.append(token)
        return END if is_end else self._number(num_before, before, token)

    # --- results --------------------------------------------------------------------------------------------------

    def result(self, result: StepResult) -> StepResult:
        """Return the result of the scheduler's step with sealed tokens."""
        if self._keeps_tokens:
            return result
        step = self._scheduler.step
        token_ids, logprobs = list[int](), list[TokenLogprobs | None]()
        for place, (request, sequence) in enumerate(step.sampled):
            is_own = sequence.row not in result.rows and sequence.num_tokens > 0
            candidates = None if result.logprobs is None else result.logprobs[place]
            if isinstance(request.task, BeamTask):
                token_ids.append(END)
                logprobs.append(self._candidates(request, sequence, candidates))
                continue
            before = (sequence.num_tokens, sequence.token_ids[-1])
            token_ids.append(self._next(request, sequence, *before, result.token_ids[place]) if is_own else END)
            logprobs.append(None)
        return msgspec.structs.replace(
            result, token_ids=token_ids, logprobs=logprobs if any(logprobs) else None, rows=self._rows(result)
        )

    def _rows(self, result: StepResult) -> dict[int, RowResult]:
        if not result.rows:
            return {}
        owners = {
            sequence.row: (request, sequence)
            for request in self._scheduler.queues.running
            for sequence in request.live
        }
        return {row: self._row(*owners[row], each) for row, each in result.rows.items() if row in owners}

    def _row(self, request: Request, sequence: Sequence, row: RowResult) -> RowResult:
        num_known, last, sealed = sequence.num_tokens, sequence.token_ids[-1], list[int]()
        for token in () if isinstance(request.task, BeamTask) else (*row.token_ids, *row.forced):
            last = self._next(request, sequence, num_known + len(sealed), last, token)
            sealed.append(last)
        num_drawn = len(row.token_ids)
        candidates = None
        if isinstance(request.task, BeamTask):
            sealed = [END] * num_drawn
            candidates = [self._candidates(request, sequence, each) for each in row.logprobs or ()]
        return msgspec.structs.replace(
            row, token_ids=sealed[:num_drawn], forced=sealed[num_drawn:], logprobs=candidates or None,
            drafts=[END] * len(row.drafts), pooled=None,
        )  # fmt: skip

    def _candidates(
        self, request: Request, sequence: Sequence, candidates: TokenLogprobs | None
    ) -> TokenLogprobs | None:
        """Return the candidates of a beam: their logprobs decide which beams survive."""
        if candidates is None:
            return None
        ends, num_known, last = self._ends[request.request_id], sequence.num_tokens, sequence.token_ids[-1]
        numbers = [END if each in ends else self._number(num_known, last, each) for each in candidates.token_ids]
        return TokenLogprobs(numbers, candidates.logprobs, candidates.ranks)
