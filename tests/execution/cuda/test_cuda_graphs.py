"""Sizes that are captured, and when, and that padding reaches nothing; a fake graph calls what it was made of."""

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.plan import GraphCounts
from quire.engine.devices import graph_sizes_of
from quire.engine.options import EngineOptions
from quire.execution.batch import StepInputs
from quire.execution.cuda.cuda_graphs import (
    MIXED_ROWS,
    MIXED_TOKENS,
    SIZES,
    WANTED_BEFORE_CAPTURE,
    CudaGraphCapture,
    CudaGraphRunner,
    GraphSize,
    GraphSizes,
)
from quire.execution.cuda.graph_inputs import Draws
from quire.kernels.low_rank import RowAdapters
from quire.kernels.sampling import SETTINGS
from quire.kernels.triton import card
from quire.kernels.triton.triton_low_rank import TritonSlots
from quire.model.language_model import ForwardBatch
from support.fake_graphs import FakeGraphs

MAX_BLOCKS = 5


def batch_of(num_rows: int, counts: int = 1, width: int = 2) -> ForwardBatch:
    """Decodes of made-up sequences, all different."""
    num_tokens = num_rows * counts
    return ForwardBatch(
        token_ids=torch.arange(num_tokens) + 7,
        positions=torch.arange(num_tokens) + 3,
        slot_mapping=torch.arange(num_tokens) * 2,
        query_starts=torch.arange(num_rows + 1, dtype=torch.int32) * counts,
        context_lens=torch.arange(num_rows, dtype=torch.int32) + 4,
        block_tables=torch.arange(num_rows * width, dtype=torch.int32).view(num_rows, width),
    )


class Recorder:
    """Computes nothing but the sum of what it is given, and keeps the batches that it saw."""

    def __init__(self) -> None:
        self.seen: list[ForwardBatch] = []
        self.num_captured = 0

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.seen.append(ForwardBatch(*(x.clone() for x in batch.tensors)))
        return (batch.token_ids + batch.positions)[:, None].float()

    def capture(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        self.num_captured += 1
        return call


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def graphs(recorder: Recorder) -> CudaGraphRunner:
    return CudaGraphRunner(recorder.forward, MAX_BLOCKS, torch.device("cpu"), recorder.capture)


def inputs_of(batch: ForwardBatch, num_samples: int = 0) -> StepInputs:
    """Return a step of this batch, with samples behind its last tokens, for the rows from 30 on."""
    num_rows, num_tokens = len(batch.context_lens), len(batch.token_ids)
    starts, stops = np.zeros(num_rows, np.int64), batch.context_lens.numpy().astype(np.int64)
    samples = np.arange(num_samples)
    tokens = num_tokens - num_samples + samples
    return StepInputs(batch, np.arange(num_rows), starts, stops, samples + 30, samples, tokens, [], [])


def run(graphs: CudaGraphRunner, batch: ForwardBatch) -> Tensor | None:
    """Run a batch by a graph as a worker does."""
    num_rows, num_tokens = len(batch.context_lens), len(batch.token_ids)
    graph = graphs.find(GraphSize(num_rows, num_tokens, batch.adapters is not None))
    if graph is None:
        return None
    graph.fill(inputs_of(batch), None, 0)
    graph.inputs.block_tables[:num_rows, : batch.block_tables.shape[1]].copy_(batch.block_tables)
    result = graphs.run(graph.inputs)
    return None if result is None else result[:num_tokens]


def settings_of(num_rows: int) -> NDArray[np.void]:
    """Return made-up settings, all different."""
    return np.arange(4.0 * num_rows).view(SETTINGS)


def draw_by(graphs: CudaGraphRunner, num_rows: int, counts: int = 1) -> Tensor | None:
    """Draw behind the last tokens of a step by a graph, as a worker does."""
    graph = graphs.find(GraphSize(num_rows, num_rows * counts, draws=True))
    if graph is None:
        return None
    graph.fill(inputs_of(batch_of(num_rows, counts), num_rows), settings_of(num_rows), 99)
    return graph.replay()


def want(graphs: CudaGraphRunner, num_rows: int) -> None:
    for _ in range(WANTED_BEFORE_CAPTURE):
        assert run(graphs, batch_of(num_rows)) is None
        graphs.capture_one()
    graphs.capture_one()  # the first of all was the largest


def test_largest_size_is_captured_first(recorder: Recorder) -> None:
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, torch.device("cpu"), recorder.capture, max_rows=20)
    for _ in range(WANTED_BEFORE_CAPTURE):
        assert run(graphs, batch_of(3)) is None
    graphs.capture_one()
    assert run(graphs, batch_of(17)) is not None
    assert len(recorder.seen[-1].context_lens) == 32
    graphs.capture_one()
    assert run(graphs, batch_of(3)) is not None
    assert len(recorder.seen[-1].context_lens) == 4


