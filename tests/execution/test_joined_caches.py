"""Two models over the same block tables: forks, swaps and prefix hits leave the caches of both right.

The models have different layers, heads and head sizes. The engine samples from the sum of their logits, so that an
error in either cache changes tokens or logprobs.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.outputs import KVStats
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.engine.engine import Engine
from quire.execution.batch import PersistentBatch
from quire.execution.executor import LocalExecutor
from quire.execution.swapper import Swapper, allocate_swap_space
from quire.execution.worker import StepCompute, Worker
from quire.kernels.choice import choose_back_end
from quire.kernels.tensors import Tensor, floats, like
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import load_model
from quire.scheduling.scheduler import Scheduler, make_cache
from support.random_model import VOCAB_SIZE, write_random_model
from support.zero_model import write_zero_model

BLOCK_SIZE, MAX_LEN = 8, 160
PREFIX = [(7 * i) % VOCAB_SIZE for i in range(43)]


class TwoModels:
    """Two decoders that see the same tokens; hidden states side by side, logits added."""

    def __init__(self, first: Decoder, second: Decoder) -> None:
        self.models = first, second
        self.back_end, self.device, self.dtype = first.back_end, first.device, first.back_end.library.dtype("float32")
        self.vocab_size = VOCAB_SIZE
        self.kv_geometry = first.kv_geometry.joined(second.kv_geometry)
        self._width: int | None = None

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        parts = cache.split([model.kv_geometry.num_layers for model in self.models])
        first, second = (model.forward(batch, part) for model, part in zip(self.models, parts, strict=True))
        self._width = first.shape[1]
        return self.back_end.library.tensor(np.concatenate([floats(first), floats(second)], axis=1))

    def logits(self, hidden: Tensor) -> Tensor:
        assert self._width is not None
        widths = self._width, hidden.shape[1] - self._width
        halves = zip(self.models, np.split(floats(hidden), widths[:1], axis=1), strict=True)
        first, second = (floats(model.logits(self._taken(model, half))).copy() for model, half in halves)
        return self.back_end.library.tensor(first + second)

    def _taken(self, model: Decoder, states: NDArray[np.float32]) -> Tensor:
        one = model.back_end.library.tensor(np.zeros(1, np.float32))
        dtype = model.dtype
        return like(np.ascontiguousarray(states), np.empty(0, dtype) if isinstance(one, np.ndarray) else one.to(dtype))


@pytest.fixture(scope="module", params=["torch", "auto"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TwoModels:
    back_end = choose_back_end(torch.device("cpu"), request.param)
    first = load_model(write_random_model(tmp_path_factory.mktemp("first")), back_end=back_end)
    sizes = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "num_key_value_heads": 3}
    folder = write_zero_model(
        tmp_path_factory.mktemp("second"), "Qwen2", "bfloat16", head_dim=16, max_position_embeddings=640, **sizes
    )
    generator, weights = torch.Generator().manual_seed(1), load_file(folder / "model.safetensors")
    for weight in weights.values():
        weight.normal_(std=weight.shape[-1] ** -0.5, generator=generator)
    save_file(weights, folder / "model.safetensors")
    return TwoModels(first, load_model(folder, back_end=back_end))


def requests() -> list[Request]:
    """Prompts that share 43 tokens, that is five blocks and a part; each is continued in two branches."""
    return [
        Request(
            request_id=i,
            prompt_token_ids=[*PREFIX, *((11 * i + j) % VOCAB_SIZE for j in range(3 * i))],
            params=SamplingParams(n=2, temperature=1.0, logprobs=1),
            seed=i,
            max_tokens=40,
        )
        for i in range(6)
    ]


class Served:
    """An engine over two models, and what it answers: the tokens and logprobs of every branch."""

    def __init__(self, model: TwoModels, num_blocks: int, num_swap_blocks: int, tmp_path: Path) -> None:
        cache = KVCache.allocate(model.kv_geometry, num_blocks, BLOCK_SIZE, model.back_end)
        sizes = max(1, num_swap_blocks), BLOCK_SIZE
        space = allocate_swap_space(model.kv_geometry, *sizes, model.back_end, str(tmp_path))
        swapper = Swapper(cache, space, model.back_end.copy_blocks)
        batch = PersistentBatch(16, MAX_LEN, BLOCK_SIZE, VOCAB_SIZE)
        worker = Worker(StepCompute(model, cache, batch, swapper))
        scheduler = Scheduler(
            SchedulerConfig(max_num_seqs=16, max_num_batched_tokens=64, max_model_len=MAX_LEN, preemption_mode="swap"),
            make_cache(CacheConfig(num_blocks, BLOCK_SIZE, num_swap_blocks=num_swap_blocks)),
        )
        self.engine = Engine(scheduler, LocalExecutor(worker))
        self.answers: dict[tuple[int, int], list[object]] = {}

    def run(self, *asked: Request) -> KVStats:
        for request in asked:
            self.engine.add(request)
        while self.engine.scheduler.has_requests:
            for delta in self.engine.step():
                assert delta.error is None, delta.error
                answer = self.answers.setdefault((delta.request_id, delta.index), [])
                answer += zip(delta.token_ids, delta.logprobs or [], strict=True)
        return self.engine.kv_stats()


def test_forks_swaps_and_prefix_hits_leave_both_caches_right(model: TwoModels, tmp_path: Path) -> None:
    alone: dict[tuple[int, int], list[object]] = {}
    for request in requests():
        served = Served(model, 60, 0, tmp_path)
        stats = served.run(request)
        assert stats.swapped_in_blocks == 0
        alone |= served.answers
    together = Served(model, 40, 80, tmp_path)
    asked = requests()
    stats = together.run(*asked)
    assert stats.copied_blocks >= 6, "each fork within a block copies it"
    assert stats.swapped_out_blocks > 0
    assert stats.swapped_in_blocks > 0
    assert sum(request.num_cached_tokens for request in asked) > 0
    assert all(len(answer) == 40 for answer in alone.values())
    assert together.answers == alone
