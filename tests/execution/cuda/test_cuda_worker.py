"""Two steps in flight on real tensors: the same bits as one at a time."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.plan import StepPlan
from quire.execution.cuda.cuda_graphs import CudaGraphRunner, Graph, GraphSize
from quire.execution.cuda.cuda_worker import AsyncCudaExecutor, CudaWorker, StepInFlight, sample_on_device
from quire.execution.device import Device
from quire.execution.worker import StepCompute
from quire.kernels.reference.sampling import unpack_settings
from quire.kernels.sampling import SamplingOps
from quire.model.language_model import ForwardBatch
from support.embedders import write_embedder
from support.random_model import write_random_model

PROMPTS = [[(11 * i * i + 5 * seed) % 290 for i in range(length)] for seed, length in enumerate((40, 3, 33, 17))]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=25, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, top_p=0.9, max_tokens=18, n=3),
    SamplingParams(temperature=0.8, seed=2, presence_penalty=0.7, max_tokens=21, logprobs=2, prompt_logprobs=1),
    SamplingParams(temperature=1.0, seed=3, min_tokens=4, logit_bias={5: 3.0}, stop_token_ids=[5], max_tokens=30),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_model(tmp_path_factory.mktemp("model"))


def answers(model: Path, **settings: object) -> list[object]:
    with LLM(model, **{"max_num_batched_tokens": 32} | settings) as llm:  # type: ignore[arg-type]
        outputs = llm.generate([list(prompt) for prompt in PROMPTS], PARAMS, use_tqdm=False)
        beams = llm.beam_search([list(prompt) for prompt in PROMPTS[:2]], BeamSearchParams(beam_width=3, max_tokens=8))
        assert llm.kv_stats().used_blocks == 0
        return [[(b.token_ids, b.logprobs, b.finish_reason) for b in each.outputs] for each in outputs + beams] + [
            each.prompt_logprobs for each in outputs
        ]


@pytest.mark.parametrize(
    "settings",
    [
        {"num_kv_blocks": 80},
        {"num_kv_blocks": 12, "num_swap_blocks": 9},
        {"num_kv_blocks": 80, "max_num_batched_tokens": 8, "max_num_seqs": 3},  # prompts in chunks
    ],
    ids=str,
)
def test_answers_are_the_same_to_the_bit(
    settings: dict[str, int], model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = answers(model, **settings)
    executors: list[AsyncCudaExecutor] = []
    submit: Callable[..., None] = AsyncCudaExecutor.submit
    ahead = list[StepPlan]()

    def noting(self: AsyncCudaExecutor, plan: StepPlan) -> None:
        submit(self, plan)
        if len(self._steps) == 2:
            ahead.append(plan)

    def make(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
        executors.append(AsyncCudaExecutor(CudaWorker(compute)))
        return executors[-1]

    monkeypatch.setattr("quire.execution.device.HostDevice.executor", make)
    monkeypatch.setattr(AsyncCudaExecutor, "submit", noting)
    assert answers(model, **settings) == expected
    assert ahead != []
    assert any(max(plan.counts) > 1 for plan in ahead) >= ("max_num_seqs" in settings)
    assert not executors[0]._steps, "a step was left uncollected"


def replaying(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Stand in for a CUDA graph: each replay writes its result where the first one did."""
    result = call()
    return lambda: result.copy_(call())


def unpadding(compute: StepCompute) -> StepCompute:
    """Return a computation without the padding of graphs: the CPU's kernels refuse tokens that belong to no row."""
    forward = compute.forward

    def unpadded(batch: ForwardBatch) -> Tensor:
        num_rows = int((batch.context_lens > 0).sum())
        num_tokens = int(batch.query_starts[num_rows])
        of_tokens = (tensor[:num_tokens] for tensor in (batch.token_ids, batch.positions, batch.slot_mapping))
        of_rows = batch.query_starts[: num_rows + 1], batch.context_lens[:num_rows], batch.block_tables[:num_rows]
        hidden = forward(ForwardBatch(*of_tokens, *of_rows))
        return torch.cat([hidden, hidden.new_zeros(len(batch.token_ids) - num_tokens, hidden.shape[1])])

    compute.forward = unpadded  # type: ignore[method-assign]
    return compute


