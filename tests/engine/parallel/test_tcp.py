"""Exchanges over gloo, between two ranks of this process."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from quire.core.arrays import INT64
from quire.engine.parallel.addresses import AddressBook
from quire.engine.parallel.tcp import NetworkRanks
from quire.kernels.cpp.cpp_gather import InterruptedExchangeError
from quire.model.sharding import Shard


@pytest.fixture
def ranks() -> list[NetworkRanks]:
    books = list[AddressBook]()  # each publishes to the other
    for other in (1, 0):
        books.append(AddressBook(lambda entry, other=other: books[other].add(entry)))  # type: ignore[misc]
    return [NetworkRanks(Shard(rank, 2), "127.0.0.1", book) for rank, book in enumerate(books)]


def test_one_token_is_passed_whatever_strides_its_axes_have(ranks: list[NetworkRanks]) -> None:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(NetworkRanks.reset, ranks))
        received = threads.submit(ranks[1].broadcast, None, (1, 1), INT64)
        ranks[0].broadcast(np.array([7])[:, None], (1, 1), INT64)
        assert received.result(60).tolist() == [[7]]
        list(threads.map(NetworkRanks.close, ranks))


class Late:
    """A collective that is completed, or fails, just after the first wait for it has ended without it."""

    def __init__(self, *, fails: bool) -> None:
        self._fails, self._num_waits = fails, 0

    def wait(self, _: object) -> None:
        self._num_waits += 1
        if self._num_waits == 1:
            raise RuntimeError("Operation timed out!")
        if self._fails:
            raise RuntimeError("Connection closed by peer")

    def is_completed(self) -> bool:
        return self._num_waits > 0


def test_collective_that_is_completed_as_a_wait_ends_has_not_failed(ranks: list[NetworkRanks]) -> None:
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(NetworkRanks.reset, ranks))
        ranks[0]._run(lambda group: Late(fails=False))  # type: ignore[arg-type, return-value]
        with pytest.raises(InterruptedExchangeError, match="Connection closed by peer"):
            ranks[0]._run(lambda group: Late(fails=True))  # type: ignore[arg-type, return-value]
        list(threads.map(NetworkRanks.close, ranks))


def test_rank_whose_collective_cannot_begin_ends_that_of_the_others(ranks: list[NetworkRanks]) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("no collective")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(NetworkRanks.reset, ranks))
        waiting = threads.submit(ranks[1].broadcast, None, (1, 1), INT64)
        with pytest.raises(InterruptedExchangeError, match="no collective") as kept:
            ranks[0]._run(fail)  # type: ignore[arg-type]
        with pytest.raises(InterruptedExchangeError):
            waiting.result(60)
        assert kept.value.__cause__ is not None
        list(threads.map(NetworkRanks.close, ranks))
