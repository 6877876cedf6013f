"""EAGLE-3 head: a layer with weights of its own that drafts for a target (Li et al. 2025).

It reads the residual streams in front of three layers of the target, projected to one hidden state, and the embedding
of the token behind. Its layer to logits may know some of the tokens alone. The formulas are those of vLLM's
`llama_eagle3.py`; `quire.model.eagle_config` reads the configs.
"""

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array
from quire.core.errors import ModelError
from quire.kernels.linear_weight import Table
from quire.kernels.tensors import NUMPY_LIBRARY, Tensor, concatenated_columns, contiguous, full
from quire.model.decoder import Decoder
from quire.model.draft_head import DraftHead
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.layer_builder import JOINED, ProgramInputs, make_norm
from quire.model.rope import RotaryTable, RotaryTables, inverse_frequencies
from quire.model.shapes import DecoderShapes, EagleShapes
from quire.model.spec import DecoderSpec, Rotary
from quire.model.weights import WeightReader

TARGETS = "d2t"  # tensor: what is added to the number of a row of the head, for the token's id in the target


class EagleHead(DraftHead):
    """The EAGLE-3 head of a target of which `forward` returns the streams that the head reads.

    `weights`: a reader of the head's checkpoint. `num_positions`: those that it may compute.
    """

    def __init__(
        self, target: Decoder, spec: DecoderSpec, weights: WeightReader, kv_cache_dtype: str, num_positions: int
    ) -> None:
        assert spec.eagle is not None
        self._eagle, shapes = spec.eagle, EagleShapes.of(spec)
        self._tokens: Table = target.embedding.tokens
        table = None
        if shapes.embedding is not None and not weights.has_values_of(self._tokens, shapes.embedding):
            table = weights.token_table(shapes.embedding)
            self._tokens = table.taken
        norms = (shapes.joined_norm, *shapes.tap_norms)
        self._tap_norms = [make_norm(spec, weights, shape) for shape in norms if shape is not None]
        self._project = weights.linear(shapes.projection)
        self._embedding_norm = make_norm(spec, weights, shapes.embedding_norm)
        self._hidden_norm = make_norm(spec, weights, shapes.hidden_norm)
        found = {each: inverse_frequencies(each, num_positions) for each in spec.rotaries}
        weights.tally.frequencies |= found
        self._rotary = RotaryTables(RotaryTable(own, num_positions, each.scale) for each, own in found.items())
        if target.back_end.library is not NUMPY_LIBRARY:
            self._rotary.fill(num_positions)
        tables = (weights.taken(each.values) for each in self._rotary.tables)
        cos_sin = dict(zip(spec.rotaries, tables, strict=True))
        shared = ProgramInputs(cos_sin, target.progress, reads_kv_scales=kv_cache_dtype == "fp8")
        super().__init__(target, spec, weights, shared, kv_cache_dtype)
        self._final_norm = make_norm(spec, weights, shapes.final_norm)
        layer_bytes = weights.tally.weight_bytes - weights.tally.table_bytes
        self._head = weights.head(DecoderShapes.of(spec).head, table, is_tied=False)
        num_bytes, first_bytes = layer_bytes + self._head.num_bytes, self._project.num_bytes + self._first_bytes
        self._pass_bytes = num_bytes, num_bytes - first_bytes
        self._targets = target_ids(weights, self._eagle.num_drafted, target.vocab_size)
        weights.tally.weight_bytes += 0 if self._targets is None else self._targets.nbytes

    @property
    def pass_bytes(self) -> tuple[int, int]:
        """Bytes of weights that a pass of one token reads, and the part of them that is read for a draft alone."""
        return self._pass_bytes

    @property
    def frequencies(self) -> dict[Rotary, Array]:
        """As in `Decoder`, of the head's own rotary embedding."""
        return self._tally.frequencies

    def states(self, hidden: Tensor) -> Tensor:
        """Return the projection of the streams, which are behind the target's hidden states, side by side."""
        size, norms = self._eagle.target_size, self._tap_norms
        taps = contiguous(hidden[:, size:])
        if self._eagle.has_joined_norm:
            taps, norms = norms[0](taps)[0], norms[1:]
        if norms:
            parts = (taps[:, number * size : (number + 1) * size] for number in range(len(norms)))
            taps = concatenated_columns([norm(part)[0] for norm, part in zip(norms, parts, strict=True)])
        return self._project(taps)

    def forward(self, batch: ForwardBatch, cache: KVCache, sequences: NDArray[np.int64]) -> Tensor:
        """Return the stream behind the last layer, normed if the head's drafts read that."""
        assert batch.hidden is not None, "an EAGLE-3 head without streams of its target"
        if (num_positions := batch.block_tables.shape[1] * cache.block_size) > self._rotary.num_filled:
            self._rotary.fill(num_positions)
        embedded, normed = self.back_end.embed(self._tokens, batch.token_ids), self._hidden_norm(batch.hidden)[0]
        joined = concatenated_columns([self._embedding_norm(embedded)[0], normed])
        stream = normed if self._eagle.is_residual_normed else batch.hidden
        stream = self._run(stream, batch, cache, sequences, {JOINED: joined})
        return self._final_norm(stream)[0] if self._eagle.is_output_normed else stream

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits by the head's own layer, -inf for tokens that it does not know."""
        logits = self._head(hidden if self._eagle.is_output_normed else self._final_norm(hidden)[0])
        if self._targets is None:
            return logits
        found = full((len(logits), self.vocab_size), -np.inf, logits)
        found[:, self._targets] = logits
        return found


def target_ids(weights: WeightReader, num_drafted: int, vocab_size: int) -> NDArray[np.int64] | None:
    """Return the target's id of each token that a head drafts, int64 [num_drafted]; None: the same ids.

    Heads of all tokens have the target's ids, whatever their table says, as in vLLM; those without a table have the
    first ones. Raises ModelError for an id that the target does not have.
    """
    if num_drafted == vocab_size:
        return None
    found, offsets = np.arange(num_drafted), weights.integers(TARGETS, num_drafted)
    if offsets is not None:
        found += offsets
    outside = np.flatnonzero((found < 0) | (found >= vocab_size))
    if outside.size:
        raise ModelError(
            f"tensor {TARGETS}: token {outside[0]} of the head is token {found[outside[0]]} of the model, which has "
            f"{vocab_size} tokens"
        )
    return found
