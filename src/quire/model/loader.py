"""Loading: a folder, any other model source or any checkpoint becomes a `Decoder` that is ready to run."""

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.kernels.back_end import BackEnd
from quire.model.checkpoints.tensor_reader import Checkpoint
from quire.model.decoder import Decoder
from quire.model.merging_vision import MergingTower
from quire.model.quantization import UNQUANTIZED, Quantization, QuantizationOptions
from quire.model.sharding import Ranks, check_shardable
from quire.model.source import ModelSource, read_folder
from quire.model.spec import DecoderSpec, WeightMap
from quire.model.tiled_vision import TiledTower
from quire.model.vision import VisionTower
from quire.model.weight_format import WeightFormat
from quire.model.weights import WeightReader

if TYPE_CHECKING:
    from quire.model.checkpoints.packed_file import PackedRecords
    from quire.model.packed_weights import PackedPlace

log = logging.getLogger(__name__)


def load_model(
    model: Path | ModelSource,
    *,
    dtype: str = "auto",
    device: object = "cpu",
    back_end: BackEnd,
    max_positions: int | None = None,
    table_positions: int | None = None,
    kv_cache_dtype: str = "auto",
    quantization: Quantization | None = None,
    needs_head: bool = True,
    ranks: Ranks | None = None,
    packed: "PackedPlace | None" = None,
    max_truncated: int = 1,
) -> Decoder:
    """Load a model, given by its source, or by its folder if its weights are floats, onto `device`.

    dtype: auto (as the config says), float32, bfloat16 or float16. `max_positions`: the longest sequence to be served,
    at most the model's own; dynamic scaling depends on it, which is off by default. `table_positions`: the length of
    rotary tables, where fewer positions than that can be used. `kv_cache_dtype`: a value of --kv-cache-dtype.
    `quantization`: what the source answered to the options; None is as the checkpoint says. Without `needs_head` a
    model may lack its output head. `ranks`: of tensor parallelism; only this rank's part is read. `packed`: packed
    weights of the C++ back end, which are taken from there, or put there; None: neither. `max_truncated`: the most
    computed tokens of a sequence that are taken back before its next step. Raises ModelError for a model
    that cannot be loaded, ConfigError for an unknown dtype.
    """
    source = read_folder(model) if isinstance(model, Path) else model
    found = source.quantization(QuantizationOptions()) if quantization is None else quantization
    if found != UNQUANTIZED:
        log.info("quantization %s", found)
    stored, spec = source.open_tensors(found), source.spec
    if not (needs_head or spec.is_head_tied or f"{spec.weights.head}.weight" in stored.checkpoint.names):
        spec = replace(spec, has_head=False)
    build = partial(
        build_decoder,
        spec,
        stored.checkpoint,
        dtype=source.dtype(dtype),
        device=device,
        back_end=back_end,
        max_positions=max_positions,
        table_positions=table_positions,
        kv_cache_dtype=kv_cache_dtype,
        weight_format=stored.weight_format,
        ranks=ranks,
        max_truncated=max_truncated,
    )
    if packed is None:
        return build()
    from quire.model.packed_weights import decoder_of_packed, settings_of  # noqa: PLC0415 (of the C++ back end alone)

    settings = settings_of(source.dtype(dtype), found, has_head=spec.has_head)
    return decoder_of_packed(packed, source.path, settings, lambda records: build(records=records))


def build_decoder(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    *,
    dtype: str,
    device: object,
    back_end: BackEnd,
    max_positions: int | None = None,
    table_positions: int | None = None,
    weight_format: WeightFormat | None = None,
    kv_cache_dtype: str = "auto",
    ranks: Ranks | None = None,
    records: "PackedRecords | None" = None,
    max_truncated: int = 1,
) -> Decoder:
    """Return the decoder of a spec with the weights of a checkpoint; positions as in `load_model`.

    `weight_format`: that of the linear layers; None: dense. `ranks` and `max_truncated` as in `load_model`;
    ConfigError if the model cannot be split like that. `records`: packed weights that are taken, or being made.

    Raises ModelError for a tensor that is missing, of another shape, of integers, or not finite in `dtype`.
    """
    if ranks is not None:
        check_shardable(spec, ranks.shard.num_ranks, ranks.shard.mode)
    weights = _reader(checkpoint, spec.weights, back_end, dtype, device, weight_format, records)
    longest = min(max_positions or spec.default_positions, spec.max_position_embeddings)
    num_positions = min(table_positions or longest, longest)
    decoder = Decoder(spec, weights, longest, num_positions, ranks, kv_cache_dtype, max_truncated)
    if spec.vision is not None and str(device) == "cpu":  # each rank encodes images by itself
        is_tiled, is_merged = spec.vision.tiles is not None, spec.vision.merging is not None
        tower = TiledTower if is_tiled else MergingTower if is_merged else VisionTower
        decoder.vision = tower(spec.vision, weights, decoder.progress)
    weights.warn_of_unread()
    return decoder


def _reader(
    checkpoint: Checkpoint, names: WeightMap, back_end: BackEnd, dtype: str, device: object,
    weight_format: WeightFormat | None, records: "PackedRecords | None",
) -> WeightReader:  # fmt: skip
    if records is None:
        return WeightReader(checkpoint, names, back_end, dtype, device, weight_format)
    from quire.model.packed_weights import PackedReader  # noqa: PLC0415 (of the C++ back end alone)

    return PackedReader(checkpoint, names, back_end, dtype, device, weight_format, records=records)
