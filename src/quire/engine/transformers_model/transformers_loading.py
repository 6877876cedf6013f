"""Models of transformers: which are served, what is refused before weights are read, and the loaded `LanguageModel`.

The model is built and its weights are read by transformers, from safetensors files alone; code of a model folder is
never run. Then its parts are replaced by those of the back end (`parts`), and a trace of a few tokens tells what its
layers ask of attention. A trial at start compares rows alone and together, and the positions that the model counts by
itself with those that it is given.

The flat batch is one row of tokens with their positions. The head is the causal model itself around a body that
returns the hidden states it is given, so what the model does to its logits is done here too.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.core.arrays import dtype_name
from quire.core.errors import ConfigError, ModelError
from quire.core.model_files import read_json_object
from quire.core.speculation import METHODS_WITH_MODELS
from quire.engine.loading import LoadedModel
from quire.engine.options import EngineOptions
from quire.engine.options.device_options import CpuIsa
from quire.engine.requests.generation_config import eos_token_ids, sampling_defaults
from quire.engine.sizing import ModelLimits
from quire.engine.transformers_model import attention_hook as hook
from quire.engine.transformers_model.attention_hook import (
    AttentionHook,
    AttentionLayer,
    PagedStep,
    Replacer,
    Trace,
    active,
    marker,
    of_back_end,
    tensor_of,
)
from quire.execution.device import HostDevice
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.paged_attention import build_metadata
from quire.model.config import eos_token_ids as own_eos_token_ids
from quire.model.config import resolved_dtype
from quire.model.config_reader import CONFIG_FILE
from quire.model.kv_cache import KVCache, KVGeometry, LayerKV
from quire.model.language_model import ForwardBatch
from quire.model.quantization import UNQUANTIZED, Quantization, resolve


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
        """Return what `logits` does, for and in tensors of PyTorch."""
        self._given.hidden = hidden[None]
        with torch.inference_mode():
            logits: Tensor = self._causal(input_ids=torch.zeros(1, len(hidden), dtype=torch.int64), use_cache=False)[0]
        self._given.hidden = None
        return logits[0].float()


log = logging.getLogger(__name__)

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
_MOVING_ROTARY = ("dynamic", "longrope")  # frequencies that change as a sequence grows, which cached keys cannot follow
_TRIAL = [1, 2, 5, 8, 17]                 # rows that the trial computes together, one after the other
_ROUNDING = 0.05                          # the largest difference of logits in a trial, of their spread
_MAX_REASON_CHARACTERS = 400              # characters kept of an error of the model's own code


def knows(folder: Path) -> bool:
    """Return whether a folder's config names a causal language model of transformers."""
    named = read_json_object(folder, CONFIG_FILE).get("architectures")
    known = {name for each in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() for name in _names(each)}
    return isinstance(named, list) and len(named) > 0 and isinstance(named[0], str) and named[0] in known


def _names(classes: str | tuple[str, ...]) -> tuple[str, ...]:
    return (classes,) if isinstance(classes, str) else tuple(classes)


def load_through_transformers(options: EngineOptions, folder: Path) -> LoadedModel:
    """Load the model of a folder. ModelError and ConfigError name what is not supported."""
    check_options(options)
    place = str(folder / CONFIG_FILE)
    raw = read_json_object(folder, CONFIG_FILE)
    kind, config = _class_of(folder, place)
    dtype = getattr(torch, resolved_dtype(options.dtype, raw, place))
    quantization = resolve(options.quantization_options, place)
    with _refused_by_name(kind, place):
        _check_class(kind, config)
        max_positions = _max_positions(config.get_text_config())
        model = _build(kind, folder, dtype, options.cpu_isa, quantization)
        try_rows(model, place)
    geometry = model.kv_geometry
    limits = ModelLimits(max_positions, geometry.bytes_per_token(options.block_size), geometry.sliding_window)
    ends = eos_token_ids(
        options, folder, model.vocab_size, lambda: own_eos_token_ids(folder, raw, model.vocab_size)
    )
    reason = "it runs through transformers"
    return LoadedModel(
        model, limits, ends, HostDevice(), quantization, sampling_defaults(options, folder), None, reason
    )


