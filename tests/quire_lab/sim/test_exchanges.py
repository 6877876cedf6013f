"""What the plan says of exchanges between ranks is what a rank asks of the others."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.engine.parallel.rank_messages import MemoryLayout
from quire.engine.parallel.shared_memory import SharedRanks
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.layers import Linear
from quire.kernels.reference.back_ends import REFERENCE
from quire.model.config import spec_from_config
from quire.model.decoder import Decoder
from quire.model.dummy_weights import DummyCheckpoint
from quire.model.sharding import ADDED_BYTES, Cut, Mode, Ranks, Shard
from quire.model.spec import DecoderSpec
from quire.model.weights import WeightReader
from quire_lab.sim.hardware import Exchanges
from support.paged_runner import PagedRunner
from support.thread_ranks import RankDecoder, in_threads, make_ranks

SIZES: dict[str, object] = {
    "vocab_size": 96, "hidden_size": 96, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 16, "max_position_embeddings": 512, "mamba_n_heads": 12, "mamba_d_state": 16,
    "mamba_d_ssm": 192,
}  # fmt: skip
NEMOTRON = {
    "architectures": ["NemotronHForCausalLM"], "mamba_num_heads": 12, "mamba_head_dim": 16, "ssm_state_size": 16,
    "n_routed_experts": 4, "moe_intermediate_size": 48, "moe_shared_expert_intermediate_size": 64,
}  # fmt: skip
CONFIGS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "shared expert": {
        "architectures": ["Qwen2MoeForCausalLM"], "num_experts": 5, "num_experts_per_tok": 2,
        "moe_intermediate_size": 48, "shared_expert_intermediate_size": 80,
    },
    "falcon-h1": {"architectures": ["FalconH1ForCausalLM"]},
    "falcon-h1, a norm": {"architectures": ["FalconH1ForCausalLM"], "mamba_rms_norm": True},
    "bamba": {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1]},
    "nemotron-h": NEMOTRON | {"hybrid_override_pattern": "M-*E", "num_hidden_layers": 4, "n_groups": 1},
    "nemotron-h, latents": NEMOTRON
    | {"hybrid_override_pattern": "ME*M", "num_hidden_layers": 4, "n_groups": 6, "moe_latent_size": 48},
}  # fmt: skip


@dataclass
class CountingRank:
    """A rank that hears nothing of the others: what it asks of them is counted."""

    shard: Shard
    number: int = 0
    num_bytes: int = 0

    def gather(self, cut: Cut) -> "CountingHook":
        first, stop = cut.of(self.shard.rank)
        return CountingHook(self, stop - first, cut.width, first)

    def sum(self, width: int) -> "CountingHook":
        return CountingHook(self, width, width)

    def joined_head(self, head: Linear, cut: Cut) -> Linear:
        return head

    def count_sum(self, num_rows: int, width: int, itemsize: int) -> None:
        """Count what csrc/gather.cpp does for partial sums."""
        others = self.shard.num_ranks - 1
        if 4 * num_rows * width <= ADDED_BYTES:
            self.number, self.num_bytes = self.number + 1, self.num_bytes + others * 4 * num_rows * width
            return
        bounds = [width * rank // self.shard.num_ranks for rank in (self.shard.rank, self.shard.rank + 1)]
        num_own = bounds[1] - bounds[0]
        self.number += 2
        self.num_bytes += num_rows * (others * 4 * num_own + (width - num_own) * itemsize)


@dataclass
class CountingHook:
    """An exchange of a layer: one in a step, though the reference makes one for each expert."""

    rank: CountingRank
    num_own: int
    width: int
    first: int = 0
    partial_dtype: torch.dtype = torch.float32
    address: None = None
    is_counted: bool = False

    def __call__(self, own: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        if dtype is not None:
            self.rank.count_sum(len(own), self.width, dtype.itemsize)
            return own.to(dtype)
        self.rank.number += not self.is_counted
        self.is_counted = True
        self.rank.num_bytes += len(own) * (self.width - self.num_own) * own.itemsize
        rows = own.new_zeros(len(own), self.width)
        rows[:, self.first : self.first + self.num_own] = own
        return rows


def load(spec: DecoderSpec, back_end: BackEnd, ranks: Ranks) -> Decoder:
    weights = WeightReader(DummyCheckpoint(spec), spec.weights, back_end, "bfloat16", "cpu")
    return Decoder(spec, weights, 512, 512, ranks)


class WithoutHead(RankDecoder):
    """A decoder with zeros for logits, which are not exchanged then."""

    def logits(self, hidden: Any) -> Tensor:  # noqa: ANN401 (an array, or a tensor)
        return torch.zeros(len(hidden), 1)


def compute(decoder: Decoder, num_tokens: int) -> None:
    with torch.inference_mode():
        PagedRunner(WithoutHead(decoder, is_first=True)).step({"a": [1] * num_tokens})  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [1, 200])
@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize("mode", ["gather", "reduce"])
@pytest.mark.parametrize("name", CONFIGS)
def test_exchanges_are_those_of_the_engine(name: str, mode: Mode, num_ranks: int, num_tokens: int) -> None:
    spec = spec_from_config(SIZES | CONFIGS[name])
    planned = Exchanges.of(spec, 2, num_ranks, mode, num_tokens)
    counted = [CountingRank(Shard(rank, num_ranks, mode)) for rank in range(num_ranks)]
    for rank in counted:
        compute(load(spec, REFERENCE, rank), num_tokens)
    assert {rank.number for rank in counted} == {planned.number}
    assert sum(rank.num_bytes for rank in counted) // num_ranks == planned.num_bytes


@pytest.mark.parametrize("mode", ["gather", "reduce"])
@pytest.mark.parametrize("name", CONFIGS)
def test_ranks_meet_as_often_as_planned(name: str, mode: Mode) -> None:
    spec = spec_from_config(SIZES | CONFIGS[name])
    ranks = make_ranks(3, MemoryLayout.of(spec, 8, 3), mode)
    back_end = choose_back_end(torch.device("cpu"), "cpp")

    def run(rank: SharedRanks) -> None:
        compute(load(spec, back_end, rank), 2)

    in_threads(ranks, run)
    published = ranks[0]._memory[64:68].view(np.uint32)  # rank 0's counter, behind the word of interrupts
    assert published[0] == Exchanges.of(spec, 2, 3, mode, 2).number