def test_size_is_captured_once_it_has_been_wanted_often(graphs: CudaGraphRunner, recorder: Recorder) -> None:
    for _ in range(WANTED_BEFORE_CAPTURE - 1):
        assert run(graphs, batch_of(3)) is None
        graphs.capture_one()
    assert recorder.num_captured == 0
    assert run(graphs, batch_of(4)) is None  # the same size
    graphs.capture_one()
    graphs.capture_one()
    assert recorder.num_captured == 2, "the largest, and this one"
    assert run(graphs, batch_of(5)) is None  # another
    assert run(graphs, batch_of(3)) is not None


def test_one_size_is_captured_at_a_time(graphs: CudaGraphRunner, recorder: Recorder) -> None:
    for num_rows in (1, 2, 200):
        for _ in range(WANTED_BEFORE_CAPTURE):
            run(graphs, batch_of(num_rows))
    for expected in (1, 2, 3, 4, 4):  # the largest is made, too
        graphs.capture_one()
        assert recorder.num_captured == expected


def test_batch_is_padded_with_rows_of_no_sequence(graphs: CudaGraphRunner, recorder: Recorder) -> None:
    want(graphs, 7)
    for num_rows in (8, 6):  # what the larger batch left is covered
        batch = batch_of(num_rows)
        hidden = run(graphs, batch)
        assert hidden is not None
        assert torch.equal(hidden, (batch.token_ids + batch.positions)[:, None].float())
    seen = recorder.seen[-1]
    assert seen.context_lens.tolist() == [4, 5, 6, 7, 8, 9, 0, 0]
    assert seen.slot_mapping[6:].tolist() == [-1, -1]
    assert seen.query_starts.tolist() == list(range(9))
    assert torch.equal(seen.block_tables[:6, :2], batch.block_tables)


def test_step_with_chunks_is_padded_with_rows_without_tokens(graphs: CudaGraphRunner, recorder: Recorder) -> None:
    for _ in range(WANTED_BEFORE_CAPTURE):
        assert run(graphs, batch_of(3, counts=6)) is None
        graphs.capture_one()
    assert recorder.num_captured == 1, "the largest of its kind"
    graphs.capture_one()
    for num_rows in (5, 4):  # what the larger step left is covered
        batch = batch_of(num_rows, counts=5)
        hidden = run(graphs, batch)
        assert hidden is not None
        assert torch.equal(hidden, (batch.token_ids + batch.positions)[:, None].float())
    seen = recorder.seen[-1]
    assert seen.query_starts.tolist() == [0, 5, 10, 15, *[20] * 5]
    assert seen.context_lens.tolist() == [4, 5, 6, 7, 0, 0, 0, 0]
    assert seen.slot_mapping[20:].tolist() == [-1] * 12
    assert torch.equal(seen.block_tables[:4, :2], batch.block_tables)


def test_steps_with_adapters_have_graphs_of_their_own_and_pad_with_rows_without_one() -> None:
    seen = list[ForwardBatch]()

    def forward(batch: ForwardBatch) -> Tensor:
        seen.append(batch)
        return batch.token_ids[:, None].float()

    slots, device = cast(TritonSlots, object()), torch.device("cpu")
    graphs = CudaGraphRunner(forward, MAX_BLOCKS, device, lambda call: call, max_rows=8, slots=slots)
    graphs.capture_all(max_tokens=16)
    of_row = torch.tensor([1, -1, 0], dtype=torch.int32)
    assert run(graphs, replace(batch_of(3), adapters=RowAdapters((), of_row, slots))) is not None
    assert seen[-1].adapters is not None
    assert seen[-1].adapters.of_row.tolist() == [1, -1, 0, -1]
    assert run(graphs, batch_of(3)) is not None
    assert seen[-1].adapters is None


