"""Requests that wait or run, counted by client: one client cannot take all places of the queue.

A client is an API key, or a connection where there are no keys. A call holds its places from the moment in which it is
let in until its answer has ended.
"""

from quire.server.errors import ApiError, too_many_requests


class ConcurrencyReservation:
    """Places of one call. Given back once, however often `release` is called."""

    def __init__(self, loads: "ConcurrencyLimiter", client_id: str, num_requests: int) -> None:
        self._loads, self._client_id, self._num_requests = loads, client_id, num_requests
        self.is_kept = False    # by what runs the requests, which releases them

    def keep(self) -> "ConcurrencyReservation":
        """Hand the places over to what runs the requests."""
        self.is_kept = True
        return self

    def release(self) -> None:
        """Give the places back."""
        self._loads.release(self._client_id, self._num_requests)
        self._num_requests = 0


class ConcurrencyLimiter:
    """How many requests of each client wait or run. Lives on the event loop."""

    def __init__(self) -> None:
        self._num_requests: dict[str, int] = {}

    def __getitem__(self, client_id: str) -> int:
        """Return the number of a client's requests."""
        return self._num_requests.get(client_id, 0)

    def __len__(self) -> int:
        """Count the clients with requests."""
        return len(self._num_requests)

    def refusal(self, client_id: str, num_requests: int, limit: int) -> ApiError | None:
        """Return the error for so many requests more, or None if they fit; 0: no limit."""
        held = self[client_id]
        return too_many_requests(held, limit) if limit and held + num_requests > limit else None

    def reserve(self, client_id: str, num_requests: int) -> ConcurrencyReservation:
        """Count the requests of a call until they are released."""
        self._num_requests[client_id] = self[client_id] + num_requests
        return ConcurrencyReservation(self, client_id, num_requests)

    def release(self, client_id: str, num_requests: int) -> None:
        """Take requests off a client's count; a client without any is forgotten."""
        if not num_requests:
            return
        left = self._num_requests[client_id] - num_requests
        assert left >= 0, f"{client_id} has {left} requests"
        if left:
            self._num_requests[client_id] = left
        else:
            del self._num_requests[client_id]
