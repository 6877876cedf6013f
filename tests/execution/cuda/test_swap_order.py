"""Swaps beside what is computed: every two touches of a block are ordered, and nothing waits for more than that."""

import random
from functools import partial
from itertools import chain

import pytest
import torch

from quire import LLM, SamplingParams
from quire.core.plan import BlockCopy, StepPlan, StepResult
from quire.execution.batch import PersistentBatch
from quire.execution.cuda.cuda_memory import CudaSwapper
from quire.kernels.reference import kv_cache
from quire.model.kv_cache import KVCache
from quire.scheduling.plan_builder import PlanBuilder
from support.fake_cuda import FakeCuda, FakeStream
from support.random_model import write_random_model
from support.scheduling import Harness
from support.steps_in_flight import executor_in_flight

BLOCK_SIZE = 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    cuda = FakeCuda()
    cuda.stand_in(monkeypatch)
    return cuda


def tier(num_blocks: int, first: int) -> KVCache:
    """One layer whose keys are numbers, so that one sees which block is where."""
    keys = torch.arange(first, first + num_blocks)[:, None]
    return KVCache([keys], [keys.clone()], BLOCK_SIZE)


class Device:
    """Cache and swap space on the fake device; `step` is what a worker does with a plan."""

    def __init__(self, cuda: FakeCuda, num_blocks: int, num_swap_blocks: int) -> None:
        self.cuda = cuda
        self.cache, self.space = tier(num_blocks, 0), tier(num_swap_blocks, 1000)
        self.swapper = CudaSwapper(self.cache, self.space, self._swap)

    def _swap(
        self, sources: list[torch.Tensor], targets: list[torch.Tensor], src: torch.Tensor, dst: torch.Tensor
    ) -> None:
        tiers = ("cache", "space") if sources[0] is self.cache.keys[0] else ("space", "cache")
        reads, writes = ([(name, i) for i in ids.tolist()] for name, ids in zip(tiers, (src, dst), strict=True))
        self.cuda.launch(partial(kv_cache.copy_blocks, sources, targets, src, dst), reads, writes)

    def step(self, plan: StepPlan, read: set[int], slots: torch.Tensor) -> None:
        self.swapper.move(plan, slots)
        for copy in plan.copies:
            self.cuda.launch(lambda: None, [("cache", copy.src)], [("cache", copy.dst)])
        written = sorted({slot // BLOCK_SIZE for slot in slots.tolist() if slot >= 0})
        self.cuda.launch(
            lambda: self.cache.keys[0].__setitem__(written, -1),
            [("cache", block) for block in read],
            [("cache", block) for block in written],
        )


class Recorder:
    """Passes plans on, after it has let a device do what they say."""

    def __init__(self, harness: Harness, device: Device) -> None:
        self._inner, self._device = harness.executor, device
        self._batch = PersistentBatch(harness.max_num_seqs, 64, BLOCK_SIZE, vocab_size=50)
        self.num_swapped = 0

    def submit(self, plan: StepPlan) -> None:
        self._batch.apply(plan)
        forward = self._batch.inputs(plan).forward
        contexts = zip(forward.block_tables.tolist(), forward.context_lens.tolist(), strict=True)
        read = set(chain.from_iterable(table[: -(-length // BLOCK_SIZE)] for table, length in contexts))
        self._device.step(plan, read, forward.slot_mapping)
        self.num_swapped += len(plan.swap_outs) + len(plan.swap_ins)
        self._inner.submit(plan)

    def collect(self) -> StepResult:
        return self._inner.collect()


def run_random_steps(cuda: FakeCuda, seed: int) -> int:
    """Let a real scheduler that preempts at random run on the fake device; return the number of blocks swapped."""
    rng = random.Random(seed)
    harness = Harness(16, BLOCK_SIZE, num_swap_blocks=40, mode="swap")
    scheduler = harness.scheduler
    start_step = scheduler.planner.start_step

    def preempt_some(step: PlanBuilder) -> None:
        start_step(step)
        if len(scheduler.queues.running) > 1 and rng.random() < 0.3:
            scheduler.planner.preempt(step, scheduler.queues.running[-1])

    scheduler.planner.start_step = preempt_some  # type: ignore[method-assign]
    recorder = Recorder(harness, Device(cuda, 16, 40))
    for _ in range(100):
        if rng.random() < 0.5:
            harness.add(rng.randint(1, 20), max_tokens=rng.randint(1, 12), n=rng.choice([1, 1, 2]), ignore_eos=True)
        plan = scheduler.schedule()
        if not plan.is_empty:
            recorder.submit(plan)
            scheduler.update(plan, recorder.collect())
    return recorder.num_swapped


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("swap_out_chunk", [1, 3, 64])
def test_every_touch_of_a_block_is_ordered(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, swap_out_chunk: int, seed: int
) -> None:
    monkeypatch.setattr("quire.execution.cuda.cuda_memory.SWAP_OUT_CHUNK", swap_out_chunk)
    assert run_random_steps(cuda, seed) > 20


@pytest.mark.parametrize("lost", ["wait_event", "wait_stream"])
def test_what_nobody_waits_for_is_a_race(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """The checker sees it: what is computed waits for events, swaps wait for a stream."""
    monkeypatch.setattr(FakeStream, lost, lambda self, other: None)
    with pytest.raises(AssertionError, match="a race on"):
        run_random_steps(cuda, seed=0)


def test_blocks_leave_while_others_are_computed(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.execution.cuda.cuda_memory.SWAP_OUT_CHUNK", 2)
    cuda.chooser.random = lambda: 1.0  # type: ignore[method-assign] (nothing is over before it has to be)
    device = Device(cuda, 12, 12)
    outs = [BlockCopy(block, block) for block in range(8)]
    device.step(StepPlan(swap_outs=outs), {9}, torch.tensor([3 * BLOCK_SIZE, 9 * BLOCK_SIZE]))
    assert device.space.keys[0][:8, 0].tolist() == [1000, 1001, 1002, 3, 1004, 1005, 1006, 1007]
    device.step(StepPlan(), {9}, torch.tensor([9 * BLOCK_SIZE + 1]))
    assert device.space.keys[0][4:, 0].min() == 1004, "nobody has to wait for any of them yet"
    device.step(StepPlan(), {9, 2}, torch.tensor([2 * BLOCK_SIZE]))  # third of those that leave two by two
    assert device.space.keys[0][:8, 0].tolist() == [0, 1, 2, 3, 4, 1005, 1006, 1007]
    device.step(StepPlan(swap_ins=[BlockCopy(0, 7)]), {7}, torch.tensor([-1]))
    assert device.space.keys[0][:8, 0].tolist() == list(range(8)), "who comes in over it comes after it"
    assert device.cache.keys[0][7, 0] == 0


def test_what_is_under_way_is_over_before_its_memory_goes(cuda: FakeCuda) -> None:
    device = Device(cuda, 4, 4)
    space = device.space
    device.step(StepPlan(swap_outs=[BlockCopy(1, 2)]), set(), torch.tensor([0]))
    assert space.keys[0][2, 0] == 1002
    del device.swapper
    assert space.keys[0][2, 0] == 1


def test_late_swaps_change_no_answer(
    tmp_path_factory: pytest.TempPathFactory, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_random_model(tmp_path_factory.mktemp("model"))
    prompts = [[(11 * i * i + 5 * seed) % 290 for i in range(length)] for seed, length in enumerate((40, 3, 33, 17))]
    params = SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True)

    def answers() -> list[list[int]]:
        settings = {"num_kv_blocks": 16, "num_swap_blocks": 40, "block_size": 8, "preemption_mode": "swap"}
        with LLM(model, **settings, max_num_batched_tokens=32, enable_prefix_caching=False) as llm:  # type: ignore[arg-type]
            outputs = llm.generate([list(prompt) for prompt in prompts], params, use_tqdm=False)
            assert llm.kv_stats().swapped_in_blocks > 5
            return [list(output.outputs[0].token_ids) for output in outputs]

    expected = answers()

    def make_swapper(cache: KVCache, space: KVCache, copy_blocks: object) -> CudaSwapper:
        return CudaSwapper(cache, space, lambda *copies: cuda.launch(partial(copy_blocks, *copies)))  # type: ignore[arg-type]

    monkeypatch.setattr("quire.execution.device.Swapper", make_swapper)
    monkeypatch.setattr("quire.execution.device.HostDevice.executor", executor_in_flight)
    assert answers() == expected


def test_block_that_leaves_and_comes_back_in_one_step_is_the_same(cuda: FakeCuda) -> None:
    device = Device(cuda, 4, 4)
    plan = StepPlan(swap_outs=[BlockCopy(0, 2), BlockCopy(1, 3)], swap_ins=[BlockCopy(2, 3)])
    device.step(plan, {3}, torch.tensor([-1]))
    assert device.cache.keys[0][:, 0].tolist()[3] == 0
    device.swapper._stream.synchronize()  # type: ignore[attr-defined]
    assert device.space.keys[0][:, 0].tolist() == [1000, 1001, 0, 1]
