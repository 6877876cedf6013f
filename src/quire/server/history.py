"""The last requests and what they were made of, so that their owners can ask why they took their time.

Nothing of it costs a step anything: the times are those that are taken down anyway, the tokens those of the answer, and
a miss in the prefix cache is explained only when somebody asks, by a look at the asker's own earlier requests. What
others have asked, under whatever salt, is never looked at: nothing about them can be told.
"""

from array import array
from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from quire.core.outputs import FinishReason, RequestMetrics, RequestOutput
from quire.engine.input_processor import TokenizedPrompt

MAX_CALLS = 1024
MAX_TOKENS = 1 << 22  # of prompts and answers, 16 MiB
MissReason = Literal["never_seen", "evicted", "other_salt"]


@dataclass(slots=True, eq=False)
class PastRequest:
    """A request for one prompt, past or under way: its tokens, 4 bytes each, and its times."""

    prompt: TokenizedPrompt                   # without its text and tokens
    metrics: RequestMetrics
    reads_cache: bool = True                  # whoever wants prompt logprobs computes all of the prompt
    prompt_tokens: bytes = b""
    branches: "defaultdict[int, array[int]]" = field(default_factory=lambda: defaultdict(lambda: array("i")))
    finish_reasons: dict[int, FinishReason] = field(default_factory=dict)  # of the branches that have ended
    is_over: bool = False
    num_counted: int = 0                      # of its tokens, by the history

    def __post_init__(self) -> None:
        self.prompt_tokens = array("i", self.prompt.token_ids).tobytes()
        self.prompt = self.prompt._replace(text=None, token_ids=[])

    def take(self, output: RequestOutput) -> None:
        """Take down the tokens of an output. Each may come once."""
        for piece in output.outputs:
            self.branches[piece.index].fromlist(piece.token_ids)
            if piece.finish_reason is not None:
                self.finish_reasons[piece.index] = piece.finish_reason

    @property
    def num_prompt_tokens(self) -> int:
        """Length of the prompt."""
        return len(self.prompt_tokens) // 4

    @property
    def num_tokens(self) -> int:
        """Tokens of the prompt and of all branches so far."""
        return self.num_prompt_tokens + sum(map(len, self.branches.values()))

    def has_computed(self, prefix: bytes, block_size: int, by_s: float) -> bool:
        """Whether the last token of `prefix` was in a full block of this request, which had begun its answer by then.

        The last token of an answer is never computed.
        """
        began_s, block_bytes = self.metrics.first_token_s, 4 * block_size
        if began_s is None or began_s > by_s:
            return False
        for answer in self.branches.values() or [array("i")]:
            computed = self.prompt_tokens + answer[:-1].tobytes()
            if computed.startswith(prefix) and len(prefix) <= len(computed) // block_bytes * block_bytes:
                return True
        return False


class Miss(NamedTuple):
    """Where the prefix cache had nothing more of a prompt, and why."""

    token: int
    block: int
    reason: MissReason


class History:
    """Calls by the id that their answers carry, the latest MAX_CALLS with MAX_TOKENS in all."""

    def __init__(self) -> None:
        self._calls: OrderedDict[str, Sequence[PastRequest]] = OrderedDict()
        self._num_tokens = 0

    def __len__(self) -> int:
        """Count the calls."""
        return len(self._calls)

    def add(self, call_id: str, requests: Sequence[PastRequest]) -> None:
        """Take in a call that has been queued."""
        self._calls[call_id] = requests
        self._count(requests)

    def end(self, call_id: str) -> None:
        """Take down that a call is over."""
        requests = self._calls.get(call_id, ())
        for request in requests:
            request.is_over = True
        self._count(requests)

    def _count(self, requests: Sequence[PastRequest]) -> None:
        """Count the tokens that requests have brought; forget the oldest calls where there are too many."""
        for request in requests:
            self._num_tokens += request.num_tokens - request.num_counted
            request.num_counted = request.num_tokens
        while len(self._calls) > MAX_CALLS or self._num_tokens > MAX_TOKENS:
            _, forgotten = self._calls.popitem(last=False)
            self._num_tokens -= sum(request.num_counted for request in forgotten)

    def find(self, call_id: str, key_number: int) -> Sequence[PastRequest] | None:
        """Return the requests of a call that came with this key; None if there is no such call, or it was another's."""
        requests = self._calls.get(call_id)
        return requests if requests and requests[0].prompt.key_number == key_number else None

    def explain_miss(self, request: PastRequest, block_size: int) -> Miss | None:
        """Return where the cache had no more of a prompt, None if it had all, or if nobody has looked.

        Where there are no keys nobody is told from anybody, so only those who share the salt are looked at.
        """
        scheduled_s, num_found = request.metrics.first_scheduled_s, request.metrics.num_cached_tokens
        num_wanted = request.num_prompt_tokens - 1  # the last token is always computed
        if not request.reads_cache or scheduled_s is None or num_found >= num_wanted:
            return None
        prefix = request.prompt_tokens[: 4 * (num_found + 1)]
        salts = {
            past.prompt.cache_salt
            for past in self._own(request.prompt)
            if past is not request and past.has_computed(prefix, block_size, scheduled_s)
        }
        has_same = request.prompt.cache_salt in salts
        reason: MissReason = "evicted" if has_same else "other_salt" if salts else "never_seen"
        return Miss(num_found, num_found // block_size, reason)

    def _own(self, prompt: TokenizedPrompt) -> Iterator[PastRequest]:
        for requests in self._calls.values():
            for past in requests:
                is_same_salt = past.prompt.cache_salt == prompt.cache_salt
                if past.prompt.key_number == prompt.key_number and (is_same_salt or prompt.key_number > 0):
                    yield past