def test_decodes_that_draw_have_graphs_of_their_own_and_idle_rows_write_to_no_row(recorder: Recorder) -> None:
    seen = list[Draws]()

    def draw(batch: ForwardBatch, draws: Draws) -> Tensor:
        seen.append(Draws(*(x.clone() for x in draws)))
        return batch.token_ids + torch.tensor([[0], [1]])

    device = torch.device("cpu")
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, device, recorder.capture, 8, draw=draw, idle_row=99)
    for _ in range(WANTED_BEFORE_CAPTURE):
        assert draw_by(graphs, 7) is None
        graphs.capture_one()
    assert list(graphs._graphs) == [GraphSize(8, 8, draws=True)]
    for num_rows in (8, 5):
        sampled = draw_by(graphs, num_rows)
        assert sampled is not None
        assert sampled[:, :num_rows].tolist() == [[7 + i for i in range(num_rows)], [8 + i for i in range(num_rows)]]
    assert seen[-1].rows.tolist() == [30, 31, 32, 33, 34, 99, 99, 99]
    assert seen[-1].settings[:5].flatten().tolist() == settings_of(5).view(np.float64).tolist()
    assert seen[-1].settings[5:].numpy().view(SETTINGS)["top_ks"].tolist() == [[1]] * 3
    assert run(graphs, batch_of(5)) is None, "a step that draws otherwise has another graph"
    graphs.capture_all(max_tokens=16)
    assert run(graphs, batch_of(5)) is not None
    assert draw_by(graphs, 1) is not None


def test_steps_with_chunks_draw_behind_tokens_of_their_rows(recorder: Recorder) -> None:
    seen = list[Draws]()

    def draw(batch: ForwardBatch, draws: Draws) -> Tensor:
        seen.append(Draws(*(x.clone() for x in draws)))
        return torch.stack([batch.token_ids[draws.logit_rows], draws.rows])

    device = torch.device("cpu")
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, device, recorder.capture, 8, draw=draw, idle_row=99)
    graphs.capture_all(max_tokens=32)
    for num_rows in (8, 3):  # what the larger step left is covered
        sampled = draw_by(graphs, num_rows, counts=3)
        assert sampled is not None
        assert sampled[0, :num_rows].tolist() == [7 + 2 * num_rows + i for i in range(num_rows)], "the last tokens"
        assert sampled[1, :num_rows].tolist() == [*range(30, 30 + num_rows)]
    assert seen[-1].rows.tolist() == [30, 31, 32, *[99] * 5]
    assert seen[-1].logit_rows.tolist() == [6, 7, 8, *[0] * 5]
    assert seen[-1].settings[:3].flatten().tolist() == settings_of(3).view(np.float64).tolist()


def test_graph_of_a_step_with_chunks_has_more_tokens_than_rows() -> None:
    """Else kernels would be launched as for decodes."""
    sizes = GraphSizes()
    assert sizes.size_of(20, 25) == GraphSize(32, 64)
    assert sizes.size_of(200, 220) == GraphSize(256, 320)
    for num_rows in range(1, MIXED_ROWS[-1] + 1):
        for num_tokens in range(num_rows + 1, MIXED_TOKENS[-1] + 1):
            size = sizes.size_of(num_rows, num_tokens)
            assert size is not None
            assert size.is_mixed
            assert size.num_rows >= num_rows
            assert size.num_tokens >= num_tokens


