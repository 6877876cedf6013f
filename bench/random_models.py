"""Models of any shape with random weights, without files: for speeds that depend on shapes alone.

    loaded = random_model(QWEN2_5_7B, options)
    draft = random_draft_model(QWEN2_5_0_5B, options, loaded)
    engine = build_engine(options, loaded, draft_model=draft).engine

Weights are rows of one table of random numbers, so that 7 billion of them take little time, and are quantized as the
options say. Their values mean nothing: drafts of such a draft model are never accepted, so measurements replace them by
an oracle's after they have been computed.
"""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from quire.core.draft_scratch import ScratchBlocks
from quire.engine.draft_model.loading import LoadedDraftModel
from quire.engine.loading import LoadedModel
from quire.engine.options import EngineOptions
from quire.engine.sizing import ModelLimits
from quire.execution.device import HostDevice
from quire.kernels.back_end import choose_back_end
from quire.model.config import spec_from_config
from quire.model.decoder import Decoder
from quire.model.loader import build_decoder
from quire.model.quantization import resolve
from quire.model.shapes import DecoderShapes, LinearShape, NormShape, Shape, layer_shapes
from quire.model.spec import DecoderSpec
from quire.model.weight_formats.rounded import tensors_of_floats

Config = Mapping[str, object]
_QWEN2_5: Config = {
    "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
}  # fmt: skip
QWEN2_5_7B: Config = _QWEN2_5 | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_5_0_5B: Config = _QWEN2_5 | {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


class RandomCheckpoint:
    """A `Checkpoint` of the tensors of a spec; they are made while they are read."""

    def __init__(self, spec: DecoderSpec, seed: int = 0) -> None:
        self._shapes = dict(_shapes(spec))
        self._numbers = torch.randn(1 << 22, generator=torch.Generator().manual_seed(seed))

    @property
    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def location(self, name: str | None = None) -> str:
        return "random weights" if name is None else f"random weights of {name}"

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def dtype(self, name: str) -> str:
        return "F32"

    def read(self, name: str, start: int, stop: int) -> Tensor:
        shape = (stop - start, *self._shapes[name][1:])
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith("norm.weight") else torch.zeros(shape)
        first = hash((name, start)) % (1 << 16)
        num_rows = (len(self._numbers) - first) // shape[1]
        rows = self._numbers[first : first + num_rows * shape[1]].view(num_rows, shape[1])
        return rows[torch.arange(shape[0]) % num_rows] * shape[1] ** -0.5


def random_model(config: Config, options: EngineOptions) -> LoadedModel:
    """Return a model as `quire.engine.loading.load` does, in bfloat16 unless the options say otherwise."""
    model, spec = _decoder(config, options)
    longest = options.max_model_len or spec.default_positions
    limits = ModelLimits(longest, model.kv_geometry.bytes_per_token, spec.sliding_window)
    return LoadedModel(model, limits, frozenset(), HostDevice())


def random_draft_model(config: Config, options: EngineOptions, target: LoadedModel) -> LoadedDraftModel:
    """Return a draft model for a model, of a vocabulary of any size."""
    assert options.speculation is not None, "the options ask for no draft model"
    model, spec = _decoder(config, options)
    scratch = ScratchBlocks.of(
        options.speculation.num_speculative_tokens, options.resolved_max_num_seqs, options.block_size
    )
    return LoadedDraftModel(
        model, min(target.limits.max_position_embeddings, spec.max_position_embeddings), scratch
    )


def _decoder(config: Config, options: EngineOptions) -> tuple[Decoder, DecoderSpec]:
    spec, device = spec_from_config(config), torch.device("cpu")
    back_end = choose_back_end(device, isa=options.cpu_isa, head_dim=spec.head_dim)
    quantization = resolve(options.quantization_options, "random weights")
    stored = tensors_of_floats(RandomCheckpoint(spec), quantization)
    longest = options.max_model_len or spec.default_positions
    dtype = torch.bfloat16 if options.dtype == "auto" else getattr(torch, options.dtype)
    model = build_decoder(
        spec, stored.checkpoint, dtype=dtype, device=device, back_end=back_end, max_positions=longest,
        table_positions=longest, weight_format=stored.weight_format, kv_cache_dtype=options.kv_cache_dtype,
    )  # fmt: skip
    return model, spec


def _shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the names and shapes of the tensors of a model."""
    *around, head = DecoderShapes.of(spec)
    if not spec.is_head_tied:
        yield from _tensors(head, "")
    for shape in around:
        yield from _tensors(shape, spec.weights.prefixes[0])
    for index, layer in enumerate(spec.layers):
        for shape in layer_shapes(spec, layer):
            yield from _tensors(shape, spec.weights.prefixes[0] + spec.weights.layer.format(layer=index))


def _tensors(shape: Shape | None, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    if isinstance(shape, NormShape):
        yield f"{prefix}{shape.module}.weight", (shape.width,)
    elif isinstance(shape, LinearShape):
        num_rows = shape.num_rows if len(shape.modules) > 1 else (sum(shape.num_rows),)
        for module, rows in zip(shape.modules, num_rows, strict=True):
            yield f"{prefix}{module}.weight", (rows, shape.width)
            if shape.has_bias:
                yield f"{prefix}{module}.bias", (rows,)
    elif shape is not None:
        yield f"{prefix}{shape.module}.weight", (shape.num_rows, shape.width)
