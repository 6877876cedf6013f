"""History of the last calls and what they were made of, so that their owners can ask why they took their time.

Nothing of it costs a step anything: the times are those that are taken down anyway, the tokens those of the answer, and
a miss in the prefix cache is explained only when its owner asks (`cache_misses`). Bounded in bytes, with what the
objects themselves take.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.core.outputs import CompletionOutput, FinishReason, RequestMetrics, RequestOutput
from quire.engine.input_processor import TokenizedPrompt

MAX_CALLS = 1024
# Measured with tracemalloc; tests/server/watch/test_history.py holds them against it.
_CALL_BYTES = 512
_REQUEST_BYTES = 1280      # of a PastRequest with its metrics
_BRANCH_BYTES = 320
_PREEMPTION_BYTES = 640
MissReason = Literal["never_seen", "evicted", "other_salt"]


@dataclass(slots=True, eq=False)
class PastRequest:
    """A request for one prompt, past or under way: its tokens, 4 bytes each, and its times."""

    prompt: TokenizedPrompt                   # without its text and tokens
    metrics: RequestMetrics
    reads_cache: bool = True                  # whoever wants prompt logprobs computes all of the prompt
    prompt_tokens: bytes = b""
    branches: dict[int, "array[int]"] = field(default_factory=dict)
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)  # of the branches that have ended
    is_over: bool = False
    num_counted: int = 0                      # of its bytes, by the history
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0                # of all branches so far

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt.token_ids)
        self.prompt_tokens = array("i", self.prompt.token_ids).tobytes()
        self.prompt = self.prompt._replace(text=None, token_ids=[])

    def append_output(self, output: RequestOutput) -> None:
        """Record the tokens of an output. Each may come once."""
        for piece in output.outputs:
            self.append(piece)

    def append(self, piece: CompletionOutput) -> None:
        """Record the tokens of one branch."""
        branch = self.branches.get(piece.index)
        if branch is None:
            branch = self.branches[piece.index] = array("i")
        branch.fromlist(piece.token_ids)
        self.num_output_tokens += len(piece.token_ids)
        if piece.finish_reason is not None:
            self.finish_reasons[piece.index] = piece.finish_reason

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of all branches so far."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def num_bytes(self) -> int:
        """Memory that the request takes, objects included."""
        objects = _BRANCH_BYTES * len(self.branches) + _PREEMPTION_BYTES * len(self.metrics.preemptions)
        salt = self.prompt.cache_salt
        # an array that grows has room for an eighth more
        return (
            _REQUEST_BYTES + objects + len(self.prompt_tokens) + 9 * self.num_output_tokens // 2
            + (4 * len(salt) if salt else 0)
        )  # fmt: skip


class Miss(NamedTuple):
    """Where the prefix cache had nothing more of a prompt, and why."""

    token: int
    block: int
    reason: MissReason


class History:
    """Calls by the id that their answers carry, the latest MAX_CALLS within `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self._calls: OrderedDict[str, Sequence[PastRequest]] = OrderedDict()
        self._max_bytes, self.num_bytes = max_bytes, 0

    def __len__(self) -> int:
        """Count the calls."""
        return len(self._calls)

    def add(self, call_id: str, requests: Sequence[PastRequest]) -> None:
        """Add a call that has been queued."""
        self._calls[call_id] = requests
        self.num_bytes += _CALL_BYTES
        self._count(requests)

    def finish(self, call_id: str) -> None:
        """Record that a call is over."""
        requests = self._calls.get(call_id, ())
        for request in requests:
            request.is_over = True
        self._count(requests)

    def _count(self, requests: Sequence[PastRequest]) -> None:
        """Count the bytes that requests have come to take; forget the oldest calls where there are too many."""
        for request in requests:
            num_bytes = request.num_bytes
            self.num_bytes += num_bytes - request.num_counted
            request.num_counted = num_bytes
        while self._calls and (len(self._calls) > MAX_CALLS or self.num_bytes > self._max_bytes):
            _, forgotten = self._calls.popitem(last=False)
            self.num_bytes -= _CALL_BYTES + sum(request.num_counted for request in forgotten)

    def find(self, call_id: str, key_number: int) -> Sequence[PastRequest] | None:
        """Return the requests of a call that came with this key; None if there is no such call, or of another key."""
        requests = self._calls.get(call_id)
        return requests if requests and requests[0].prompt.key_number == key_number else None

    def comparable(self, prompt: TokenizedPrompt) -> list[Sequence[PastRequest]]:
        """Return the calls that whoever sent `prompt` may be told of: those of the same key.

        Where there are no keys nobody is told from anybody, so only those with the same salt.
        """
        return [
            requests
            for requests in self._calls.values()
            if requests
            and (past := requests[0].prompt).key_number == prompt.key_number
            and (prompt.key_number != 0 or past.cache_salt == prompt.cache_salt)
        ]
