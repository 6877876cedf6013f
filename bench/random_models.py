"""Models of any shape with random weights, without files: for speeds that depend on shapes alone.

    loaded = random_model(QWEN2_5_7B, options)
    draft = random_draft_model(QWEN2_5_0_5B, options, loaded)
    engine = build_engine(options, loaded, draft_model=draft).engine

Weights are those of `--load-format dummy`, and are quantized as the options say. Their values mean nothing: drafts of
such a draft model are never accepted, so measurements replace them by an oracle's after they have been computed.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from quire.engine.draft_model_loading import (
    LoadedDraftModel,
    load_draft_model,
    load_eagle_head,
    load_mtp_head,
)
from quire.engine.loading import LoadedModel, load
from quire.engine.options import EngineOptions

Config = Mapping[str, object]
_QWEN2_5: Config = {
    "architectures": ["Qwen2ForCausalLM"], "max_position_embeddings": 32768, "rope_theta": 1e6, "rms_norm_eps": 1e-6,
    "dtype": "bfloat16",
}  # fmt: skip
QWEN2_5_7B: Config = _QWEN2_5 | {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "vocab_size": 152064, "tie_word_embeddings": False,
}  # fmt: skip
QWEN2_5_0_5B: Config = _QWEN2_5 | {
    "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True,
}  # fmt: skip


_QWEN3_5: Config = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": 248_320, "head_dim": 256,
    "linear_num_key_heads": 16, "max_position_embeddings": 32_768, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
QWEN3_5_0_8B: Config = _QWEN3_5 | {
    "hidden_size": 1024, "intermediate_size": 3584, "num_hidden_layers": 24, "num_attention_heads": 8,
    "num_key_value_heads": 2, "linear_num_value_heads": 16,
}  # fmt: skip
QWEN3_5_4B: Config = _QWEN3_5 | {
    "hidden_size": 2560, "intermediate_size": 9216, "num_hidden_layers": 32, "num_attention_heads": 16,
    "num_key_value_heads": 4, "linear_num_value_heads": 32,
}  # fmt: skip


QWEN3_4B: Config = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151_936, "hidden_size": 2560, "intermediate_size": 9728,
    "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "rope_theta": 1e6,
    "max_position_embeddings": 40_960, "tie_word_embeddings": True, "dtype": "bfloat16",
}  # fmt: skip
EAGLE: Config = {  # keys of a head, beside the target's sizes
    "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": 32_000,
}  # fmt: skip


def random_model(config: Config, options: EngineOptions) -> LoadedModel:
    """Return the model of a config as the engine loads it, in bfloat16 unless the options say otherwise."""
    with _folder(config) as folder:
        return load(replace(options, load_format="dummy"), folder)


def random_draft_model(config: Config, options: EngineOptions, target: LoadedModel) -> LoadedDraftModel:
    """Return a draft model for a model, with the vocabulary of that."""
    assert options.speculation is not None, "the options ask for no draft model"
    with _folder({**config, "vocab_size": target.model.vocab_size}) as folder:
        speculation = replace(options.speculation, model=str(folder))
        return load_draft_model(replace(options, load_format="dummy"), speculation, target, folder)


def random_model_with_head(config: Config, options: EngineOptions) -> tuple[LoadedModel, LoadedDraftModel]:
    """Return the model of a config, as `random_model` does, and its MTP or EAGLE-3 head."""
    assert options.speculation is not None, "the options ask for no head"
    options = replace(options, load_format="dummy")
    with _folder(config) as folder, _folder({**config, **EAGLE}) as own:
        loaded = load(options, folder)
        if options.speculation.method == "mtp":
            return loaded, load_mtp_head(options, options.speculation, loaded, folder)
        return loaded, load_eagle_head(options, replace(options.speculation, model=str(own)), loaded)


@contextmanager
def _folder(config: Config) -> Iterator[Path]:
    with TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)
