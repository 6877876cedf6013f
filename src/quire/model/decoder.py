"""The decoder, or encoder: embeddings, a layer program and a head, built from a spec."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import Array
from quire.kernels.back_end import BackEnd, require, require_attention, require_kv_dtype, require_ops
from quire.kernels.layers import Linear
from quire.kernels.linear_weight import StoredTable, Table
from quire.kernels.paged_attention import build_metadata
from quire.kernels.program import LayerInputs, OpTime, Program, ProgramTimer
from quire.kernels.read_rows import ReadRows, of_read_rows
from quire.kernels.special_ops import SummedLinearOp
from quire.kernels.tensors import (
    NUMPY_LIBRARY,
    DType,
    Tensor,
    added,
    contiguous,
    divided,
    empty_like,
    scaled,
    take_rows,
    tanh,
)
from quire.model.config import num_layer_weights
from quire.model.kv_cache import KVCache, KVGeometry, LayerKV
from quire.model.language_model import ForwardBatch
from quire.model.layer_builder import ProgramInputs, build_program, make_norm, with_added_rows, with_taps
from quire.model.rope import RotaryTable, RotaryTables, inverse_frequencies
from quire.model.shapes import DecoderShapes, LinearShape
from quire.model.sharding import Ranks
from quire.model.spec import DecoderSpec, Rotary
from quire.model.weights import TokenTable, WeightReader

if TYPE_CHECKING:
    from quire.model.merging_vision import MergingTower
    from quire.model.tiled_vision import TiledTower
    from quire.model.vision import VisionTower

BLOCK_SIZE = 32  # tokens: texts are short, and the rest of a text's last block is not touched
MAX_STEP_IMAGE_TOKENS = 1 << 16  # with positions by row and column; 32 MB of addresses, of which a step touches its own


class TextCache:
    """Memory that grows to the largest step: its tokens, and less than BLOCK_SIZE more for each text."""

    def __init__(self, spec: DecoderSpec, dtype: DType, back_end: BackEnd) -> None:
        stored = back_end.cache_layout.stored_dtype(dtype, "auto")
        attention = spec.attentions[0]  # heads of an encoder are alike in all layers
        self._geometry = KVGeometry((LayerKV(attention.num_kv_heads, attention.head_dim, *stored),))
        self._num_layers, self._back_end = spec.num_layers, back_end
        self._num_blocks, self._cache = 0, KVCache([], [], BLOCK_SIZE)

    def place(self, batch: ForwardBatch) -> tuple[ForwardBatch, KVCache]:
        """Return the batch with places for its texts, and the cache that has them. Each text is there as a whole."""
        lengths = np.diff(np.asarray(batch.query_starts)).astype(np.int64)
        assert np.array_equal(lengths, np.asarray(batch.context_lens)), "a part of a text"
        num_blocks = (lengths + BLOCK_SIZE - 1) // BLOCK_SIZE
        first_blocks = num_blocks.cumsum() - num_blocks
        self._grow(int(num_blocks.sum()))
        columns = np.arange(num_blocks.max())
        tables = (first_blocks[:, None] + columns).astype(np.int32)  # past a text's blocks they are not followed
        slots = (first_blocks * BLOCK_SIZE).repeat(lengths) + np.asarray(batch.positions)
        slots, tables = map(self._back_end.library.tensor, (slots, tables))
        return replace(batch, slot_mapping=slots, block_tables=tables), self._cache

    def _grow(self, num_blocks: int) -> None:
        if num_blocks <= self._num_blocks:
            return
        self._num_blocks = 1 << (num_blocks - 1).bit_length()
        own = KVCache.allocate(self._geometry, self._num_blocks, BLOCK_SIZE, self._back_end)
        self._cache = KVCache(own.keys * self._num_layers, own.values * self._num_layers, BLOCK_SIZE)


class LayerPrograms(NamedTuple):
    """The layers as programs: of most steps, of those in which not all rows are read, and of those with images."""

    whole: Program
    of_read_rows: Program | None  # None: all rows are computed
    with_images: Program


class Decoder:
    """A model that is ready to run. Knows token ids, positions and cache tensors; no request and no sequence.

    An encoder computes whole texts, on keys and values that it keeps for a step alone.
    """

    vision: "VisionTower | MergingTower | TiledTower | None" = None  # its encoder of images

    def __init__(
        self,
        spec: DecoderSpec,
        weights: WeightReader,
        max_positions: int,
        table_positions: int,
        ranks: Ranks | None = None,
        kv_cache_dtype: str = "auto",
        max_truncated: int = 1,
    ) -> None:
        self.spec, self.dtype, self.device, self.back_end = spec, weights.dtype, weights.device, weights.back_end
        require_kv_dtype(self.back_end.attention, kv_cache_dtype)
        local = spec if ranks is None else ranks.shard.local_spec(spec)
        layout = self.back_end.cache_layout
        self.kv_geometry = KVGeometry.of(
            local, *layout.stored_dtype(self.dtype, kv_cache_dtype), tail_dtype=layout.stored_dtype(self.dtype).element,
            max_truncated=max_truncated,
        )  # fmt: skip
        shapes = DecoderShapes.of(spec)
        self._text_cache = None if spec.is_causal else TextCache(spec, self.dtype, self.back_end)
        is_head_whole = spec.has_head and spec.is_head_tied and ranks is None
        tokens = weights.embedding(shapes.embedding, shapes.head if is_head_whole else None)
        self.embedding = Embedding(spec, shapes, weights, tokens.taken)
        frequencies = {each: inverse_frequencies(each, max_positions) for each in spec.rotaries}
        merging = spec.vision.merging if spec.vision is not None and str(self.device) == "cpu" else None
        axes = () if merging is None else merging.axes
        num_free = MAX_STEP_IMAGE_TOKENS if axes else 0
        self._rotary = RotaryTables(
            (RotaryTable(own, table_positions, each.scale, num_free) for each, own in frequencies.items()), axes
        )
        if self.back_end.library is not NUMPY_LIBRARY:
            self._rotary.fill(table_positions)  # other libraries may copy them
        tables = (weights.taken(table.values) for table in self._rotary.tables)
        cos_sin = dict(zip(spec.rotaries, tables, strict=True))
        progress = np.zeros(1, np.int64)
        self.shared = ProgramInputs(cos_sin, progress, ranks, kv_cache_dtype == "fp8", max_truncated)
        program = build_program(spec, weights, self.shared)
        summed = (op for op in program.ops if isinstance(op, SummedLinearOp))
        self.summed_inputs = {op.name: op.inputs for op in summed}  # inputs of each such layer that this rank has
        require_ops(self.back_end.name, program.ops)
        require_attention(self.back_end.attention, program.ops, self.dtype)
        self._unfused = [program]            # the last one is of steps with images
        if merging is not None and merging.deep_layers:
            self._unfused.append(with_added_rows(program, spec.hidden_size, len(merging.deep_layers)))
        self._programs = self._fused(self._unfused, can_cut=ranks is None and self.back_end.library is NUMPY_LIBRARY)
        project = None if shapes.project_out is None else weights.linear(shapes.project_out)
        self._classifier = None if shapes.classifier is None else ClassifierLayer(spec, shapes, weights.unprefixed())
        head = _head(spec, shapes.head, tokens, weights, ranks) if spec.has_head else None
        self._head = head if head is None or project is None else ProjectedHead(project, head)
        self._tally = weights.tally
        self._tally.frequencies |= frequencies

    def tap_layers(self, layers: Sequence[int]) -> None:
        """Let `forward` return the streams in front of some layers, too: columns behind those of the hidden states.

        `num_layers` is the place behind the last layer, before the final norm. A second call replaces the first one:
        weights that a sleep keeps get their head again.
        """
        width, num_layers = self.spec.hidden_size, self.spec.num_layers
        tapped = [with_taps(program, width, layers, num_layers) for program in self._unfused]
        self._programs = self._fused(tapped, can_cut=False)  # all rows are read

    def _fused(self, programs: Sequence[Program], *, can_cut: bool) -> LayerPrograms:
        fuse = self.back_end.fuse
        fused, cut = [fuse(each) for each in programs], of_read_rows(programs[0]) if can_cut else None
        return LayerPrograms(fused[0], None if cut is None else fuse(cut), fused[-1])

    @property
    def progress(self) -> NDArray[np.int64]:
        """Layers and heads run since start, [1]; any thread may look."""
        return self.shared.progress

    @property
    def vocab_size(self) -> int:
        """Token ids of the model."""
        return self.spec.vocab_size

    @property
    def num_parameters(self) -> int:
        """Parameters read, a tied head counted once."""
        return self._tally.num_parameters

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights in memory."""
        return self._tally.weight_bytes

    @property
    def read_bytes(self) -> int:
        """Bytes of the weights that a step reads, all experts among them; of a table of embeddings it reads rows."""
        return self.weight_bytes - self._tally.table_bytes

    @property
    def frequencies(self) -> dict[Rotary, Array]:
        """Radians per position of each rotary embedding's pairs of dimensions, as in `inverse_frequencies`."""
        return self._tally.frequencies

    @property
    def kept_weights(self) -> list[Linear | StoredTable | Array]:
        """All that the model computes with, but rotary tables, in the order in which it was read."""
        return self._tally.kept

    @property
    def layer_flops(self) -> tuple[float, float]:
        """Operations of a layer: per token, and per pair of a token and one that it attends to; means over layers."""
        num_layers = self.spec.num_layers
        return 2.0 * num_layer_weights(self.spec) / num_layers, self.spec.attended_flops / num_layers

    def forward(self, batch: ForwardBatch, cache: KVCache) -> Tensor:
        """Run one step: write the tokens' keys and values, return their hidden states [num_tokens, hidden_size].

        The hidden states are normed, ready for `logits`. They are in the model's dtype. `tap_layers` adds columns. Rows
        that the batch does not read may be anything.
        """
        if batch.adapters is not None:
            require(self.back_end.name, ["adapters"])
            batch = replace(batch, adapters=batch.adapters.grouped())
        if self._text_cache is not None:
            batch, cache = self._text_cache.place(batch)
        inputs = self.layer_inputs(batch, cache)
        x = self.embedding(batch.token_ids, batch.positions, batch.token_types)
        if batch.embeds is None:
            is_whole = batch.num_read is None or self._programs.of_read_rows is None
            return self._programs.whole.run(x, inputs) if is_whole else self._read(x, inputs, batch)
        rows, values, places = batch.embeds
        x[rows] = values[:, : self.spec.hidden_size]
        if places is not None:
            positions = np.asarray(batch.positions).copy()
            positions[rows] = self._rotary.place(places)  # the program's tables are in the same memory
            inputs = replace(inputs, positions=self.back_end.library.tensor(positions), added=(rows, values))
        return self._programs.with_images.run(x, inputs)

    def _read(self, x: Tensor, inputs: LayerInputs, batch: ForwardBatch) -> Tensor:
        """Return hidden states that have only the rows that are read."""
        assert batch.num_read is not None
        assert self._programs.of_read_rows is not None
        read = ReadRows.of(np.asarray(batch.query_starts), batch.num_read)
        found = self._programs.of_read_rows.run(x, replace(inputs, read_rows=read))
        hidden = empty_like(found, (len(inputs.positions), found.shape[1]))
        hidden[read.rows] = found
        return hidden

    def layer_inputs(self, batch: ForwardBatch, cache: KVCache) -> LayerInputs:
        """Return the inputs of a layer program in a step, with rotary tables as long as the step needs."""
        if (num_positions := batch.block_tables.shape[1] * cache.block_size) > self._rotary.num_filled:
            self._rotary.fill(num_positions)
        metadata = build_metadata(
            batch.block_tables, batch.query_starts, batch.context_lens, cache.block_size, batch.seen_ends
        )
        return LayerInputs(
            batch.positions, batch.slot_mapping, metadata, cache.keys, cache.values, batch.adapters, cache.states,
            batch.state_rows, token_ids=batch.token_ids,
        )

    def start_timing(self) -> list[ProgramTimer]:
        """Time each op of the layers, until `stop_timing` gets the result; between two steps, like that one."""
        timers = [ProgramTimer(each) for each in self._programs[:2] if each is not None]
        self._use_programs(*(each.timed for each in timers))
        return timers

    def stop_timing(self, timers: list[ProgramTimer]) -> list[OpTime]:
        """Return the seconds of each op since `start_timing`, in their order."""
        self._use_programs(*(each.untimed for each in timers))
        seconds = dict[tuple[str, str], float]()
        for time in (each for timer in timers for each in timer.stop()):
            seconds[time.name, time.kind] = seconds.get((time.name, time.kind), 0.0) + time.seconds
        return [OpTime(*op, total) for op, total in seconds.items()]

    def _use_programs(self, whole: Program, of_read_rows: Program | None = None) -> None:
        self._programs = self._programs._replace(whole=whole, of_read_rows=of_read_rows)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return float32 logits [num_rows, vocab_size or labels] of hidden states [num_rows, hidden_size].

        They are defined until the next call, which may write over them; the caller may change them.
        """
        if hidden.shape[1] != self.spec.hidden_size:
            hidden = self.untapped(hidden)
        if self._classifier is not None:
            hidden = self._classifier(hidden)
        logits = self.head_sums(hidden)
        if self.spec.logit_multiplier != 1:
            logits *= self.spec.logit_multiplier
        if self.spec.logit_softcap:
            logits = scaled(tanh(divided(logits, self.spec.logit_softcap)), self.spec.logit_softcap)
        return logits

    def untapped(self, hidden: Tensor) -> Tensor:
        """Return hidden states [num_rows, hidden_size] without the columns of tapped layers."""
        return contiguous(hidden[:, : self.spec.hidden_size])

    @property
    def head_bytes(self) -> int:
        """Bytes of the weight of the output head."""
        assert self._head is not None, "the model has no output head"
        return self._head.num_bytes

    def head_sums(self, hidden: Tensor) -> Tensor:
        """Return the logits before the multiplier and the softcap; of several ranks, rank 0 has them."""
        assert self._head is not None, "the model has no output head"
        self.shared.progress[0] += 1
        return self._head(hidden)


def _head(
    spec: DecoderSpec, shape: LinearShape, embedding: TokenTable, weights: WeightReader, ranks: Ranks | None
) -> Linear:
    """Read the head, of a rank its part of the vocabulary; return that of all ranks."""
    if embedding.head is not None:
        return embedding.head
    if ranks is None:
        return weights.head(shape, embedding, is_tied=spec.is_head_tied)
    cut = ranks.shard.cut(spec.vocab_size)
    own = weights.head(shape, embedding, is_tied=spec.is_head_tied, rows=cut.of(ranks.shard.rank))
    return ranks.joined_head(own, cut)


class ProjectedHead:
    """A head behind a projection to the width of embeddings."""

    def __init__(self, project: Linear, head: Linear) -> None:
        self._project, self._head, self.num_bytes = project, head, project.num_bytes + head.num_bytes

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states [num_rows, hidden_size]."""
        return self._head(self._project(hidden))


