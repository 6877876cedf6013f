"""An engine around a model that is not a `Decoder`: whatever has the protocol's members is served."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.engine.assembly import build_engine
from quire.engine.loading import LoadedModel
from quire.engine.options import EngineOptions
from quire.engine.sizing import ModelLimits
from quire.execution.device import HostDevice
from quire.kernels.paged_attention import build_metadata
from quire.kernels.reference.back_ends import REFERENCE
from quire.model.kv_cache import KVCache, KVGeometry, LayerKV
from quire.model.language_model import ForwardBatch, LanguageModel
from support.paged_cache import plain_spec, rotary_spec

VOCAB, WIDTH, HEADS, LAYERS, MAX_LEN = 53, 24, 3, 2, 96


class HandwrittenModel:
    """Attention alone over learned positions, in plain torch but for the paged cache; of no family."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(4)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float32)

        self.tokens, self.positions = random(VOCAB, WIDTH), random(MAX_LEN, WIDTH)
        self.qkv = [random(3 * WIDTH, WIDTH) / WIDTH**0.5 for _ in range(LAYERS)]
        self.vocab_size, self.dtype, self.device, self.back_end = VOCAB, torch.float32, torch.device("cpu"), REFERENCE
        self.kv_geometry = KVGeometry((LayerKV(HEADS, WIDTH // HEADS, "float32"),) * LAYERS)
        self.progress = torch.zeros(1, dtype=torch.int64)
        self.num_parameters, self.weight_bytes, self.layer_flops = 1000, 4000, (1.0, 1.0)

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        metadata = build_metadata(batch.block_tables, batch.query_starts, batch.context_lens, cache.block_size)
        x = self.tokens[batch.token_ids] + self.positions[batch.positions]
        for weight, keys, values in zip(self.qkv, cache.keys, cache.values, strict=True):
            query, key, value = F.linear(x, weight).view(len(x), 3, HEADS, -1).unbind(1)
            rotary, spec = rotary_spec(query, key), plain_spec(query, key.shape[1], 0.5)
            self.back_end.write_kv(rotary, query, key, value, batch.positions, keys, values, batch.slot_mapping)
            x = x + self.back_end.paged_attention(spec, query, keys, values, metadata).flatten(1)
            self.progress += 1
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.tokens.T

    def next_token(self, tokens: list[int]) -> int:
        """Return the most likely next token, by contiguous attention over all tokens."""
        x = self.tokens[tokens] + self.positions[: len(tokens)]
        for weight in self.qkv:
            query, key, value = F.linear(x, weight).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
            attended = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
            x = x + attended.transpose(0, 1).flatten(1)
        return int(self.logits(x[-1:]).argmax())


@pytest.mark.parametrize("num_kv_blocks", [60, 14])
def test_model_of_no_family_is_served_as_by_a_plain_forward_pass(num_kv_blocks: int) -> None:
    """With few blocks, requests are preempted; all of them share a prefix, and prompts are computed in chunks."""
    model = HandwrittenModel()
    served: LanguageModel = model
    limits = ModelLimits(MAX_LEN, model.kv_geometry.bytes_per_token(16), None)
    options = EngineOptions(
        device="cpu", max_model_len=MAX_LEN, num_kv_blocks=num_kv_blocks, block_size=8, max_num_seqs=4,
        max_num_batched_tokens=16, num_swap_blocks=20,
    )  # fmt: skip
    engine = build_engine(options, LoadedModel(served, limits, frozenset(), HostDevice())).engine
    prompts = [[7, 8, 9] * 7 + list(range(index + 1)) for index in range(6)]
    for index, prompt in enumerate(prompts):
        engine.add(Request(index, prompt, SamplingParams(temperature=0.0), seed=0, max_tokens=30))
    answers: dict[int, list[int]] = {index: [] for index in range(len(prompts))}
    while engine.scheduler.has_requests:
        for delta in engine.step():
            assert delta.error is None
            answers[delta.request_id] += delta.token_ids
    for index, prompt in enumerate(prompts):
        tokens = list(prompt)
        for _ in range(30):
            tokens.append(model.next_token(tokens))
        assert answers[index] == tokens[len(prompt) :]
    if num_kv_blocks == 14:
        assert sum(engine.kv_stats().preemptions.values()) > 0
    assert int(model.progress) > 0