@contextmanager
def _refused_by_name(kind: type[PreTrainedModel], place: str) -> Iterator[None]:
    """Turn any error of a model's own code into a ModelError of one line that names the config file and the class.

    Code of several hundred architectures runs here: no list of exceptions would be complete.
    """
    try:
        yield
    except Exception as error:
        of_code = f"its code does not run here: {type(error).__name__}: {error}"
        reason = str(error) if isinstance(error, ModelError) else of_code
        raise ModelError(f"{place}: {kind.__name__} is not served through transformers: {_one_line(reason)}") from error


def _one_line(reason: str) -> str:
    text = " ".join(reason.split())
    return text if len(text) <= _MAX_REASON_CHARACTERS else f"{text[: _MAX_REASON_CHARACTERS - 3]}..."


def check_options(options: EngineOptions) -> None:
    """Raise ConfigError for an option that a model through transformers does not have."""
    refused = {
        "device": options.device == "cuda",
        "enable_lora": options.enable_lora,
        "exact": options.exact is False,
        "attention_backend": options.attention_backend != "auto",
        "capture_graphs": options.capture_graphs,
        "kv_cache_dtype": options.kv_cache_dtype != "auto",
        "runner": options.runner == "pooling",
        "load_format": options.load_format == "dummy",
        "packed_weights": options.packed_weights is not None,
        "mmproj": options.mmproj is not None,
        "hf_overrides": bool(options.hf_overrides),
        "speculative_config with a draft model or a head": (
            options.speculation is not None and options.speculation.method in METHODS_WITH_MODELS
        ),
    }
    for name, is_set in refused.items():
        if is_set:
            value = getattr(options, name, "")
            raise ConfigError(f"{name} {value!r}: not supported for a model through transformers (model_impl)")


def _class_of(folder: Path, place: str) -> tuple[type[PreTrainedModel], PreTrainedConfig]:
    """Return the causal model's class of transformers, and the config. Code of the folder is not run."""
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # whatever its checks of a config raise
        reason = _one_line(f"{type(error).__name__}: {error}")
        raise ModelError(f"{place}: transformers cannot read it: {reason}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{place}: quantized weights are not read through transformers; int8 and int4 round floats")
    if config.is_encoder_decoder:
        raise ModelError(f"{place}: {config.model_type} is an encoder and a decoder, which is not supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{place}: transformers has no causal language model of type {config.model_type}")
    kind: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # type: ignore[assignment]
    return kind, config


def _check_class(kind: type[PreTrainedModel], config: PreTrainedConfig) -> None:
    """Raise ModelError for a model that the paged cache cannot serve."""
    text = config.get_text_config()
    experts = [
        key for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
        if (getattr(text, key, None) or 0) > 1
    ]  # fmt: skip
    reason = None
    if kind._is_stateful:
        reason = "it has recurrent state"
    elif experts:
        reason = f"{experts[0]} {getattr(text, experts[0])}: experts are not computed through transformers"
    elif not kind._can_set_attn_implementation():
        reason = "it has no attention hook"
    elif getattr(text, "num_kv_shared_layers", 0):
        reason = f"num_kv_shared_layers {text.num_kv_shared_layers}: layers share keys and values"
    elif not getattr(text, "is_causal", True):
        reason = "attention is bidirectional"
    rotary = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    by_layer = [each for each in rotary.values() if isinstance(each, dict)] or [rotary]
    for each in by_layer:
        if each.get("rope_type", "default") in _MOVING_ROTARY:
            reason = f"rope_type {each['rope_type']}: frequencies change as a sequence grows"
    if reason is not None:
        raise ModelError(reason)


def _build(
    kind: type[PreTrainedModel], folder: Path, dtype: torch.dtype, cpu_isa: CpuIsa, quantization: Quantization
) -> TransformersModel:
    """Read a model, and replace its parts by those of the back end."""
    causal = _read(kind, folder, dtype)
    layers = _trace(causal)
    head_dims = {layer.head_dim for layer in layers}
    back_end = choose_back_end(torch.device("cpu"), isa=cpu_isa, head_dim=max(head_dims, key=_awkwardness))
    num_parameters = causal.num_parameters()
    replacer = Replacer(back_end, quantization)
    replacer.replace_all(causal, causal.get_output_embeddings())  # type: ignore[no-untyped-call]
    kept = sum(parameter.nbytes for parameter in causal.parameters())
    if quantization != UNQUANTIZED:
        log.info("quantization %s", quantization)
    return TransformersModel(causal, layers, back_end, dtype, num_parameters, replacer.num_bytes + kept)


