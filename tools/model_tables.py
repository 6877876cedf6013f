"""Tables of the model families in docs/models.md, made from the families and their tests.

    python tools/model_tables.py    # writes them into the page

A table is between `<!-- models: NAME -->` and `<!-- end of models -->`. Each family is run on a small config, and
the keys that it reads and refuses are recorded.
"""

import ast
import json
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from inspect import getdoc
from pathlib import Path
from typing import Any, ClassVar
from unittest.mock import patch

from page_tables import Page, table
from quire.core.errors import ConfigError
from quire.engine.loading import check_encoder, check_ranks
from quire.engine.options import EngineOptions
from quire.engine.transformers_model.transformers_loading import check_options
from quire.formats.gguf.gguf_config import ARCHITECTURES
from quire.kernels.back_end import SUPPORT, require
from quire.model.architectures import ENCODER_HEADS, ENCODERS, FAMILIES
from quire.model.config_reader import ConfigReader
from quire.model.spec import DecoderSpec, Experts, LatentAttention

TESTS = Path(__file__).parents[1] / "tests/model"
TEXT_CONFIG = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "vocab_size": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 32, "hidden_size": 64, "ffn_dim": 16,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 16, "max_position_embeddings": 32,
    "num_key_value_heads": 2, "rotary_dim": 16, "dim": 64, "n_heads": 4, "n_layers": 2, "hidden_dim": 16,
    "full_attention_interval": 2,
}  # fmt: skip
CONFIG: dict[str, object] = {  # config.json of a model with vision
    **TEXT_CONFIG, "text_config": TEXT_CONFIG, "image_token_index": 63, "mm_tokens_per_image": 49,
    "vision_config": {"hidden_size": 64, "num_attention_heads": 4, "model_type": "clip_vision_model"},
}
SECTIONS = {"rope_parameters": {"mrope_section": [3, 3, 2]}}
MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 16}
OWN_CONFIGS: dict[str, dict[str, object]] = {  # what the config of one architecture has in its place
    "LlavaOnevisionForConditionalGeneration": {"vision_config": {}},
    "KimiLinearForCausalLM": {
        "layer_types": ["linear_attention", "full_attention"], "num_experts": 8, "num_experts_per_token": 2,
    },
    "OlmoHybridForCausalLM": {"linear_key_head_dim": 16},
    "Qwen2VLForConditionalGeneration": {"text_config": TEXT_CONFIG | SECTIONS, "vision_config": {"num_heads": 16}},
    "Qwen2_5_VLForConditionalGeneration": {"text_config": TEXT_CONFIG | SECTIONS},
    "BambaForCausalLM": {"attn_layer_indices": [1], **MAMBA},
    "FalconH1ForCausalLM": {"mamba_d_ssm": 128, **MAMBA},
    "NemotronHForCausalLM": {"layers_block_type": ["mamba", "moe", "attention", "mlp"], "num_hidden_layers": 4},
    "GraniteMoeHybridForCausalLM": {"layer_types": ["mamba", "attention"], **MAMBA},
    "Qwen3VLForConditionalGeneration": {"vision_config": {"deepstack_visual_indexes": [8, 16]}},
    "Qwen3VLMoeForConditionalGeneration": {
        "text_config": TEXT_CONFIG | SECTIONS, "vision_config": {"deepstack_visual_indexes": [8, 16]},
    },
}
Family = Callable[[ConfigReader], DecoderSpec]
READ = {  # options among the sizes
    "full_attention_interval", "num_experts_per_tok", "n_shared_experts", "moe_intermediate_size"
}
SIZES = {*CONFIG, "head_dim", "n_inner", "architectures", "original_max_position_embeddings"} - READ


def config_of(architecture: str) -> ConfigReader:
    """Return the config that the family of an architecture is run on."""
    return ConfigReader(CONFIG | OWN_CONFIGS.get(architecture, {}), "config.json")


class Recorded:
    """Keys of a config that a family has read, and those that it refuses, with the reason."""

    def __init__(self) -> None:
        self.read: dict[str, None] = {}
        self.refused: dict[str, str] = {}


@contextmanager
def recording() -> Iterator[Recorded]:
    """Record what all readers are asked for."""
    found, values = Recorded(), ConfigReader._get
    has, raw = ConfigReader.has, ConfigReader.raw

    def note(method: Any) -> Any:  # noqa: ANN401 (a method of a reader)
        def noted(self: ConfigReader, key: str, *more: object) -> object:
            if not key.isdigit() and key != "keys":
                found.read[key] = None
            return method(self, key, *more)

        return noted

    def reject(self: ConfigReader, key: str, *harmless: object, why: str) -> None:
        found.refused[key] = why

    changed = {"_get": note(values), "has": note(has), "raw": note(raw), "reject": reject}
    with patch.multiple(ConfigReader, **changed):
        yield found


