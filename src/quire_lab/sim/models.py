"""Models by name, and the paper's set-ups (Kwon et al. 2023, table 1).

A model is its config.json: the families of `quire.model` make sizes of it.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from quire.core.errors import ConfigError, ModelError
from quire.engine.formats import read_source
from quire.engine.options import EngineOptions
from quire.model.config import resolved_dtype, spec_from_config
from quire.model.eagle_config import fitted, read_eagle
from quire.model.quantization import UNQUANTIZED, Quantization, QuantizationOptions, resolve
from quire.model.resolve import resolve_model
from quire.model.spec import DecoderSpec
from quire_lab.sim.hardware import HARDWARE, PAGED_ATTENTION_FACTOR, PAPER_SEQUENCE_S, PAPER_STEP_S, CostModel


def _opt(num_layers: int, num_heads: int) -> dict[str, object]:
    width = 128 * num_heads
    return {
        "architectures": ["OPTForCausalLM"], "vocab_size": 50272, "hidden_size": width, "ffn_dim": 4 * width,
        "num_hidden_layers": num_layers, "num_attention_heads": num_heads, "max_position_embeddings": 2048,
        "dtype": "float16",
    }  # fmt: skip


def _llama(
    num_layers: int, num_heads: int, num_kv_heads: int, inner: int, length: int, vocab: int
) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"], "vocab_size": vocab, "hidden_size": 128 * num_heads,
        "intermediate_size": inner, "num_hidden_layers": num_layers, "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads, "max_position_embeddings": length,
        "dtype": "float16",
    }  # fmt: skip


CONFIGS: dict[str, dict[str, object]] = {
    "OPT-13B": _opt(40, 40),
    "OPT-66B": _opt(64, 72),
    "OPT-175B": _opt(96, 96),
    "LLaMA-7B": _llama(32, 32, 32, 11008, 2048, 32000),
    "LLaMA-13B": _llama(40, 40, 40, 13824, 2048, 32000),
    "Llama-3.1-8B": _llama(32, 32, 8, 14336, 131072, 128256),
    "Llama-3.1-70B": _llama(80, 64, 8, 28672, 131072, 128256),
}


@dataclass(frozen=True, slots=True)
class SetUp:
    """A row of the paper's table 1. The KV slots are the paper's own, not derived; LLaMA-13B is not in the table."""

    model: str
    hardware: str
    num_devices: int
    num_kv_slots: int  # tokens
    trace_s: float     # length of the paper's traces

    def cost_model(self, block_size: int = 16, attention_factor: float = PAGED_ATTENTION_FACTOR) -> CostModel:
        """Return the time of its steps with the paper's software."""
        hardware = replace(HARDWARE[self.hardware], step_s=PAPER_STEP_S, sequence_s=PAPER_SEQUENCE_S)
        spec = read_model(self.model).spec
        return CostModel(spec, hardware, block_size, self.num_devices, "float16", attention_factor)


SET_UPS = {
    set_up.model: set_up
    for set_up in (
        SetUp("OPT-13B", "A100-40GB", 1, 15_700, 3600),
        SetUp("OPT-66B", "A100-40GB", 4, 9_700, 3600),
        SetUp("OPT-175B", "A100-80GB", 8, 60_100, 900),
        SetUp("LLaMA-13B", "A100-40GB", 1, 15_700, 3600),  # as large as OPT-13B: the same memory is left
    )
}


class FoundModel(NamedTuple):
    """A model as its config.json says it is."""

    name: str
    spec: DecoderSpec
    dtype: str
    folder: Path | None  # None: only known by name
    quantization: Quantization = UNQUANTIZED


def read_model(
    name: str | None, dtype: str = "auto", asked: QuantizationOptions | None = None, mmproj: str | None = None
) -> FoundModel:
    """Return a model of this module by its name, or one that `quire serve` takes: of a hub id its JSON files alone.

    mmproj: the file of an encoder of images beside a GGUF file.

    Raises ModelError for what is none of them, ConfigError for a quantization that contradicts the model's.
    """
    asked = asked or QuantizationOptions()
    if name in CONFIGS:
        config, found = CONFIGS[name], resolve(asked, name)
        return FoundModel(name, spec_from_config(config, name), resolved_dtype(dtype, config, name), None, found)
    source = read_source(resolve_model(name, files=("*.json",)), mmproj=mmproj)
    found = source.quantization(asked)
    return FoundModel(name or source.path.name, source.spec, source.dtype(dtype), source.path, found)


def read_draft_model(target: FoundModel, options: EngineOptions) -> FoundModel | None:
    """Return the draft model that the options ask for, or None, in the target's dtype and rounded as the target is.

    ConfigError for an MTP head that the target lacks, and for an EAGLE-3 head of another target.
    """
    config, asked = options.speculation, options.quantization_options
    if config is not None and config.method == "mtp":
        if target.spec.mtp is None:
            raise ConfigError(f"speculative_config: {target.name} has no MTP head that is read")
        return target._replace(spec=target.spec.mtp)
    if config is None or config.model is None:
        return None
    if config.method == "eagle3":
        try:
            source = read_eagle(resolve_model(config.model, files=("*.json",)))
            spec = fitted(source.spec, target.spec)
        except (ConfigError, ModelError) as error:
            raise type(error)(f"speculative_config: EAGLE-3 head {config.model!r}: {error}") from error
        found = source.quantization(asked if asked.rounds_draft_model(UNQUANTIZED) else QuantizationOptions())
        return FoundModel(config.model, spec, target.dtype, source.path, found)
    stored = read_model(config.model, target.dtype)
    return read_model(config.model, target.dtype, asked) if asked.rounds_draft_model(stored.quantization) else stored


def set_up(model: str) -> SetUp:
    """Return the paper's set-up for a model. Raises ConfigError with those that there are."""
    if model not in SET_UPS:
        raise ConfigError(f"the paper has no set-up for {model!r}, only for {', '.join(SET_UPS)}")
    return SET_UPS[model]