class ClassifierLayer:
    """Layer of a classifier before its last one."""

    def __init__(self, spec: DecoderSpec, shapes: DecoderShapes, weights: WeightReader) -> None:
        assert spec.classifier is not None
        assert shapes.classifier is not None
        self._is_tanh, self._linear = spec.classifier.activation == "tanh", weights.linear(shapes.classifier)
        self._norm = None if shapes.classifier_norm is None else make_norm(spec, weights, shapes.classifier_norm)

    def __call__(self, hidden: Tensor) -> Tensor:
        """Return the rows that the last layer reads. Each is activated by itself: its bits are its own."""
        rows = self._linear(hidden)
        if self._is_tanh:
            rows = tanh(rows)
        return rows if self._norm is None else self._norm(rows)[0]


class Embedding:
    """Token ids to hidden states: a row each, projected if it has another width, plus a learned position's row.

    A decoder without learned positions may multiply the rows instead. An encoder adds its token type's row, and
    normalizes the sum.
    """

    def __init__(self, spec: DecoderSpec, shapes: DecoderShapes, weights: WeightReader, tokens: Table) -> None:
        self.tokens = tokens
        self._project = None if shapes.project_in is None else weights.linear(shapes.project_in)
        self._positions = None if shapes.positions is None else weights.table(shapes.positions)[spec.position_offset:]
        self._types = None if shapes.token_types is None else weights.table(shapes.token_types)
        norm = shapes.embedding_norm
        self._norm = None if norm is None else make_norm(spec, weights, norm)
        self._embed = weights.back_end.embed
        self._multiplier = spec.embedding_multiplier
        if spec.is_embedding_multiplier_rounded:
            self._multiplier = float(weights.rounded(np.array([self._multiplier], np.float32))[0])

    def __call__(self, token_ids: Tensor, positions: Tensor, token_types: Tensor | None = None) -> Tensor:
        """Return [num_tokens, hidden_size] for token_ids, positions and types [num_tokens] int64; None: all 0."""
        x = self._sums(token_ids, positions)
        if self._types is not None:
            has_types = token_types is not None and len(self._types) > 1
            types = token_types if has_types else np.zeros(len(x), np.int64)
            x = added(x, take_rows(self._types, types))
        return x if self._norm is None else self._norm(x)[0]

    def _sums(self, token_ids: Tensor, positions: Tensor) -> Tensor:
        if self._project is None:
            x = self._embed(self.tokens, token_ids, self._positions, positions)
            return x if self._multiplier == 1 else scaled(x, self._multiplier)
        x = self._project(self._embed(self.tokens, token_ids))
        return x if self._positions is None else added(x, self._embed(self._positions, positions))