def test_every_size_of_an_engine_is_captured_at_start(recorder: Recorder) -> None:
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, torch.device("cpu"), recorder.capture, max_rows=20)
    graphs.capture_all(max_tokens=100)
    captured = recorder.num_captured
    assert graphs._wanted == {}
    for num_rows in range(1, 21):
        assert run(graphs, batch_of(num_rows)) is not None
        for counts in range(2, 100 // num_rows + 1):
            assert run(graphs, batch_of(num_rows, counts)) is not None
    graphs.capture_one()
    assert recorder.num_captured == captured


def sizes_of(**settings: Any) -> GraphSizes:  # noqa: ANN401
    """Return the sizes that an engine's settings ask for."""
    options = EngineOptions(**settings)
    return graph_sizes_of(options, options.batched_tokens())


def test_sizes_that_are_asked_for_are_those_of_decodes_and_of_steps_with_chunks(recorder: Recorder) -> None:
    sizes = sizes_of(cudagraph_capture_sizes=[40, 6, 6, 300])
    assert sizes == GraphSizes((6, 40, 300), (6, 40, 300))
    device = torch.device("cpu")
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, device, recorder.capture, max_rows=50, sizes=sizes)
    assert {*sizes.descending(50, 100)} == {*map(GraphSize, (300, 40, 6), (300, 40, 6))} | {
        GraphSize(256, 300), GraphSize(32, 300), GraphSize(8, 300), GraphSize(32, 40), GraphSize(8, 40)
    }  # fmt: skip
    for _ in range(WANTED_BEFORE_CAPTURE):
        assert run(graphs, batch_of(5)) is None
        graphs.capture_one()
    graphs.capture_one()
    assert [*graphs._graphs] == [GraphSize(300, 300), GraphSize(6, 6)], "the largest first"
    graphs.capture_all(max_tokens=100)
    assert {*graphs._graphs} == {*sizes.descending(50, 100)}
    for num_rows, counts, expected in ((7, 1, (40, 40)), (41, 1, (300, 300)), (3, 4, (8, 40)), (20, 5, (32, 300))):
        assert run(graphs, batch_of(num_rows, counts)) is not None
        assert (len(recorder.seen[-1].context_lens), len(recorder.seen[-1].token_ids)) == expected
    assert run(graphs, batch_of(3, counts=101)) is None
    assert not graphs.may_draw(3, 3, has_adapters=False)


def test_small_sizes_have_no_graphs_of_steps_with_chunks(recorder: Recorder) -> None:
    """Steps with chunks have graphs of 8 rows or more, and more tokens than rows."""
    sizes = sizes_of(cudagraph_capture_sizes=(1, 2, 4, 8))
    device = torch.device("cpu")
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, device, recorder.capture, max_rows=50, sizes=sizes)
    graphs.capture_all(max_tokens=100)
    assert [*graphs._graphs] == [GraphSize(size, size) for size in (8, 4, 2, 1)]
    assert run(graphs, batch_of(2, counts=2)) is None
    assert run(graphs, batch_of(9)) is None


def test_sizes_beyond_the_token_budget_are_left_out_and_named(caplog: pytest.LogCaptureFixture) -> None:
    sizes = sizes_of(cudagraph_capture_sizes=(1, 64, 65), max_num_batched_tokens=64)
    assert sizes == GraphSizes((1, 64), (1, 64))
    assert "graphs are captured at [1, 64] tokens: no step has more than 64" in caplog.text


def test_largest_size_limits_the_usual_ones_or_extends_them() -> None:
    assert sizes_of() == GraphSizes(SIZES, MIXED_TOKENS)
    assert sizes_of(max_cudagraph_capture_size=3) == GraphSizes((1, 2), ())
    assert sizes_of(max_cudagraph_capture_size=100) == GraphSizes((1, 2, 4, 8, *range(16, 97, 16)), (16, 32, 64))
    large = sizes_of(max_cudagraph_capture_size=1024)
    assert (large.decodes[-1], large.mixed[-1]) == (1024, 1024)
    assert large.size_of(512, 512) == GraphSize(512, 512)
    assert large.size_of(8, 1000) == GraphSize(8, 1024)
    assert sizes_of(cudagraph_capture_sizes=(4, 9), max_cudagraph_capture_size=9).decodes == (4, 9)


