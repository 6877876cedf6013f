"""Loading of models through transformers: which are served, and what is refused, by name, before weights are read.

The model is built and its weights are read by transformers, from safetensors files alone; code of a model folder is
never run. Then its parts are replaced by those of the back end (`parts`), and a trace of a few tokens tells what its
layers ask of attention. A trial at start compares rows alone and together.
"""

import logging
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from quire.core.errors import ConfigError, ModelError
from quire.core.model_files import read_json_object
from quire.engine.generation_config import eos_token_ids, sampling_defaults
from quire.engine.loading import LoadedModel
from quire.engine.options import EngineOptions
from quire.engine.sizing import ModelLimits
from quire.engine.transformers_model import hook
from quire.engine.transformers_model.hook import AttentionLayer, Trace
from quire.engine.transformers_model.model import TransformersModel
from quire.engine.transformers_model.parts import Replacer
from quire.execution.device import HostDevice
from quire.kernels.back_end import BackEnd, choose_back_end
from quire.model.config import dtype_name
from quire.model.config import eos_token_ids as own_eos_token_ids
from quire.model.config_reader import CONFIG_FILE
from quire.model.quantization import UNQUANTIZED, Quantization, resolve

log = logging.getLogger(__name__)

_POSITIONS = ("max_position_embeddings", "n_positions", "max_sequence_length", "n_ctx")
_MOVING_ROTARY = ("dynamic", "longrope")  # frequencies that change as a sequence grows, which cached keys cannot follow
_TRIAL = [1, 2, 5, 8, 17]                 # rows that the trial computes together, one after the other
_ROUNDING = 0.05                          # the largest difference of logits in a trial, of their spread
_FAILURES = (RuntimeError, TypeError, ValueError, AttributeError, IndexError)  # of a model that expects other inputs


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
    _check_class(kind, config, place)
    dtype = getattr(torch, dtype_name(options.dtype, raw, place))
    quantization = resolve(options.quantization_options, place)
    hook.install()
    causal = _read(kind, folder, dtype, place)
    text = config.get_text_config()
    layers = _trace(causal, place)
    head_dims = {layer.head_dim for layer in layers}
    back_end = choose_back_end(torch.device("cpu"), isa=options.cpu_isa, head_dim=max(head_dims, key=_awkwardness))
    num_parameters = causal.num_parameters()
    model = _replaced(causal, layers, back_end, dtype, quantization, num_parameters, place)
    _try_rows(model, place)
    limits = ModelLimits(
        _max_positions(text, place), model.kv_geometry.bytes_per_token, model.kv_geometry.sliding_window
    )
    ends = eos_token_ids(
        options, folder, model.vocab_size, lambda: own_eos_token_ids(folder, raw, model.vocab_size)
    )
    reason = "it runs through transformers"
    return LoadedModel(
        model, limits, ends, HostDevice(), quantization, sampling_defaults(options, folder), None, reason
    )


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
        "hf_overrides": bool(options.hf_overrides),
        "speculative_config with a draft model": (
            options.speculation is not None and options.speculation.method == "draft_model"
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
        raise ModelError(f"{place}: transformers cannot read it: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"{place}: quantized weights are not read through transformers; int8 and int4 round floats")
    if config.is_encoder_decoder:
        raise ModelError(f"{place}: {config.model_type} is an encoder and a decoder, which is not supported")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(f"{place}: transformers has no causal language model of type {config.model_type}")
    kind: type[PreTrainedModel] = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]  # type: ignore[assignment]
    return kind, config


def _check_class(kind: type[PreTrainedModel], config: PreTrainedConfig, place: str) -> None:
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
        raise ModelError(f"{place}: {kind.__name__} is not served through transformers: {reason}")


def _read(kind: type[PreTrainedModel], folder: Path, dtype: torch.dtype, place: str) -> PreTrainedModel:
    """Read the weights of safetensors files. ModelError for files that are broken, or tensors that are missing."""
    try:
        read: tuple[PreTrainedModel, dict[str, list[str]]] = kind.from_pretrained(  # type: ignore[assignment]
            str(folder), dtype=dtype, attn_implementation=hook.NAME, local_files_only=True, use_safetensors=True,
            trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    except (ValueError, OSError, RuntimeError, KeyError) as error:
        raise ModelError(f"{place}: transformers cannot load the model: {error}") from error
    causal, found = read
    if missing := sorted(found["missing_keys"]):
        raise ModelError(f"{place}: the checkpoint lacks {len(missing)} tensors: {', '.join(missing[:3])}")
    for name, parameter in causal.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ModelError(f"{place}: tensor {name} has values that are not finite in {dtype}")
    causal.train(mode=False)
    return causal


def _trace(causal: PreTrainedModel, place: str) -> list[AttentionLayer]:
    """Return what the layers of a model ask of attention. ModelError for what is not supported."""
    trace, ids = Trace(), torch.zeros(1, 3, dtype=torch.int64)
    try:
        with hook.active(trace), torch.inference_mode():
            causal(
                input_ids=ids, position_ids=torch.arange(3)[None], attention_mask=torch.ones_like(ids), use_cache=False
            )
    except (ModelError, *_FAILURES) as error:
        raise ModelError(f"{place}: {type(causal).__name__} is not served through transformers: {error}") from error
    num_layers = causal.config.get_text_config().num_hidden_layers
    if len(trace.layers) != num_layers:
        raise ModelError(
            f"{place}: {type(causal).__name__} is not served through transformers: {num_layers} layers call the "
            f"attention hook {len(trace.layers)} times"
        )
    return trace.layers


def _awkwardness(head_dim: int) -> tuple[bool, int]:
    return head_dim % 8 != 0, head_dim


def _replaced(
    causal: PreTrainedModel, layers: list[AttentionLayer], back_end: BackEnd, dtype: torch.dtype,
    quantization: Quantization, num_parameters: int, place: str,
) -> TransformersModel:  # fmt: skip
    """Return the model with the parts of the back end."""
    replacer = Replacer(back_end, quantization)
    replacer.replace_all(causal, causal.get_output_embeddings())  # type: ignore[no-untyped-call]
    kept = sum(parameter.nbytes for parameter in causal.parameters())
    if quantization != UNQUANTIZED:
        log.info("quantization %s", quantization)
    return TransformersModel(causal, layers, back_end, dtype, num_parameters, replacer.num_bytes + kept)


def _try_rows(model: TransformersModel, place: str) -> None:
    """Compare rows alone and together, with attention that looks at no other row; log what that tells of exactness.

    Raises ModelError where they differ by more than rounding: a layer then mixes rows outside of attention, or takes
    positions from elsewhere than the batch, which a paged cache cannot follow.
    """
    num_tokens = sum(_TRIAL)
    ids, positions = torch.arange(num_tokens) * 7 % model.vocab_size, torch.arange(num_tokens)
    together = model.logits(model.run(ids, positions, Trace(), None))
    parts = [
        model.logits(model.run(some, at, Trace(), model.no_mask))
        for some, at in zip(torch.split(ids, _TRIAL), torch.split(positions, _TRIAL), strict=True)
    ]
    alone = torch.cat(parts)
    difference, spread = (alone - together).abs().max().item(), together.std().item()
    if not difference <= _ROUNDING * spread:
        raise ModelError(
            f"{place}: it is not served through transformers: its layers mix tokens outside of attention, or count "
            f"positions themselves (in a trial, logits of rows alone and together differ by {difference:.2g})"
        )
    if difference == 0:
        log.info("%s: runs through transformers; in a trial, rows had the same bits alone and together", place)
    else:
        log.warning(
            "%s: runs through transformers, with operations whose bits depend on the batch: outputs of a request may "
            "differ from those of the same request alone", place,
        )  # fmt: skip


def _max_positions(text: object, place: str) -> int:
    for key in _POSITIONS:
        value = getattr(text, key, None)
        if isinstance(value, int) and value > 0:
            return value
    raise ModelError(f"{place}: none of {', '.join(_POSITIONS)} says how long a sequence may be")
