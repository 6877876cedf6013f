"""Logits of every position of a sequence, in one forward pass of a model without an engine around it."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quire.engine.loading import load
from quire.engine.options import EngineOptions
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch, LanguageModel
from support.on_tensors import run

_BLOCK_SIZE = 16
_ROWS_AT_ONCE = 64


def load_model(path: Path, **options: Any) -> LanguageModel:  # noqa: ANN401 (those of EngineOptions)
    """Return the model of a folder or file, as an engine with these options would load it."""
    return load(EngineOptions(str(path), **options), path).model


@torch.inference_mode()
def whole_logits(model: LanguageModel, ids: Sequence[int]) -> Tensor:
    """Return float32 logits [len(ids), vocab_size]."""
    length, num_blocks = len(ids), -(-len(ids) // _BLOCK_SIZE)
    cache = KVCache.allocate(model.kv_geometry, num_blocks, _BLOCK_SIZE, model.back_end)
    places = torch.arange(length)
    starts, lens = torch.tensor([0, length], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    tables = torch.arange(num_blocks, dtype=torch.int32)[None]
    batch = ForwardBatch(torch.tensor(ids), places, places, starts, lens, tables)
    return run(model, batch, cache)


def divergences(expected: Tensor, found: Tensor) -> Tensor:
    """Return the KL divergence from the expected distribution at each position, in nats, of logits [length, vocab]."""
    parts = zip(expected.split(_ROWS_AT_ONCE), found.split(_ROWS_AT_ONCE), strict=True)
    logprobs = ((one.double().log_softmax(-1), other.double().log_softmax(-1)) for one, other in parts)
    return torch.cat([(one.exp() * (one - other)).sum(dim=-1) for one, other in logprobs])


def losses(logits: Tensor, ids: Sequence[int]) -> Tensor:
    """Return the negative logprob of each token but the first, after those before it: float32 [len(ids) - 1]."""
    return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:]), reduction="none")
