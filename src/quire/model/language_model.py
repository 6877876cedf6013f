"""Language model protocol: all that the worker, memory profiling and the engine's assembly know of a model.

`Decoder` implements it for all model families; any object with these members is served as well.
"""

from typing import Protocol

import torch
from torch import Tensor

from quire.kernels.back_end import BackEnd
from quire.model.batch import ForwardBatch
from quire.model.kv_cache import KVCache
from quire.model.kv_geometry import KVGeometry


class LanguageModel(Protocol):
    """A model on its device: token ids, positions and cache tensors in, hidden states and logits out."""

    @property
    def vocab_size(self) -> int:
        """Token ids, and columns of the logits."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the weights and the activations; the KV cache's is in the geometry."""

    @property
    def device(self) -> torch.device:
        """Device of the weights; the KV cache is on the same one."""

    @property
    def back_end(self) -> BackEnd:
        """Kernels of the model, of block copies and of sampling."""

    @property
    def kv_geometry(self) -> KVGeometry:
        """Keys and values that the model writes, layer by layer."""

    @property
    def progress(self) -> Tensor:
        """Count of layers and heads computed since start, int64 [1] on the host; any thread may read it."""

    @property
    def num_parameters(self) -> int:
        """Parameters, a tied head counted once."""

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""

    @property
    def layer_flops(self) -> tuple[float, float]:
        """Floating-point operations of a layer: per token, and per pair of a token and one that it attends to."""

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Compute a batch and write its keys and values; return hidden states [num_tokens, any width] for `logits`.

        `cache` has the layers of `kv_geometry`, and is the same object in every call of a worker.
        """

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size] of rows of hidden states."""