@pytest.mark.parametrize("budget", [1, 4])
def test_prompt_logprobs_are_those_of_their_step_when_a_graph_is_replayed_meanwhile(
    budget: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three decodes, and a prompt of which one token at a time is computed: each step is small enough for a graph."""
    prompts = [[5], [6], [7], PROMPTS[0]]
    params = [SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)] * 3
    params.append(SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=1))
    settings = {"num_kv_blocks": 64, "enable_prefix_caching": False}
    workers: list[CudaWorker] = []

    def make(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
        worker = CudaWorker(unpadding(compute))
        num_rows, max_blocks = compute.batch.block_tables.shape
        worker._graphs = CudaGraphRunner(compute.forward, max_blocks, compute.model.device, replaying, num_rows)
        workers.append(worker)
        return AsyncCudaExecutor(worker)

    found = []
    for options in ({}, {"max_num_batched_tokens": budget}):
        if options:
            monkeypatch.setattr("quire.execution.device.HostDevice.executor", make)
        with LLM(model, **settings, **options) as llm:  # type: ignore[arg-type]
            found.append(llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)[3].prompt_logprobs)
    assert found[0] == found[1]
    assert any(graph is not None for graph in workers[0]._graphs._graphs.values()), "no graph was ever replayed"


DRAWN = [
    SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=1, top_p=0.9, max_tokens=28, n=2, ignore_eos=True),
    SamplingParams(temperature=1.3, seed=4, top_k=20, min_p=0.01, max_tokens=35),
]
OTHERS = [
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, presence_penalty=0.5),
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, logprobs=1),
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, logit_bias={5: 3.0}),
    SamplingParams(temperature=1.0, seed=5, max_tokens=9, min_tokens=4),
]


@pytest.mark.parametrize("budget", [512, 8])
@pytest.mark.parametrize("other", [None, *OTHERS], ids=["plain", "penalty", "logprobs", "bias", "min_tokens"])
def test_draws_of_graphs_are_those_of_single_steps(
    other: SamplingParams | None, budget: int, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the bit, with the input token of a row from the graph before, and with steps between that draw otherwise.

    With a small budget prompts are computed in chunks beside decodes.
    """
    params = [*DRAWN, *([] if other is None else [other])]
    prompts, drawn, find = PROMPTS[: len(params)], list[GraphSize](), CudaGraphRunner.find

    def noting(self: CudaGraphRunner, step: GraphSize) -> Graph | None:
        graph = find(self, step)
        drawn.extend([step] if graph is not None and graph.draws is not None else [])
        return graph

    def make(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
        worker = CudaWorker(unpadding(compute))
        num_rows, max_blocks = compute.batch.block_tables.shape
        worker._graphs = CudaGraphRunner(
            compute.forward, max_blocks, compute.model.device, replaying, num_rows, draw=worker.draw, idle_row=num_rows
        )
        return AsyncCudaExecutor(worker)

    def sample(settings: Tensor, logits: Tensor, ops: SamplingOps) -> Tensor:
        return sample_on_device(unpack_settings(settings), logits, ops)  # type: ignore[arg-type]  (the CPU's kernel)

    found = []
    for has_graphs in (False, True):
        if has_graphs:
            monkeypatch.setattr("quire.execution.cuda.cuda_graphs.WANTED_BEFORE_CAPTURE", 1)
            monkeypatch.setattr("quire.execution.device.HostDevice.executor", make)
            monkeypatch.setattr("quire.execution.cuda.cuda_worker.sample_on_device", sample)
            monkeypatch.setattr(CudaGraphRunner, "find", noting)
        with LLM(model, num_kv_blocks=80, max_num_batched_tokens=budget, max_num_seqs=8) as llm:
            outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
        found.append([[(each.token_ids, each.finish_reason) for each in output.outputs] for output in outputs])
    assert found[0] == found[1]
    assert len(drawn) > 10
    assert len({size.num_rows for size in drawn}) > 1, "rows end before others"
    assert any(size.is_mixed for size in drawn) == (budget == 8)


class Launches(TorchDispatchMode):
    """Notes the ops that would be launches on a GPU: not views, allocations and what makes NumPy's arrays."""

    FREE = frozenset({"empty", "view", "slice", "select", "detach", "narrow", "lift_fresh", "to"})
    FREE |= {"resolve_conj", "resolve_neg"}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch would import its compiler for 3 s."""
        return False

    def __init__(self) -> None:
        super().__init__()
        self.noted = list[str]()

    def __torch_dispatch__(
        self, op: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        name = op.overloadpacket.__name__
        self.noted.extend([] if name in self.FREE else [name])
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [0, 5])
def test_step_with_a_graph_is_few_launches(chunk: int, model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its inputs, the gather of tables, the replay, its tokens; where tables change, the changes and their write."""
    launch, seen = CudaWorker.launch, list[list[str]]()

    def noting(self: CudaWorker, plan: StepPlan) -> StepInFlight:
        with Launches() as launches:
            step = launch(self, plan)
        if len(plan.rows) == 4 and max(plan.counts) == max(1, chunk):
            seen.append(launches.noted)
        return step

    def captured(call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        result = call()
        return lambda: result

    def make(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
        worker = CudaWorker(unpadding(compute))
        num_rows, max_blocks = compute.batch.block_tables.shape
        worker._graphs = CudaGraphRunner(
            compute.forward, max_blocks, compute.model.device, captured, num_rows,
            draw=lambda batch, draws: torch.ones(2, len(draws.rows), dtype=torch.int64), idle_row=num_rows,
        )  # fmt: skip
        worker._graphs.capture_all(64)
        return AsyncCudaExecutor(worker)

    monkeypatch.setattr("quire.execution.device.HostDevice.executor", make)
    monkeypatch.setattr(CudaWorker, "launch", noting)
    params = [SamplingParams(temperature=1.0, seed=3, top_p=0.9, max_tokens=40, ignore_eos=True)] * 4
    prompts = [[5], [6], [7], [9] * (100 if chunk else 1)]
    with LLM(model, num_kv_blocks=80, max_num_batched_tokens=3 + max(1, chunk), max_num_seqs=4) as llm:
        llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
    steady, writes = ["copy_", "index_select", "clone"], ["index_copy_"]
    assert len(seen) > 10
    assert {*map(tuple, seen)} <= {(*steady,), (*writes, *steady)}
    assert steady in seen


@pytest.mark.parametrize("kind", ["last", "mean", "cls"])
@pytest.mark.parametrize("has_graphs", [False, True])
def test_vectors_are_the_same_with_two_steps_in_flight(
    kind: str, has_graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts are pooled in chunks beside decodes; one token at a time where steps are small enough for a graph."""
    folder, prompts = write_embedder(tmp_path / "model", "qwen3", kind), [list(prompt) for prompt in PROMPTS]
    settings: dict[str, Any] = {"max_num_batched_tokens": 4 if has_graphs else 24, "enable_prefix_caching": False}
    ahead = list[StepPlan]()
    submit: Callable[..., None] = AsyncCudaExecutor.submit

    def noting(self: AsyncCudaExecutor, plan: StepPlan) -> None:
        submit(self, plan)
        if len(self._steps) == 2:
            ahead.append(plan)

    def make(device: Device, compute: StepCompute, max_num_batched_tokens: int) -> AsyncCudaExecutor:
        worker = CudaWorker(unpadding(compute))
        if has_graphs:
            num_rows, max_blocks = compute.batch.block_tables.shape
            worker._graphs = CudaGraphRunner(compute.forward, max_blocks, compute.model.device, replaying, num_rows)
        return AsyncCudaExecutor(worker)

    found = []
    for is_async in (False, True):
        if is_async:
            monkeypatch.setattr("quire.execution.device.HostDevice.executor", make)
            monkeypatch.setattr(AsyncCudaExecutor, "submit", noting)
        with LLM(folder, **settings) as llm:
            decodes = llm.stream([[5], [6], [7]], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
            next(decodes)
            vectors = [output.outputs.embedding for output in llm.embed(prompts, use_tqdm=False)]
            answers_beside = sorted(
                (output.request_id, output.outputs[0].token_ids) for output in decodes if output.finished
            )
            found.append((vectors, answers_beside))
    assert found[0] == found[1]
    assert any(len(set(plan.rows) - set(plan.sample_rows)) > 0 for plan in ahead), "no chunk was planned ahead"