class Cases:
    """Names of the cases in the tests of a file, by architecture, or by the name of a kind of encoder."""

    NAMES: ClassVar[Mapping[str, str]] = {
        "GPT2": "GPT2LMHeadModel",
        "Gemma3Text": "Gemma3ForCausalLM",
        "Gemma3": "Gemma3ForConditionalGeneration",
        "Gemma4Text": "Gemma4ForCausalLM",
        "Gemma4": "Gemma4ForConditionalGeneration",
        "Llava": "LlavaForConditionalGeneration",
        "LlavaOnevision": "LlavaOnevisionForConditionalGeneration",
        "Mistral3": "Mistral3ForConditionalGeneration",
        "Qwen2VL": "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VL": "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VL": "Qwen3VLForConditionalGeneration",
        "Qwen3VLMoe": "Qwen3VLMoeForConditionalGeneration",
        "Qwen3_5Text": "Qwen3_5ForCausalLM",
        "Qwen3_5": "Qwen3_5ForConditionalGeneration",
        "Qwen3_5MoeText": "Qwen3_5MoeForCausalLM",
        "Qwen3_5Moe": "Qwen3_5MoeForConditionalGeneration",
    }

    def __init__(self, file: str = "test_families.py", end: str = "ForCausalLM") -> None:
        text = (TESTS / file).read_text(encoding="utf-8")
        found = (node for node in ast.parse(text).body if isinstance(node, ast.AnnAssign))
        cases = next(node.value for node in found if isinstance(node.target, ast.Name) and node.target.id == "CASES")
        assert isinstance(cases, ast.Dict)
        self.by_architecture: dict[str, list[str]] = {}
        for key, value in zip(cases.keys, cases.values, strict=True):
            assert isinstance(key, ast.Constant)
            assert isinstance(value, ast.Tuple)
            family = value.elts[0]
            assert isinstance(family, ast.Constant)
            name = self.NAMES.get(str(family.value), f"{family.value}{end}")
            self.by_architecture.setdefault(name, []).append(str(key.value))


def code(names: Collection[str]) -> str:
    """Return names as code in a cell."""
    return ", ".join(f"`{name}`" for name in names)


def families() -> str:
    """Return the table of the families."""
    return _table("architecture", Cases().by_architecture, {name: (name,) for name in FAMILIES}, FAMILIES)


def encoders() -> str:
    """Return the table of the encoders."""
    names = {name: tuple(name + end for end in ENCODER_HEADS) for name in ENCODERS}
    return _table("architectures", Cases("test_encoders.py", "").by_architecture, names, ENCODERS)


def _table(
    head: str, cases: Mapping[str, Collection[str]], names: Mapping[str, Collection[str]], known: Mapping[str, Family]
) -> str:
    rows = []
    for key, family in known.items():
        with recording() as found:
            family(config_of(key))
        options = [key for key in found.read if key not in SIZES and key not in found.refused]
        refused = "; ".join(f"`{key}`: {why}" for key, why in found.refused.items())
        what = re.split(r"(?<!et al)\. ", getdoc(family) or "")[0].removeprefix("Return the spec of ").rstrip(".")
        tested = [name.partition(", ")[2] or "plain" for name in cases[key]]
        rows.append((code(names[key]), what, code(sorted(options)), refused, "; ".join(tested)))
    return table((head, "models", "options that are read", "options that are refused", "cases tested"), *rows)


# The architecture of GGUF files of a family, where it is not the name of the family in lower case.
GGUF_NAMES = {
    "DeepseekV2ForCausalLM": "deepseek2", "DeepseekV3ForCausalLM": "deepseek2", "Glm4MoeLiteForCausalLM": "deepseek2",
    "Ernie4_5_MoeForCausalLM": "ernie4_5-moe", "MiniMaxM2ForCausalLM": "minimax-m2",
    "LlamaForCausalLM": "llama", "MistralForCausalLM": "llama", "MixtralForCausalLM": "llama",
    "Gemma3ForConditionalGeneration": "gemma3", "Gemma4ForConditionalGeneration": "gemma4", "GPT2LMHeadModel": "gpt2",
    "LlavaForConditionalGeneration": "llama",
    "CohereForCausalLM": "command-r", "GptOssForCausalLM": "gpt-oss", "Olmo3ForCausalLM": "olmo2",
    "Ministral3ForCausalLM": "mistral3", "Mistral3ForConditionalGeneration": "mistral3",
    "BambaForCausalLM": "granitehybrid", "GraniteMoeHybridForCausalLM": "granitehybrid",
    "FalconH1ForCausalLM": "falcon-h1", "KimiLinearForCausalLM": "kimi-linear", "NemotronHForCausalLM": "nemotron_h",
    "Qwen2VLForConditionalGeneration": "qwen2vl", "Qwen2_5_VLForConditionalGeneration": "qwen2vl",
    "Qwen3VLForConditionalGeneration": "qwen3vl", "Qwen3VLMoeForConditionalGeneration": "qwen3vlmoe",
    "Qwen3_5ForCausalLM": "qwen35", "Qwen3_5ForConditionalGeneration": "qwen35",
    "Qwen3_5MoeForCausalLM": "qwen35moe", "Qwen3_5MoeForConditionalGeneration": "qwen35moe",
}  # fmt: skip
COMBINATIONS: dict[str, dict[str, Any]] = {
    "`--quantization int8`, `int4`": {"quantization": "int8"},
    "`-tp`, on CPUs": {"tensor_parallel_size": 2},
    "`-dp`, on CPUs": {"data_parallel_size": 2},
    "`--enable-lora`": {"enable_lora": True},
    "speculation by n-grams": {"speculative_config": json.dumps({"method": "ngram"})},
    "speculation by a draft model": {"speculative_config": json.dumps({"model": "x"})},
    "8-bit KV cache": {"kv_cache_dtype": "fp8"},
    "`--runner pooling`": {"runner": "pooling"},
    "`--device cuda`": {"device": "cuda"},
}


