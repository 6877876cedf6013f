"""Shares of the KV blocks by client: a request that would take its client past its share waits.

A request counts with the blocks of all its known tokens, as if it shared none with other requests, and with the head
room that admission keeps. When the running requests of a client grow past its share, its latest ones are preempted. The
last request of a client always may run, whatever it takes: all admitted requests finish.
A swapped request waits for no share, since no new request is admitted before it. So requests past a share are preempted
by recompute: swapped ones would return in the next step.
"""

from collections.abc import Callable
from dataclasses import dataclass

from quire.core.sequence import Request


@dataclass(slots=True)
class _Holding:
    """Blocks, sequences and requests of one client that run."""

    num_blocks: int = 0
    num_running_seqs: int = 0
    num_requests: int = 0


class KVShares:
    """Counts the blocks of each client's running requests, at most once per step. Changes nothing."""

    def __init__(
        self, max_blocks: int, running: list[Request], known_blocks: Callable[[Request], int],
        head_room: Callable[[int], int],
    ) -> None:  # fmt: skip
        """`max_blocks`: of one client. `known_blocks`, `head_room`: as admission counts them."""
        self._max_blocks, self._running = max_blocks, running
        self._known_blocks, self._head_room = known_blocks, head_room
        self._holdings: dict[str, _Holding] | None = None

    def start_step(self) -> None:
        """Begin a step: requests have grown since."""
        self._holdings = None

    def exceeds(self, request: Request) -> bool:
        """Return whether a waiting request would take its client past its share."""
        holding = self._counted().get(request.client_id)
        if holding is None:
            return False
        head_room = self._head_room(holding.num_running_seqs + len(request.live))
        return holding.num_blocks + self._known_blocks(request) + head_room > self._max_blocks

    def admit(self, request: Request) -> None:
        """Count a request that runs, if the running ones have been counted in this step."""
        if self._holdings is not None:
            holding = self._holdings.setdefault(request.client_id, _Holding())
            holding.num_blocks += self._known_blocks(request)
            holding.num_running_seqs += len(request.live)
            holding.num_requests += 1

    def has_excess(self) -> bool:
        """Return whether a client holds more than its share now."""
        self.start_step()
        is_over = bool(self.excess())
        self.start_step()
        return is_over

    def excess(self) -> list[Request]:
        """Return the requests to preempt so that no client holds more than its share, the latest of each client."""
        holdings = self._counted()
        over = {client for client, each in holdings.items() if each.num_blocks > self._max_blocks}
        victims = []
        for request in reversed(self._running) if over else ():
            holding = holdings[request.client_id]
            if request.client_id in over and holding.num_requests > 1 and holding.num_blocks > self._max_blocks:
                holding.num_blocks -= self._known_blocks(request)
                holding.num_running_seqs -= len(request.live)
                holding.num_requests -= 1
                victims.append(request)
        return victims

    def _counted(self) -> dict[str, _Holding]:
        if self._holdings is None:
            self._holdings = {}
            for request in self._running:
                self.admit(request)
        return self._holdings
