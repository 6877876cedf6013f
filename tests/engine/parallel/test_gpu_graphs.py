"""Graphs that ranks of GPUs capture together, or not at all."""

import socket
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.errors import RankLostError
from quire.engine.options import EngineOptions
from quire.engine.parallel import messages
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.gpu_ranks import HostLink, LeadingGraphs
from quire.engine.parallel.peer import Peer
from quire.engine.parallel.rank_set import RankSet
from quire.execution.cuda.cuda_graphs import GraphSize
from quire.model.language_model import ForwardBatch
from support.faults import raising
from support.server import wait_until

LARGEST, SMALL = GraphSize(4, 4), GraphSize(2, 2)


class Other:
    """Another rank, which follows commands at the end of its channel, and can capture what `is_able` says."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        self.peer = Peer(1, Channel(ours, messages.decode_report), None, "a test")
        self.told: list[messages.Command] = []
        self.is_able = True
        self._channel = Channel(theirs, messages.decode_command)
        self._channel.start(handles=self._follow)

    def _follow(self, command: messages.Command) -> bool:
        self.told.append(command)
        if isinstance(command, messages.Capture):
            self._channel.send(messages.Captured(self.is_able))
        return True


@pytest.fixture
def other() -> Iterator[Other]:
    other = Other()
    yield other
    other.peer.end("the test is over")
    other._channel.close()


def forward(batch: ForwardBatch) -> Tensor:
    return batch.token_ids[:, None].float()


def graphs_with(other: Other, capture: Callable[..., Any] = lambda call: call) -> LeadingGraphs:
    unused: Any = SimpleNamespace(handles=lambda peer, report: False, interrupt=lambda: None)
    ranks = RankSet(EngineOptions(tensor_parallel_size=2), unused, unused, unused)
    ranks._exchange = unused
    ranks._add(other.peer)
    return LeadingGraphs(HostLink(ranks), forward, 5, torch.device("cpu"), capture, 4)


def test_all_ranks_are_told_of_a_graph_before_it_is_captured(other: Other) -> None:
    graphs = graphs_with(other)
    graphs.capture_all(1)
    sizes = [GraphSize(each.num_rows, each.num_tokens) for each in other.told if isinstance(each, messages.Capture)]
    assert sizes[:3] == [LARGEST, SMALL, GraphSize(1, 1)]
    assert all(graphs._graphs[size] is not None for size in sizes)
    graphs.clear()
    assert set(graphs._graphs.values()) == {None}


def test_graph_that_another_rank_lacks_is_dropped(other: Other) -> None:
    other.is_able = False
    graphs = graphs_with(other)
    graphs._capture_size(SMALL)
    wait_until(lambda: other.told == [messages.Capture(2, 2, False), messages.DropGraph(2, 2, False)])
    assert graphs._graphs[SMALL] is None


def test_graph_that_the_first_rank_lacks_is_dropped(other: Other) -> None:
    graphs = graphs_with(other, raising(torch.OutOfMemoryError))
    graphs._capture_size(SMALL)
    wait_until(lambda: other.told == [messages.Capture(2, 2, False), messages.DropGraph(2, 2, False)])
    assert graphs._graphs[SMALL] is None


def test_error_before_the_capture_is_one_of_all_ranks(other: Other, monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait in the exchanges of that pass."""
    graphs = graphs_with(other)
    monkeypatch.setattr(graphs, "_forward", raising(torch.OutOfMemoryError))
    with pytest.raises(RankLostError, match=r"rank 0: a step has failed: OutOfMemoryError"):
        graphs._capture_size(SMALL)
