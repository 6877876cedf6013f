"""Graphs that ranks of GPUs capture together, or not at all."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from quire.core.errors import EngineError, RankLostError
from quire.core.plan import StepPlan
from quire.engine.parallel.gpu_worker import LeadingGraphs
from quire.execution.cuda.cuda_graphs import GraphSize
from quire.model.language_model import ForwardBatch

LARGEST, SMALL = GraphSize(4, 4), GraphSize(2, 2)


class Others:
    """The other ranks, which can capture what `is_able` says."""

    def __init__(self, *, is_able: bool = True) -> None:
        self.lost: EngineError | None = None
        self.is_able = is_able
        self.told: list[tuple[str, GraphSize]] = []

    def send_plan(self, plan: StepPlan) -> None:
        raise AssertionError("a plan")

    def capture_graph(self, size: GraphSize) -> None:
        self.told.append(("capture", size))

    def have_captured(self) -> bool:
        return self.is_able

    def drop_graph(self, size: GraphSize) -> None:
        self.told.append(("drop", size))

    @contextmanager
    def together(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise RankLostError(str(error)) from error


def forward(batch: ForwardBatch) -> Tensor:
    return batch.token_ids[:, None].float()


def graphs_with(others: Others, capture: Callable[..., Any] = lambda call: call) -> LeadingGraphs:
    return LeadingGraphs(others, forward, 5, torch.device("cpu"), capture, 4)


def test_all_ranks_are_told_of_a_graph_before_it_is_captured() -> None:
    others = Others()
    graphs = graphs_with(others)
    graphs.capture_all(1)
    sizes = [size for kind, size in others.told if kind == "capture"]
    assert sizes[:3] == [LARGEST, SMALL, GraphSize(1, 1)]
    assert all(graphs._graphs[size] is not None for size in sizes)
    graphs.clear()
    assert set(graphs._graphs.values()) == {None}


def test_graph_that_another_rank_lacks_is_dropped() -> None:
    others = Others(is_able=False)
    graphs = graphs_with(others)
    graphs._capture_size(SMALL)
    assert others.told == [("capture", SMALL), ("drop", SMALL)]
    assert graphs._graphs[SMALL] is None


def test_graph_that_the_first_rank_lacks_is_dropped() -> None:
    def capture(call: Callable[[], Tensor]) -> None:
        raise torch.OutOfMemoryError("the card is full")

    others = Others()
    graphs = graphs_with(others, capture)
    graphs._capture_size(SMALL)
    assert others.told == [("capture", SMALL), ("drop", SMALL)]
    assert graphs._graphs[SMALL] is None


def test_error_before_the_capture_is_one_of_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others wait in the exchanges of that pass."""
    graphs = graphs_with(Others())

    def fail(batch: ForwardBatch) -> Tensor:
        raise torch.OutOfMemoryError("the card is full")

    monkeypatch.setattr(graphs, "_forward", fail)
    with pytest.raises(RankLostError, match="the card is full"):
        graphs._capture_size(SMALL)
