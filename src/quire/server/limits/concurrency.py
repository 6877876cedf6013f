"""Concurrency limit per client: requests that wait or run, so that one client cannot fill the queue.

A client is an API key, or a connection without keys. A call counts from its admission until its requests finish.
"""

from quire.server.errors import ApiError, too_many_requests


class ConcurrencyReservation:
    """Requests of one call, counted until the first `release`."""

    __slots__ = ("_client_id", "_limiter", "_num_requests", "is_kept")

    def __init__(self, limiter: "ConcurrencyLimiter", client_id: str, num_requests: int) -> None:
        self._limiter, self._client_id, self._num_requests = limiter, client_id, num_requests
        limiter.add(client_id, num_requests)
        self.is_kept = False    # by the generation, which releases it

    def keep(self) -> "ConcurrencyReservation":
        """Keep the reservation beyond the admission; the caller releases it."""
        self.is_kept = True
        return self

    def release(self) -> None:
        """Stop counting the requests. Idempotent."""
        self._limiter.release(self._client_id, self._num_requests)
        self._num_requests = 0


class ConcurrencyLimiter:
    """Number of requests of each client that wait or run. Lives on the event loop."""

    def __init__(self) -> None:
        self._num_requests: dict[str, int] = {}

    def __getitem__(self, client_id: str) -> int:
        """Return the number of a client's requests."""
        return self._num_requests.get(client_id, 0)

    def __len__(self) -> int:
        """Count the clients with requests."""
        return len(self._num_requests)

    def refusal(self, client_id: str, num_requests: int, limit: int) -> ApiError | None:
        """Return the error for so many further requests, or None within the limit; a limit of 0 is none."""
        held = self[client_id]
        return too_many_requests(held, limit) if limit and held + num_requests > limit else None

    def reserve(self, client_id: str, num_requests: int) -> ConcurrencyReservation:
        """Count the requests of a call until the reservation is released."""
        return ConcurrencyReservation(self, client_id, num_requests)

    def add(self, client_id: str, num_requests: int) -> None:
        """Add requests to a client's count."""
        self._num_requests[client_id] = self._num_requests.get(client_id, 0) + num_requests

    def release(self, client_id: str, num_requests: int) -> None:
        """Subtract requests from a client's count, and remove a client without any."""
        if not num_requests:
            return
        left = self._num_requests[client_id] - num_requests
        assert left >= 0, f"{client_id} has {left} requests"
        if left:
            self._num_requests[client_id] = left
        else:
            del self._num_requests[client_id]