def _read(kind: type[PreTrainedModel], folder: Path, dtype: torch.dtype) -> PreTrainedModel:
    """Read the weights of safetensors files. ModelError if tensors are missing, or values not finite."""
    hook.install()
    read: tuple[PreTrainedModel, dict[str, list[str]]] = kind.from_pretrained(  # type: ignore[assignment]
        str(folder), dtype=dtype, attn_implementation=hook.NAME, local_files_only=True, use_safetensors=True,
        trust_remote_code=False, output_loading_info=True,
    )  # fmt: skip
    causal, found = read
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:3])}")
    for name, parameter in causal.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"tensor {name} has values that are not finite in {dtype}")
    causal.train(mode=False)
    return causal


def _trace(causal: PreTrainedModel) -> list[AttentionLayer]:
    """Return what the layers of a model ask of attention. ModelError for what is not supported."""
    trace, ids = Trace(), torch.zeros(1, 3, dtype=torch.int64)
    with hook.active(trace), torch.inference_mode():
        causal(input_ids=ids, position_ids=torch.arange(3)[None], attention_mask=torch.ones_like(ids), use_cache=False)
    num_layers = causal.config.get_text_config().num_hidden_layers
    if len(trace.layers) != num_layers:
        raise ModelError(f"{num_layers} layers call the attention hook {len(trace.layers)} times")
    return trace.layers


def _awkwardness(head_dim: int) -> tuple[bool, int]:
    return head_dim % 8 != 0, head_dim


def try_rows(model: TransformersModel, place: str) -> None:
    """Run a trial with attention that looks at no other row; log what it tells of exactness.

    Rows are compared alone and together: where they differ by more than rounding, a layer mixes rows outside of
    attention, or takes positions from elsewhere than the batch. The positions that the model counts by itself are
    compared with those of the batch, by the bits of the logits: RoBERTa's begin at padding_idx + 1, and leave out
    padding tokens. A paged cache can follow none of these. Raises ModelError.
    """
    num_tokens = sum(_TRIAL)
    ids, positions = torch.arange(num_tokens) * 7 % model.vocab_size, torch.arange(num_tokens)
    padding = _padding_ids(model)
    ids[3 : 3 + len(padding)] = torch.tensor(padding, dtype=torch.int64)
    together = model.tensor_logits(model.run(ids, positions, Trace(), None))
    if not bool(torch.isfinite(together).all()):
        raise ModelError("its logits are not finite in a trial")
    parts = [
        model.tensor_logits(model.run(some, at, Trace(), model.no_mask))
        for some, at in zip(torch.split(ids, _TRIAL), torch.split(positions, _TRIAL), strict=True)
    ]
    alone = torch.cat(parts)
    difference, spread = (alone - together).abs().max().item(), together.std().item()
    if not difference <= _ROUNDING * spread:
        raise ModelError(
            "its layers mix tokens outside of attention, or count positions themselves (in a trial, logits of rows "
            f"alone and together differ by {difference:.2g})"
        )
    if not torch.equal(model.tensor_logits(model.run(ids, None, Trace(), None)), together):
        raise ModelError(
            "the positions that it counts itself do not begin at 0, or depend on token ids, as RoBERTa's do "
            "(in a trial, its logits without given positions are others than with 0, 1, 2, ...)"
        )
    if difference == 0:
        log.info("%s: runs through transformers; in a trial, rows had the same bits alone and together", place)
    else:
        log.warning(
            "%s: runs through transformers, with operations whose bits depend on the batch: outputs of a request may "
            "differ from those of the same request alone", place,
        )  # fmt: skip


def _padding_ids(model: TransformersModel) -> list[int]:
    """Return the token ids that a model may leave out when it counts positions, at most as many as a trial holds."""
    embeddings = (each for each in model.body.modules() if isinstance(each, nn.Embedding))
    found = {model.pad_token_id, *(each.padding_idx for each in embeddings)}
    return sorted(each for each in found if isinstance(each, int) and 0 <= each < model.vocab_size)[: _TRIAL[-1]]


def _max_positions(text: object) -> int:
    for key in _POSITIONS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"none of {', '.join(_POSITIONS)} says how long a sequence may be")
