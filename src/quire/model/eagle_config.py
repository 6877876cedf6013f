"""Configs of EAGLE-3 heads: folders of the head alone, in two forms, and the fit to a target.

The first form is a Llama's config with `draft_vocab_size`, of the architecture `LlamaForCausalLMEagle3` and the like.
The second is that of the library speculators: the keys of the layer are in `transformer_layer_config`.
"""

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path

from quire.core.errors import ConfigError, ModelError
from quire.core.model_files import read_json_object
from quire.model import llama
from quire.model.config_reader import CONFIG_FILE, MAX_LAYERS, ConfigReader
from quire.model.dummy_weights import DummySource
from quire.model.source import FolderSource, is_quantized
from quire.model.spec import DecoderSpec, Eagle, LayerSpec, SpecError

MAX_TAPS = 8
IDS = "eagle_aux_hidden_state_layer_ids"
# The architecture without `Eagle3` at its begin or end. Others than Llama and Qwen3 name the target's family: their
# heads are those of Llama.
FAMILIES: dict[str, Callable[[ConfigReader], DecoderSpec]] = {
    "LlamaForCausalLM": llama.llama,
    "MiniMaxM2ForCausalLM": llama.llama,
    "Qwen2_5vlForCausalLM": llama.llama,
    "Qwen3ForCausalLM": llama.qwen3,
    "Qwen3vlForCausalLM": llama.llama,
}
LAYER_TYPES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Keys beside those of the layer in speculators' form, with vLLM's defaults.
BESIDE_LAYER: dict[str, object] = {
    "draft_vocab_size": None, "target_hidden_size": None, "norm_before_residual": True, "norm_before_fc": False,
    "fc_norm": False, "norm_output": False, IDS: None,
}  # fmt: skip


def read_eagle(path: Path, load_format: str = "auto") -> FolderSource:
    """Read the config of the folder of an EAGLE-3 head, and of its weights the names, if they are there.

    Raises ModelError for a folder that is none, and names what is wrong.
    """
    if path.is_file():
        raise ModelError(f"{path}: EAGLE-3 heads are folders, and this is a GGUF file")
    config, place = read_json_object(path, CONFIG_FILE), str(path / CONFIG_FILE)
    if is_quantized(config):
        raise ModelError(f"{place}: weights are quantized, and only heads of floating-point weights are read")
    is_dummy, names = load_format == "dummy", list[str]()
    if not is_dummy and any(path.glob("*.safetensors")):
        from quire.model.checkpoints.safetensors import SafetensorsCheckpoint  # noqa: PLC0415 (as in `FolderSource`)

        names = list(SafetensorsCheckpoint(path).names)
    reader = ConfigReader(config, place)
    try:
        spec = eagle_spec(reader, names)
    except SpecError as error:
        raise reader.error(str(error)) from error
    return (DummySource if is_dummy else FolderSource)(path, config, place, spec)


def eagle_spec(config: ConfigReader, names: Collection[str] = ()) -> DecoderSpec:
    """Return the spec of a head. `names`: of its tensors; without any it is taken to have no embeddings of its own."""
    config = _flat(config)
    spec = _family(config)(config)
    nested = config.nested("eagle_config", config.section("eagle_config"))
    if not nested.flag("use_aux_hidden_state", True):
        raise config.error("eagle_config.use_aux_hidden_state false is not supported yet: heads read three streams")
    config.reject("logit_scale", 1, 1.0, why="logits of heads are not scaled")
    taps = _taps(config, nested)
    num_taps = config.size("num_aux_hidden_states", len(taps) or 3, limit=MAX_TAPS)
    if taps and num_taps != len(taps):
        raise config.error(f"num_aux_hidden_states is {num_taps}, but {IDS} names {len(taps)} layers")
    norm_before_fc = config.flag("norm_before_fc", False)
    eagle = Eagle(
        taps=taps,
        num_taps=num_taps,
        target_size=config.size("target_hidden_size", spec.hidden_size),
        num_drafted=config.size("draft_vocab_size", spec.vocab_size),
        has_table="embed_tokens.weight" in names,
        has_joined_norm=nested.flag("norm_before_fc", norm_before_fc),
        has_tap_norms=config.flag("fc_norm", False),
        is_residual_normed=config.flag("norm_before_residual", False),
        is_output_normed=config.flag("norm_output", False),
    )
    layer = "midlayer." if any(name.startswith("midlayer.") for name in names) else spec.weights.layer
    weights = replace(spec.weights, prefixes=("",), layer=layer, skipped=("t2d", "verifier_", "mask_hidden"))
    first, *others = spec.layers
    return replace(
        spec, layers=(_reading_embedding(first), *others), has_final_norm=False, is_head_tied=False, weights=weights,
        eagle=eagle,
    )  # fmt: skip


