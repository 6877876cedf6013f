"""Optional parts of a scheduler, which settings and requests ask for: protocols of beam searches and block shares."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from quire.cache.manager import KVCacheManager
from quire.core.deltas import SequenceDelta, TokenLogprobs
from quire.core.plan import RowFork
from quire.core.sequence import Request, Sequence
from quire.scheduling.admission import AdmissionControl
from quire.scheduling.policies import ByPriority
from quire.scheduling.queues import RequestQueues


class Searches(Protocol):
    """The searches of all beam requests of a scheduler."""

    def add(self, request: Request) -> None:
        """Add a new request, a beam search."""

    def remove(self, request: Request) -> None:
        """Remove a request, beam search or not."""

    def take_row_forks(self) -> list[RowFork]:
        """Return, once, the forks for the next plan."""

    def answer(self, request: Request, sequence: Sequence, candidates: TokenLogprobs | None) -> None:
        """Take the likeliest next tokens of a sequence in this step."""

    def take_answered(self) -> list[Request]:
        """Return, once, the requests with answered sequences in this step."""

    def advance(self, request: Request) -> list[SequenceDelta]:
        """Advance a search if all its beams have answered; return its answers if it is over."""

    def conclude(self, request: Request) -> list[SequenceDelta]:
        """Return the answers of a search with a token that ends before it is over; the caller removes it."""

    def check(self, requests: Iterable[Request]) -> None:
        """Assert that exactly the beam requests among `requests` have a search."""


class BlockShares(Protocol):
    """Limits on the blocks of the running requests of one client. Changes nothing."""

    def start_step(self) -> None:
        """Begin a step: requests have grown since."""

    def exceeds(self, request: Request) -> bool:
        """Return whether a waiting request would take its client past its share."""

    def admit(self, request: Request) -> None:
        """Count a request that runs, if the running ones have been counted in this step."""

    def has_excess(self) -> bool:
        """Return whether a client holds more than its share, as of now."""

    def excess(self) -> list[Request]:
        """Return the requests to preempt so that no client holds more than its share, the latest of each client."""


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """The parts of one scheduler.

    `make_shares`, from the running requests and their admission; None: clients have no limit. `make_searches` is called
    with the first beam search, and raises InvalidRequestError where there is none.
    """

    order: ByPriority = field(default_factory=ByPriority)
    make_shares: Callable[[KVCacheManager, list[Request], AdmissionControl], BlockShares] | None = None
    make_searches: Callable[[KVCacheManager, RequestQueues], Searches] | None = None