def gguf_name(architecture: str) -> str | None:
    """Return the `general.architecture` of a family's GGUF files, None if they are not read."""
    name = GGUF_NAMES.get(architecture, architecture.removesuffix("ForCausalLM").lower())
    return name if name in ARCHITECTURES else None


def _check_family(options: EngineOptions, architecture: str) -> None:
    spec = FAMILIES[architecture](config_of(architecture))
    if options.tensor_parallel_size > 1:
        check_ranks(options, "cpp", spec)
    if options.device == "cuda":
        require("cuda", ["Experts"] if any(isinstance(layer.feed_forward, Experts) for layer in spec.layers) else [])
        require("cuda", ["latent attention"] if has_latents(architecture) else [])
        require("cuda", ["DeltaNet"] if has_states(architecture) else [])
        require("cuda", ["HeadNorm"] if has_value_norms(architecture) else [])


def has_latents(architecture: str) -> bool:
    """Return whether a family has attention over latents."""
    spec = FAMILIES[architecture](config_of(architecture))
    return any(isinstance(attention, LatentAttention) for attention in spec.attentions)


def has_states(architecture: str) -> bool:
    """Return whether a family keeps states of sequences."""
    return FAMILIES[architecture](config_of(architecture)).has_states


def has_value_norms(architecture: str) -> bool:
    """Return whether a family normalizes values: Gemma 4."""
    return any(attention.has_value_norm for attention in FAMILIES[architecture](config_of(architecture)).attentions)


def _check_encoder_on_device(options: EngineOptions) -> None:
    check_encoder(options)
    if options.device == "cuda":
        require("cuda", ["attention in both directions"])


def is_refused(kind: str, settings: Mapping[str, Any]) -> bool:
    """Return whether the code refuses settings of a kind of models: an architecture, `encoders`, `transformers`."""
    try:
        if kind == "transformers":
            check_options(EngineOptions(model_impl="transformers", **settings))
        elif kind == "encoders":
            _check_encoder_on_device(EngineOptions(**settings))
        else:
            _check_family(EngineOptions(**settings), kind)
    except ConfigError:
        return True
    return False


def combinations() -> str:
    """Return the table of options by kinds of models; tests hold every family to the column of its kind."""
    kinds = {
        "families": "LlamaForCausalLM", "with latent attention": "DeepseekV3ForCausalLM",
        "with gated delta nets": "Qwen3_5ForCausalLM", "with Mamba-2": "GraniteMoeHybridForCausalLM",
        "Gemma 4": "Gemma4ForCausalLM", "encoders": "encoders", "through transformers": "transformers",
    }  # fmt: skip
    rows = [
        (name, *("refused" if is_refused(kind, settings) else "yes" for kind in kinds.values()))
        for name, settings in COMBINATIONS.items()
    ]
    return table(("option", *kinds), *rows)


def gguf() -> str:
    """Return the table of families by the architecture of their GGUF files."""
    rows = ((f"`{name}`", f"`{found}`" if (found := gguf_name(name)) else "refused") for name in FAMILIES)
    return table(("architecture", "`general.architecture` of GGUF files"), *rows)


def parts() -> str:
    """Return the table of ops and features by device."""
    rows = ((name, "yes", "yes" if "cuda" in ends else "refused") for name, ends in SUPPORT.items())
    return table(("op or feature", "CPU", "CUDA"), *rows)


TABLES = {
    "families": families, "encoders": encoders, "parts": parts, "combinations": combinations, "gguf": gguf,
}  # fmt: skip


PAGE = Page("models.md", "models", TABLES)

if __name__ == "__main__":
    PAGE.write()
