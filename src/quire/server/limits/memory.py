"""Memory bounds on what requests hold: their bodies, their images, and the logprobs of running calls.

A body counts from its first byte until its prompts are tokenized. Its bound has two parts: a quarter is reserved for
small bodies, so that a few large unfinished ones cannot exclude them. When a part is full, the client with the most
bytes loses its unfinished body that has received nothing for longest. A complete body is never dropped. One client
holds at most half of a part. For logprobs a call reserves its maximum before it is queued, so that an admitted call
never fails for lack of memory. Images count as the model gets them, from their decoding until the call's end.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from quire.core.logprob_table import CANDIDATE_BYTES, width_of
from quire.core.sequence import Request
from quire.engine.requests.input_processor import PreparedRequest
from quire.server.errors import image_memory_full, invalid, logprob_memory_full
from quire.server.options import Limits

SMALL_BYTES = 16 << 10
_SMALL_SHARE = 4          # reciprocal of the share for small bodies


class BodyMemoryFullError(Exception):
    """A body exceeds the bound and is dropped."""


class BodyMemory:
    """The bound and the bodies that count towards it. Lives on the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.small_bytes = min(SMALL_BYTES, max_bytes // 64)
        self.small, self.large = _Part(max_bytes // _SMALL_SHARE), _Part(max_bytes - max_bytes // _SMALL_SHARE)

    @property
    def num_bytes(self) -> int:
        """Count the bytes of all bodies."""
        return self.small.num_bytes + self.large.num_bytes

    def check(self) -> None:
        """Assert that the counts agree with the bodies."""
        for part in (self.small, self.large):
            held = Counter[str]()
            for body in part.bodies:
                held[body.client_id] += body.num_bytes
            assert +held == +part.num_client_bytes, (held, part.num_client_bytes)
            assert part.num_bytes == held.total() <= part.max_bytes


class _Part:
    """Bodies of one size class, ordered by the time of their last byte, oldest first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bodies: dict[BufferedBody, None] = {}
        self.num_client_bytes = Counter[str]()
        self.num_bytes = 0

    def add(self, body: "BufferedBody") -> None:
        """Add a body with all its bytes, as the one that has grown most recently."""
        self.bodies[body] = None
        self.num_client_bytes[body.client_id] += body.num_bytes
        self.num_bytes += body.num_bytes

    def remove(self, body: "BufferedBody") -> None:
        """Remove a body and its bytes."""
        del self.bodies[body]
        self.num_bytes -= body.num_bytes
        self.num_client_bytes[body.client_id] -= body.num_bytes
        if not self.num_client_bytes[body.client_id]:
            del self.num_client_bytes[body.client_id]

    def make_room(self, newcomer: "BufferedBody") -> None:
        """Drop bodies of clients that hold more than the newcomer's client, or raise BodyMemoryFullError."""
        while self.num_bytes > self.max_bytes:
            unfinished = (body for body in self.bodies if not body.is_complete)
            victim = max(unfinished, key=lambda body: self.num_client_bytes[body.client_id])  # the first of equals
            if self.num_client_bytes[victim.client_id] <= self.num_client_bytes[newcomer.client_id]:
                raise BodyMemoryFullError
            victim.drop()


class BufferedBody:
    """One body. `on_drop` is called when it is dropped for another client's."""

    def __init__(self, bodies: BodyMemory, client_id: str, on_drop: Callable[[], None]) -> None:
        self.client_id, self.num_bytes, self.is_dropped = client_id, 0, False
        self.is_complete = False            # its receiver sets it
        self._bodies, self._on_drop = bodies, on_drop
        self._part: _Part | None = None     # the part that it counts towards, once it has bytes

    def grow(self, num_bytes: int) -> None:
        """Count received bytes. BodyMemoryFullError past the bound: the caller releases the body."""
        if self.is_dropped:
            raise BodyMemoryFullError
        if self._part is not None:
            self._part.remove(self)
        self.num_bytes += num_bytes
        self._part = self._bodies.small if self.num_bytes <= self._bodies.small_bytes else self._bodies.large
        self._part.add(self)
        if self._part.num_client_bytes[self.client_id] > self._part.max_bytes // 2:
            raise BodyMemoryFullError
        if self._part.num_bytes > self._part.max_bytes:
            self._part.make_room(self)

    def drop(self) -> None:
        """Release the body in favour of another one."""
        self.is_dropped = True
        self.release()
        self._on_drop()

    def release(self) -> None:
        """Stop counting the body's bytes. Idempotent."""
        if self._part is not None:
            self._part.remove(self)
            self._part = None


class ImageMemory:
    """Bytes of the images of all calls under way, at most half of `max_bytes` for one client. On the event loop."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_client_bytes = Counter[str]()

    def reserve(self, client_id: str, num_own_bytes: int, num_bytes: int, where: str) -> None:
        """Count an image of a call that holds `num_own_bytes` already; `where`: its place in the body.

        ApiError 400 if the call alone has too much, 429 if it does with other calls.
        """
        most = self.max_bytes // 2
        if num_own_bytes + num_bytes > most:
            invalid(
                f"{where}: the images of the request come to {num_own_bytes + num_bytes} bytes, and may have {most}: "
                f"half of max_total_image_bytes", param=where,
            )  # fmt: skip
        held = self.num_client_bytes
        if held[client_id] + num_bytes > most or held.total() + num_bytes > self.max_bytes:
            raise image_memory_full(held.total(), self.max_bytes)
        held[client_id] += num_bytes

    def release(self, client_id: str, num_bytes: int) -> None:
        """Stop counting bytes of a client's images."""
        self.num_client_bytes[client_id] -= num_bytes
        assert self.num_client_bytes[client_id] >= 0, f"{client_id} has {self.num_client_bytes[client_id]} image bytes"
        if not self.num_client_bytes[client_id]:
            del self.num_client_bytes[client_id]


class LogprobMemory:
    """Bytes reserved for packed logprobs, at most `max_logprob_bytes` in all."""

    def __init__(self) -> None:
        self.num_bytes = 0                       # reserved by running calls
        self._nothing = LogprobReservation(self, 0)

    def reserve(self, prepared: Sequence[PreparedRequest], limits: Limits) -> "LogprobReservation":
        """Reserve memory for a call. ApiError 400 if it alone exceeds the bound, 429 if it does with other calls."""
        params = prepared[0].request.params      # the same for all prompts of a call
        if params.logprobs is None and params.prompt_logprobs is None and params.prompt_logprob_token_ids is None:
            return self._nothing
        requests = [each.request for each in prepared]
        num_candidates = sum(_num_output_candidates(request) for request in requests)
        most = limits.max_output_candidates
        if num_candidates > most:
            invalid(
                f"{len(requests)} prompts with n {params.n}, max_tokens {requests[0].max_tokens} and logprobs "
                f"{params.logprobs} come to {num_candidates} logprobs: one call may have at most {most} "
                f"(max_output_candidates)",
                param="logprobs",
            )
        num_candidates += sum(_num_prompt_candidates(request) for request in requests)
        num_bytes, most = CANDIDATE_BYTES * num_candidates, limits.max_logprob_bytes
        if num_bytes > most:
            invalid(f"the logprobs of the call may take {num_bytes} bytes: at most {most} (max_logprob_bytes)",
                    param="logprobs")  # fmt: skip
        if self.num_bytes + num_bytes > most:
            raise logprob_memory_full(self.num_bytes, most)
        self.num_bytes += num_bytes
        return LogprobReservation(self, num_bytes)


class LogprobReservation:
    """Memory of one call, until it is released."""

    __slots__ = ("_memory", "_num_bytes")

    def __init__(self, memory: LogprobMemory, num_bytes: int) -> None:
        self._memory, self._num_bytes = memory, num_bytes

    def release(self) -> None:
        """Release the memory. Idempotent."""
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0


def _num_output_candidates(request: Request) -> int:
    asked = request.params.logprobs
    return 0 if asked is None else request.params.n * request.max_tokens * (asked + 1)


def _num_prompt_candidates(request: Request) -> int:
    asked = request.params.prompt_logprobs
    num_each = (0 if asked is None else asked + 1) + width_of(request.params.prompt_logprob_token_ids)
    return len(request.prompt_token_ids) * num_each
