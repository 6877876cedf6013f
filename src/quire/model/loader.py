"""Loading: a folder, a GGUF file or any checkpoint becomes a `Decoder` that is ready to run."""

import logging
from pathlib import Path

import torch

from quire.kernels.back_end import BackEnd
from quire.model.checkpoints.checkpoint import Checkpoint
from quire.model.checkpoints.gguf import GGUFCheckpoint
from quire.model.checkpoints.safetensors import SafetensorsCheckpoint
from quire.model.decoder import Decoder
from quire.model.gguf_config import permuted_tensors
from quire.model.quantization import ONLINE_METHODS, UNQUANTIZED, Quantization, QuantizationOptions
from quire.model.source import ModelSource, read_source
from quire.model.spec import DecoderSpec
from quire.model.weight_formats.format import WeightFormat
from quire.model.weight_formats.gguf import GGUFFormat
from quire.model.weight_formats.quantized import QuantizedFormat
from quire.model.weight_formats.rounded import RoundedFormat
from quire.model.weights import WeightReader

log = logging.getLogger(__name__)


def load_model(
    model: Path | ModelSource,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    back_end: BackEnd,
    max_positions: int | None = None,
    table_positions: int | None = None,
    kv_cache_dtype: str = "auto",
    quantization: QuantizationOptions | None = None,
) -> Decoder:
    """Load a model, given by its folder, its GGUF file or its source, onto `device`.

    dtype: auto (as the config says), float32, bfloat16 or float16. `max_positions`: the longest sequence to be served,
    at most the model's own; dynamic scaling depends on it, which is off by default. `table_positions`: the length of
    rotary tables, where fewer positions than that can be used. `kv_cache_dtype`: a value of --kv-cache-dtype.
    `quantization`: None is as the checkpoint says. Raises ModelError for a folder that cannot be loaded, ConfigError
    for an unknown dtype, or a quantization that contradicts the folder's.
    """
    source = model if isinstance(model, ModelSource) else read_source(model)
    found = source.quantization(quantization or QuantizationOptions())
    if found != UNQUANTIZED:
        log.info("quantization %s", found)
    checkpoint = open_checkpoint(source)
    return build_decoder(
        source.spec,
        checkpoint,
        dtype=getattr(torch, source.dtype(dtype)),
        device=torch.device(device),
        back_end=back_end,
        max_positions=max_positions,
        table_positions=table_positions,
        kv_cache_dtype=kv_cache_dtype,
        weight_format=_weight_format(found, checkpoint, source.spec),
    )


def open_checkpoint(source: ModelSource) -> Checkpoint:
    """Return the tensors of a model; no weight is read yet. ModelError for files that are broken."""
    if source.gguf is None:
        return SafetensorsCheckpoint(source.path)
    return GGUFCheckpoint(source.gguf, permuted_tensors(source.spec, source.gguf))


def build_decoder(
    spec: DecoderSpec,
    checkpoint: Checkpoint,
    *,
    dtype: torch.dtype,
    device: torch.device,
    back_end: BackEnd,
    max_positions: int | None = None,
    table_positions: int | None = None,
    weight_format: WeightFormat | None = None,
    kv_cache_dtype: str = "auto",
) -> Decoder:
    """Return the decoder of a spec with the weights of a checkpoint; positions as of `load_model`.

    `weight_format`: that of the linear layers; None: dense.

    Raises ModelError for a tensor that is missing, of another shape, of integers, or not finite in `dtype`.
    """
    weights = WeightReader(checkpoint, spec.weights, back_end, dtype, device, weight_format)
    longest = min(max_positions or spec.default_positions, spec.max_position_embeddings)
    num_positions = min(table_positions or longest, longest)
    decoder = Decoder(spec, weights, longest, num_positions, kv_cache_dtype=kv_cache_dtype)
    weights.warn_of_unread()
    return decoder


def _weight_format(quantization: Quantization, checkpoint: Checkpoint, spec: DecoderSpec) -> WeightFormat | None:
    """Return the format of the linear layers of a checkpoint; None: dense."""
    if quantization == UNQUANTIZED:
        return None
    if quantization.stored is not None:
        return QuantizedFormat(quantization.stored, quantization.activations)
    if quantization.method in ONLINE_METHODS:
        return RoundedFormat(quantization)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return GGUFFormat(checkpoint, spec.weights.embedding, quantization.activations)