def test_engine_without_graphs_captures_none(recorder: Recorder) -> None:
    sizes = sizes_of(enforce_eager=True, cudagraph_capture_sizes=(4,))
    assert sizes == GraphSizes((), ())
    assert sizes.largest(256) == []
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, torch.device("cpu"), recorder.capture, sizes=sizes)
    graphs.capture_all(max_tokens=100)
    want(graphs, 3)
    assert recorder.num_captured == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cudagraph_capture_sizes": (1, 0)}, "cudagraph_capture_sizes must be at most 128 .* from 1 to 8192, got 0"),
        ({"cudagraph_capture_sizes": [8193]}, "cudagraph_capture_sizes must be .*, got 8193"),
        ({"cudagraph_capture_sizes": [True]}, "cudagraph_capture_sizes must be .*, got True"),
        ({"cudagraph_capture_sizes": ("4",)}, "cudagraph_capture_sizes must be .*, got '4'"),
        ({"cudagraph_capture_sizes": [1] * 129}, "cudagraph_capture_sizes must be .*, got a list of 129"),
        ({"cudagraph_capture_sizes": 4}, "cudagraph_capture_sizes must be .*, got 4"),
        ({"max_cudagraph_capture_size": 0}, "max_cudagraph_capture_size must be an integer from 1 to 8192, got 0"),
        (
            {"cudagraph_capture_sizes": (1, 2), "max_cudagraph_capture_size": 4},
            "max_cudagraph_capture_size must be the largest of cudagraph_capture_sizes, 2, got 4",
        ),
        ({"enforce_eager": 1}, "enforce_eager must be True or False, got 1"),
        ({"enforce_eager": True, "capture_graphs": True}, "capture_graphs True needs graphs"),
    ],
    ids=str,
)
def test_sizes_out_of_range_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(**settings)


def test_graphs_share_their_block_tables(recorder: Recorder) -> None:
    """Tables of 131,072 tokens take 32 KiB a row: 240 MB, if each of the usual graphs had its own."""
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, torch.device("cpu"), recorder.capture)
    graphs.capture_all(max_tokens=512)
    tables = [graph.inputs.block_tables for graph in graphs._graphs.values() if graph is not None]
    assert len(tables) == recorder.num_captured > 40
    assert len({each.untyped_storage().data_ptr() for each in tables}) == 1
    assert tables[0].untyped_storage().nbytes() == 256 * MAX_BLOCKS * 4
    for num_rows, counts in ((9, 1), (200, 1), (3, 4), (2, 1)):
        batch = batch_of(num_rows, counts)
        assert run(graphs, batch) is not None
        assert torch.equal(recorder.seen[-1].block_tables[:num_rows, :2], batch.block_tables)


def test_batches_above_the_last_size_run_as_they_are(graphs: CudaGraphRunner, recorder: Recorder) -> None:
    for _ in range(WANTED_BEFORE_CAPTURE + 1):
        assert run(graphs, batch_of(3, counts=171)) is None
        assert run(graphs, batch_of(SIZES[-1] + 1)) is None
        graphs.capture_one()
    assert recorder.num_captured == 0


def test_size_that_cannot_be_captured_runs_without_from_then_on(
    recorder: Recorder, caplog: pytest.LogCaptureFixture
) -> None:
    def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        recorder.num_captured += 1
        raise torch.OutOfMemoryError("the card is full")

    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, torch.device("cpu"), capture)
    for _ in range(3):
        want(graphs, 7)
    assert recorder.num_captured == 2
    assert graphs.counts == GraphCounts(0, 2)
    assert "steps of 256 rows and 256 tokens run without a graph" in caplog.text, "the first of them"


