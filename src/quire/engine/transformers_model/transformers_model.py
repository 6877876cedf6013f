"""TransformersModel: a causal model of transformers as a `LanguageModel`.

The flat batch is one row of tokens with their positions. The head is the causal model itself around a body that
returns the hidden states it is given, so what the model does to its logits is done here too.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

from quire.core.arrays import dtype_name
from quire.engine.transformers_model.attention_hook import (
    AttentionHook,
    AttentionLayer,
    PagedStep,
    active,
    marker,
    of_back_end,
    tensor_of,
)
from quire.kernels.back_end import BackEnd
from quire.kernels.paged_attention import build_metadata
from quire.model.kv_cache import KVCache
from quire.model.kv_geometry import KVGeometry, LayerKV
from quire.model.language_model import ForwardBatch


class GivenHidden(nn.Module):
    """Body of a causal model that returns hidden states given before the call."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden: Tensor | None = None

    def forward(self, *_: object, **__: object) -> BaseModelOutputWithPastAndCrossAttentions:
        """Return the hidden states [1, num_rows, hidden_size]."""
        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=self.hidden)


class TransformersModel:
    """A `LanguageModel`; `layers` are those of its attention, in the order in which it calls them."""

    def __init__(
        self, causal: PreTrainedModel, layers: Sequence[AttentionLayer], back_end: BackEnd, dtype: torch.dtype,
        num_parameters: int, weight_bytes: int,
    ) -> None:  # fmt: skip
        self.dtype, self.device, self.back_end = back_end.library.dtype(dtype_name(dtype)), "cpu", back_end
        self.num_parameters, self.weight_bytes = num_parameters, weight_bytes
        self.vocab_size: int = causal.config.get_text_config().vocab_size
        self.pad_token_id: object = getattr(causal.config.get_text_config(), "pad_token_id", None)
        self.progress = np.zeros(1, np.int64)
        stored, scales = back_end.cache_layout.stored_dtype(self.dtype, "auto")
        self.kv_geometry = KVGeometry(tuple(
            LayerKV(each.num_kv_heads, each.head_dim, stored, scales, each.window) for each in layers
        ))  # fmt: skip
        pairs = 4.0 * layers[0].num_heads * layers[0].head_dim
        self.layer_flops = 2.0 * num_parameters / len(layers), pairs
        self._layers = list(layers)
        prefix = causal.base_model_prefix
        self.body: nn.Module = getattr(causal, prefix)
        self._given = GivenHidden()
        setattr(causal, prefix, self._given)
        self._causal = causal
        self.no_mask = marker(None)  # windows are those of the trace

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Any:  # noqa: ANN401 (as the back end has tensors)
        """Compute a batch and write its keys and values; return hidden states [num_tokens, hidden_size]."""
        assert batch.adapters is None, "adapters are refused at start"
        metadata = build_metadata(batch.block_tables, batch.query_starts, batch.context_lens, cache.block_size)
        step = PagedStep(self._layers, self.back_end, batch, metadata, cache, self.progress)
        token_ids, positions = map(torch.as_tensor, (batch.token_ids, batch.positions))
        hidden = self.run(token_ids, positions, step, self.no_mask)
        return of_back_end(self.back_end, hidden)

    def run(
        self, token_ids: Tensor, positions: Tensor | None, hook: AttentionHook, mask: Tensor | None
    ) -> Tensor:
        """Run the body over token_ids and positions [num_tokens] with a hook; return [num_tokens, hidden_size].

        Without positions the body counts its own.
        """
        given = None if positions is None else positions[None]
        with active(hook), torch.inference_mode():
            output = self.body(input_ids=token_ids[None], position_ids=given, attention_mask=mask, use_cache=False)
        hidden: Tensor = output[0][0]
        return hidden

    def logits(self, hidden: Any) -> Any:  # noqa: ANN401 (as the back end has tensors)
        """Return float32 logits [num_rows, vocab_size] of hidden states [num_rows, hidden_size]."""
        self.progress += 1
        return of_back_end(self.back_end, self.tensor_logits(tensor_of(hidden)))

    def tensor_logits(self, hidden: Tensor) -> Tensor:
        """Return the logits of tensors."""
        self._given.hidden = hidden[None]
        with torch.inference_mode():
            logits: Tensor = self._causal(input_ids=torch.zeros(1, len(hidden), dtype=torch.int64), use_cache=False)[0]
        self._given.hidden = None
        return logits[0].float()
