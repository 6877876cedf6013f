"""Attention hook: what transformers calls in place of its attention, and of building its masks.

A model calls `attention` once per layer, in the order of its layers; the object that is `active` says what happens: a
`Trace` records what the layers ask for, a `PagedStep` writes to the cache and attends over it. Masks are not built.
In a trace a mask is a marker that carries the window of the layers that receive it.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.utils.logging import disable_progress_bar

from quire.core.errors import ModelError
from quire.kernels.back_end import BackEnd
from quire.kernels.kv_cache_write import RotarySpec
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec, Heads
from quire.kernels.tensors import NUMPY_LIBRARY
from quire.kernels.torch_arrays import to_array, to_tensor
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch

NAME = "quire"
WITHOUT_EFFECT = frozenset({  # on the attention of a causal model without a cache of its own
    "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "position_embeddings", "past_key_values", "is_causal", "scaling", "sliding_window", "softcap",
    "s_aux", "logits_to_keep", "num_items_in_batch",
})  # fmt: skip


def of_back_end(back_end: BackEnd, tensor: Tensor) -> Any:  # noqa: ANN401 (an Array, or a Tensor)
    """Return a tensor as the back end takes it, in the same memory."""
    return to_array(tensor.detach()) if back_end.library is NUMPY_LIBRARY else tensor


def tensor_of(found: Any) -> Tensor:  # noqa: ANN401 (an Array, or a Tensor)
    """Return what a back end has returned as a tensor, in the same memory."""
    return to_tensor(found) if isinstance(found, np.ndarray) else found


class AttentionHook(Protocol):
    """Attention of one forward pass."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, options: Mapping[str, Any]
    ) -> Tensor:
        """Return [1, num_tokens, num_heads, head_dim] for query, key, value [1, heads, num_tokens, head_dim]."""


_ACTIVE: ContextVar[AttentionHook] = ContextVar("attention_hook")


@contextmanager
def active(hook: AttentionHook) -> Iterator[None]:
    """Let a hook serve the attention of models that run in this thread."""
    token = _ACTIVE.set(hook)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Call the active hook; the signature is that of transformers' attention functions."""
    return _ACTIVE.get().attend(module, query, key, value, attention_mask, options), None


def mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Tensor],
    local_size: int | None = None, **options: object,
) -> Tensor:  # fmt: skip
    """Return a marker in place of a mask: its `window` is that of the mask, None for a causal one.

    Raises ModelError for a mask that is neither causal nor of a sliding window. Only traces ask for masks.
    """
    return marker(_window(mask_function, local_size))


def marker(window: int | None) -> Tensor:
    """Return a tensor in place of a mask, of four dimensions: transformers passes it on to the layers as it is."""
    found = torch.zeros(1, 1, 1, 1)
    found.window = window  # type: ignore[attr-defined]
    return found


def _window(mask_function: Callable[..., Tensor], local_size: int | None) -> int | None:
    """Return the window of a mask, by what a few queries see around the places where masks differ."""
    size = local_size or 4
    queries = [0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1]
    places = sorted({max(0, each + step) for query in queries for each in (query, query - size) for step in (-1, 0, 1)})
    zero = torch.tensor(0)
    for query in queries:
        for place in places:
            seen = bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(place)))
            if seen != (place <= query and (local_size is None or place > query - local_size)):
                raise ModelError("a mask of it is neither causal nor of a sliding window")
    return local_size


def install() -> None:
    """Register the hook with transformers, under NAME, and turn off its progress bars."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """What one layer asks of attention."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float
    has_sinks: bool


@dataclass(slots=True)
class Trace:
    """Hook that records the layers of a forward pass. Each row of its result depends on the row alone."""

    layers: list[AttentionLayer] = field(default_factory=list)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, options: Mapping[str, Any]
    ) -> Tensor:
        """Record a layer; return values of its own heads, plus queries."""
        unknown = [name for name, given in options.items() if name not in WITHOUT_EFFECT and given not in (None, False)]
        if unknown:
            raise ModelError(f"its attention has the option {unknown[0]}, which is not known")
        if options.get("is_causal") is False:
            raise ModelError("its attention is bidirectional")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise ModelError(f"its keys are {[*key.shape[1:]]} and its values {[*value.shape[1:]]}, not alike")
        if mask is not None and not hasattr(mask, "window"):
            raise ModelError("it changes masks after they are made, which a paged cache cannot follow")
        self.layers.append(AttentionLayer(
            query.shape[1], key.shape[1], query.shape[3], getattr(mask, "window", None),
            float(options.get("softcap") or 0.0), options.get("s_aux") is not None,
        ))  # fmt: skip
        group = query.shape[1] // key.shape[1]
        return (query + value.repeat_interleave(group, dim=1)).transpose(1, 2)


class PagedStep:
    """Hook of one step: layers write keys and values to the cache, and attend over it."""

    def __init__(
        self, layers: list[AttentionLayer], back_end: BackEnd, batch: ForwardBatch, metadata: AttentionMetadata,
        cache: KVCache, progress: NDArray[np.int64],
    ) -> None:  # fmt: skip
        self._layers, self._back_end, self._batch, self._metadata = layers, back_end, batch, metadata
        self._cache, self._progress = cache, progress
        self._index = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, options: Mapping[str, Any]
    ) -> Tensor:
        index = self._index
        self._index += 1
        self._progress += 1
        layer, keys, values = self._layers[index], self._cache.keys[index], self._cache.values[index]
        flat = (of_back_end(self._back_end, each[0].transpose(0, 1).contiguous()) for each in (query, key, value))
        rows, new_keys, new_values = flat  # [num_tokens, heads, head_dim]
        batch = self._batch
        heads = Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        rows = self._back_end.write_kv(
            RotarySpec(heads), rows, new_keys, new_values, batch.positions, keys, values, batch.slot_mapping
        )
        scale, sinks = options.get("scaling") or layer.head_dim**-0.5, None
        if layer.has_sinks:
            sinks = of_back_end(self._back_end, options["s_aux"].float().contiguous())
        spec = AttentionSpec(heads, scale, layer.window, layer.softcap, sinks)
        return tensor_of(self._back_end.paged_attention(spec, rows, keys, values, self._metadata))[None]