def test_decodes_draw_outside_of_their_graph_where_one_with_draws_cannot_be_captured(recorder: Recorder) -> None:
    def draw(batch: ForwardBatch, draws: Draws) -> Tensor:
        raise torch.OutOfMemoryError("the card is full")

    def capture(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        call()
        return call

    device = torch.device("cpu")
    graphs = CudaGraphRunner(recorder.forward, MAX_BLOCKS, device, capture, 8, draw=draw, idle_row=99)
    assert graphs.may_draw(7, 7, has_adapters=False)
    assert not graphs.may_draw(SIZES[-1] + 1, SIZES[-1] + 1, has_adapters=False)
    for _ in range(WANTED_BEFORE_CAPTURE):
        assert draw_by(graphs, 7) is None
    graphs.capture_one()
    assert not graphs.may_draw(8, 8, has_adapters=False)
    assert graphs.may_draw(4, 4, has_adapters=False), "a smaller one may fit"
    assert graphs.may_draw(8, 8, has_adapters=True)
    want(graphs, 7)
    assert run(graphs, batch_of(7)) is not None
    without = CudaGraphRunner(recorder.forward, MAX_BLOCKS, device, recorder.capture)
    assert not without.may_draw(7, 7, has_adapters=False)


class Faulty:
    """A forward pass that synchronizes where it must not: in the captures of these numbers, from 1 on."""

    def __init__(self, torch_graphs: FakeGraphs, *faults: int, is_fault_of_early_launch: bool = False) -> None:
        self._torch, self._faults, self._needs_early = torch_graphs, faults, is_fault_of_early_launch

    def forward(self, batch: ForwardBatch) -> Tensor:
        is_early = card.launches_early(torch.device("cuda", 0))
        if self._torch.num_captures in self._faults and (is_early or not self._needs_early):
            torch.cuda.synchronize()
        return batch.token_ids[:, None].float()


@pytest.fixture
def torch_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGraphs]:
    made = FakeGraphs()
    made.turn_on(monkeypatch.setattr)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(card, "capability", lambda device: 90)
    yield made
    card.use_early_launch(is_on=True)


def capture_all_with(faulty: Faulty, *, has_second_try: bool) -> CudaGraphRunner:
    """Capture 9 sizes."""
    capture = CudaGraphCapture(has_second_try=has_second_try)
    graphs = CudaGraphRunner(faulty.forward, MAX_BLOCKS, torch.device("cpu"), capture, max_rows=16)
    graphs.capture_all(max_tokens=64)
    return graphs


@pytest.mark.parametrize("fault", range(1, 10))
def test_capture_that_fails_costs_its_own_graph_alone(
    fault: int, torch_graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = capture_all_with(Faulty(torch_graphs, fault), has_second_try=False)
    assert [graph is None for graph in graphs._graphs.values()] == [number == fault for number in range(1, 10)]
    assert graphs.counts == GraphCounts(8, 1)
    reason = "RuntimeError.*operation failed due to a previous error during capture"
    assert re.search(f"1 of 9 CUDA graphs could not be captured: .*; the first failed with {reason}", caplog.text)


def test_capture_for_which_memory_lacks_keeps_the_pool(torch_graphs: FakeGraphs) -> None:
    """The graphs of smaller sizes use the memory of larger ones."""

    def forward(batch: ForwardBatch) -> Tensor:
        if torch_graphs.num_captures == 2 and torch.cuda.is_current_stream_capturing():
            raise torch.OutOfMemoryError("the card is full")
        return batch.token_ids[:, None].float()

    capture = CudaGraphCapture()
    graphs = CudaGraphRunner(forward, MAX_BLOCKS, torch.device("cpu"), capture, max_rows=16)
    graphs.capture_all(max_tokens=64)
    assert graphs.counts == GraphCounts(8, 1)
    assert capture._pool == (0, 1)
    assert card.launches_early(torch.device("cuda", 0))


def test_capture_that_fails_is_tried_again_without_early_launch(
    torch_graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    faulty = Faulty(torch_graphs, *range(1, 20), is_fault_of_early_launch=True)
    graphs = capture_all_with(faulty, has_second_try=True)
    assert graphs.counts == GraphCounts(9, 0)
    assert torch_graphs.num_captures == 10, "the second size is captured without it at once"
    assert not card.launches_early(torch.device("cuda", 0))
    assert "kernels are launched early no more" in caplog.text


def test_capture_that_fails_twice_leaves_early_launch_as_it_was(
    torch_graphs: FakeGraphs, caplog: pytest.LogCaptureFixture
) -> None:
    graphs = capture_all_with(Faulty(torch_graphs, *range(1, 20)), has_second_try=True)
    assert graphs.counts == GraphCounts(0, 9)
    assert card.launches_early(torch.device("cuda", 0))
    assert caplog.text.count("run without a graph") == 1, "the reason of the first is logged"
