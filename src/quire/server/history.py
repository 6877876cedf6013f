"""History of the latest API requests: their tokens and times, from which their owners get explanations and forks.

Recording costs a step nothing: times are those of the log line, tokens those of the response. A miss in the prefix
cache is explained only when its owner asks (`explain_routes.py`). The history is bounded in bytes, objects included.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.core.checks import shown
from quire.core.images import cache_keys
from quire.core.outputs import CompletionOutput, RequestMetrics
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.server.errors import ApiError

MAX_CALLS = 1024
# Measured with tracemalloc; tests/server/test_history.py compares.
_CALL_BYTES = 512
_REQUEST_BYTES = 1024      # a PastRequest with its metrics
_BRANCH_BYTES = 320
_PREEMPTION_BYTES = 640
_NO_TOKENS = array("i")
MissReason = Literal["never_seen", "evicted", "other_engine", "other_salt", "no_state"]


@dataclass(slots=True, eq=False)
class PastRequest:
    """A running or finished request for one prompt: its tokens, 4 bytes each, and its times.

    The tokens are those that the prefix cache is told: images are numbers below 0.
    """

    prompt: TokenizedPrompt                   # without its text, tokens and images
    metrics: RequestMetrics                   # updated while the request runs
    reads_cache: bool = True                  # False: all of the prompt is computed, for its logprobs
    prompt_tokens: bytes = b""
    branches: dict[int, "array[int]"] = field(default_factory=dict)
    is_over: bool = False
    num_counted_bytes: int = 0                # at the history's last count
    num_prompt_tokens: int = 0
    num_branches: int = 1
    has_images: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.prompt.token_ids)
        self.has_images = bool(self.prompt.images)
        tokens = self.prompt.token_ids
        if self.has_images:
            tokens = cache_keys(tokens, self.prompt.images)
        self.prompt_tokens = tokens.tobytes()
        self.prompt = self.prompt._replace(text=None, token_ids=_NO_TOKENS, images=())

    def append(self, piece: CompletionOutput) -> None:
        """Record the new tokens of one branch."""
        branch = self.branches.get(piece.index)
        if branch is None:
            branch = self.branches[piece.index] = array("i")
        branch.fromlist(piece.token_ids)

    def known_tokens(self, index: int, num_output_tokens: int) -> list[int]:
        """Return the prompt, images as numbers below 0, and the first tokens of a branch, which may have none yet."""
        tokens = array("i", self.prompt_tokens)
        return (tokens + self.branches.get(index, _NO_TOKENS)[:num_output_tokens]).tolist()

    @property
    def num_bytes(self) -> int:
        """Memory that the request takes, objects included."""
        objects = _BRANCH_BYTES * len(self.branches) + _PREEMPTION_BYTES * len(self.metrics.preemptions)
        num_output_tokens = sum(map(len, self.branches.values()))
        salt = self.prompt.cache_salt
        # a growing array has spare room for an eighth more
        return (
            _REQUEST_BYTES + objects + len(self.prompt_tokens) + 9 * num_output_tokens // 2
            + (4 * len(salt) if salt else 0)
        )  # fmt: skip


class Miss(NamedTuple):
    """The first token of a prompt that the prefix cache did not have, its block, and the reason."""

    token: int
    block: int
    reason: MissReason


class History:
    """Calls (API requests) by the id of their response: the latest MAX_CALLS within `max_bytes` in all."""

    def __init__(self, max_bytes: int) -> None:
        self._calls: OrderedDict[str, Sequence[PastRequest]] = OrderedDict()
        self._max_bytes, self.num_bytes = max_bytes, 0

    def __len__(self) -> int:
        """Count the calls."""
        return len(self._calls)

    def add(self, call_id: str, requests: Sequence[PastRequest]) -> None:
        """Add a call when all of its prompts have been queued."""
        self._calls[call_id] = requests
        self.num_bytes += _CALL_BYTES
        self._count(requests)

    def finish(self, call_id: str) -> None:
        """Mark a call as finished: complete, failed or aborted."""
        requests = self._calls.get(call_id, ())
        for request in requests:
            request.is_over = True
        self._count(requests)

    def _count(self, requests: Sequence[PastRequest]) -> None:
        """Count the bytes that requests take now; remove the oldest calls beyond the bounds."""
        for request in requests:
            num_bytes = request.num_bytes
            self.num_bytes += num_bytes - request.num_counted_bytes
            request.num_counted_bytes = num_bytes
        while self._calls and (len(self._calls) > MAX_CALLS or self.num_bytes > self._max_bytes):
            _, removed = self._calls.popitem(last=False)
            self.num_bytes -= _CALL_BYTES + sum(request.num_counted_bytes for request in removed)

    def find(self, call_id: str, key_number: int) -> Sequence[PastRequest]:
        """Return the requests of a call. ApiError 404 if there is no such call, or it has another key."""
        requests = self._calls.get(call_id)
        if requests and requests[0].prompt.key_number == key_number:
            return requests
        message = f"no request {shown(call_id)} of yours is among the last ones"
        raise ApiError(404, message, param="request_id", code="request_not_found")

    def comparable(self, prompt: TokenizedPrompt) -> list[Sequence[PastRequest]]:
        """Return the calls that the owner of `prompt` may learn about: those of the same key.

        Without keys all clients are alike, so only calls with the same salt.
        """
        return [
            requests
            for requests in self._calls.values()
            if requests
            and (past := requests[0].prompt).key_number == prompt.key_number
            and (prompt.key_number != 0 or past.cache_salt == prompt.cache_salt)
        ]