def fitted(head: DecoderSpec, target: DecoderSpec) -> DecoderSpec:
    """Return the spec of a head with its taps of a target. Raises ConfigError for one of another size."""
    eagle, num_layers = head.eagle, target.num_layers
    assert eagle is not None, "no EAGLE-3 head"
    if eagle.target_size != target.hidden_size:
        raise ConfigError(
            f"it reads hidden states of {eagle.target_size} columns (target_hidden_size, or hidden_size), those of the "
            f"model have {target.hidden_size}"
        )
    if head.vocab_size != target.vocab_size:
        raise ConfigError(f"its vocabulary has {head.vocab_size} tokens, that of the model {target.vocab_size}")
    if eagle.num_drafted > target.vocab_size:
        raise ConfigError(f"draft_vocab_size is {eagle.num_drafted}, more than the {target.vocab_size} of the model")
    if not eagle.has_table and head.hidden_size != target.embedding_size:
        raise ConfigError(
            f"it has no embeddings of its own, and those of the model have {target.embedding_size} columns, not its "
            f"{head.hidden_size}"
        )
    taps = eagle.taps or (2, num_layers // 2, num_layers - 3)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] <= num_layers or len(taps) != eagle.num_taps:
        told = "" if eagle.taps else f", which are those of a head of {eagle.num_taps} streams without {IDS}"
        raise ConfigError(
            f"it reads the streams in front of layers {', '.join(map(str, taps))}{told}, and the model has "
            f"{num_layers} layers"
        )
    return replace(head, eagle=replace(eagle, taps=taps))


def _flat(config: ConfigReader) -> ConfigReader:
    """Return the config with the keys of the layer, in either form."""
    if not config.has("transformer_layer_config"):
        return config
    kind, layer = config.raw("speculators_model_type"), config.section("transformer_layer_config")
    if kind != "eagle3":
        raise config.error(f"speculators_model_type {kind!r:.80} is not supported yet: of those, eagle3 is")
    architecture = config.nested("transformer_layer_config", layer).choice("model_type", LAYER_TYPES, "llama")
    own = {key: default if config.raw(key) is None else config.raw(key) for key, default in BESIDE_LAYER.items()}
    return config.nested("transformer_layer_config", {**layer, **own, "architectures": [architecture]})


def _family(config: ConfigReader) -> Callable[[ConfigReader], DecoderSpec]:
    named = config.raw("architectures")
    name = named[0] if isinstance(named, list) and named and isinstance(named[0], str) else None
    family = None if name is None else FAMILIES.get(name.removeprefix("Eagle3").removesuffix("Eagle3"))
    if family is None:
        raise config.error(
            f"architecture {name!r:.80} is no EAGLE-3 head that is read: those of {', '.join(FAMILIES)} are, as "
            "LlamaForCausalLMEagle3, Eagle3LlamaForCausalLM, or Eagle3Speculator"
        )
    return family


def _taps(config: ConfigReader, nested: ConfigReader) -> tuple[int, ...]:
    """Return the layers in front of which streams are read; () if the config has none.

    SGLang, for which the ids in `eagle_config` are, counts layers that give the stream, and vLLM those that read it.
    """
    offset, found = 0, config.raw(IDS) or nested.raw("layer_ids")
    if not found:
        offset, found = 1, nested.raw(IDS)
    if not found:
        return ()
    if not isinstance(found, list) or any(type(each) is not int or not 0 <= each <= MAX_LAYERS for each in found) or (
        len(found) > MAX_TAPS or found != sorted(set(found))
    ):
        raise config.error(
            f"{IDS} must be a list of at most {MAX_TAPS} layers from 0 to {MAX_LAYERS} in ascending order, got "
            f"{found!r:.80}"
        )
    return tuple(each + offset for each in found)


def _reading_embedding(layer: LayerSpec) -> LayerSpec:
    """Return the first layer of a head: what its attention reads is normalized by the head."""
    return replace(layer, has_attention_norm=False).with_attention(reads_embedding=True)
