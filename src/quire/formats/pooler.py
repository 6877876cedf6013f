"""Pooling of a model by its folder: sentence-transformers' modules, and overrides of config.json. Loads no torch.

A folder with modules.json or 1_Pooling is an embedder, or with 1_LogitScore a reranker.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from msgspec import structs

from quire.core.checks import shown
from quire.core.errors import ConfigError, ModelError
from quire.core.model_files import read_json, read_json_object
from quire.core.options import parse_json_object
from quire.core.pooling import FoundPooler, PoolerConfig, PoolingKind, Runner
from quire.model.config_reader import CONFIG_FILE, ConfigReader
from quire.model.spec import DecoderSpec

MODULES_FILE, POOLING_FOLDER = "modules.json", "1_Pooling"
TEXT_FILES = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "xlm-roberta"))
OVERRIDES = (
    "architectures", "is_matryoshka", "matryoshka_dimensions", "classifier_from_token", "is_original_qwen3_reranker"
)  # fmt: skip
_RERANKERS = ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification")  # the template of pairs is that of Qwen3-Reranker
_MAX_MODULES = 16
_ACTIVATIONS = {  # activation of a classifier: is its score a probability
    "torch.nn.modules.activation.Sigmoid": True, "torch.nn.Sigmoid": True,
    "torch.nn.modules.linear.Identity": False, "torch.nn.Identity": False,
}  # fmt: skip
_KINDS: dict[str, PoolingKind] = {
    "lasttoken": "last", "last_token": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls",
}  # fmt: skip


def find_pooler(runner: Runner, path: Path, spec: DecoderSpec, overrides: str = "") -> FoundPooler:
    """Return the pooling of the model in a folder or file. `overrides`: JSON, as in `parse_overrides`.

    ModelError or ConfigError names what is not supported; ModelError also for a model that is not pooled here.
    """
    parsed = parse_overrides(overrides)
    if runner == "generate":
        return FoundPooler(None, "it runs with --runner generate")
    if runner == "auto" and spec.generates and not (parsed or _has_modules(path)):
        return FoundPooler(None, f"its folder has no {POOLING_FOLDER}/config.json; --runner pooling makes it pool")
    pooler, texts = _pooler(path, spec, parsed), _text_config(path)
    length = min(texts.size("max_seq_length"), spec.default_positions) if texts.has("max_seq_length") else None
    return FoundPooler(structs.replace(pooler, lowers_case=texts.flag("do_lower_case", False)), max_seq_length=length)


def _text_config(path: Path) -> ConfigReader:
    """Return sentence-transformers' file about texts, of a folder's module `Transformer`; empty if there is none."""
    folder = dict(_modules(path)).get("Transformer", "")
    file = next((name for name in TEXT_FILES if (path / folder / name).exists()), None)
    return ConfigReader({} if file is None else read_json_object(path, file, folder), str(path / folder / (file or "")))


def parse_overrides(text: str) -> dict[str, Any]:
    """Return the keys of config.json that a JSON object overrides. ConfigError for one that is not supported."""
    overrides = parse_json_object(text, "hf_overrides")
    for key in overrides:
        if key not in OVERRIDES:
            raise ConfigError(f"hf_overrides can have {', '.join(OVERRIDES)}, got {shown(key)}")
    return overrides


def _has_modules(path: Path) -> bool:
    if not path.is_dir():
        return False
    return (path / POOLING_FOLDER / CONFIG_FILE).exists() or any(
        kind in ("Pooling", "LogitScore") for kind, _ in _modules(path)
    )


def _pooler(path: Path, spec: DecoderSpec, overrides: Mapping[str, Any]) -> PoolerConfig:
    config: dict[str, Any] = read_json_object(path, CONFIG_FILE) if path.is_dir() else {}
    reader = ConfigReader({**config, **overrides}, str(path / CONFIG_FILE))
    if spec.is_causal and (not reader.flag("is_causal", True) or reader.flag("use_bidirectional_attention", False)):
        raise reader.error("attention is bidirectional, which is not supported yet")
    if spec.embedding_size != spec.hidden_size:
        raise reader.error("hidden states of another width than embeddings cannot be pooled yet")
    folders = dict(_modules(path)) if path.is_dir() else {}
    for kind in folders.keys() - {"Transformer", "Pooling", "Normalize", "LogitScore"}:
        raise ModelError(f"{path / MODULES_FILE}: modules of type {shown(kind)} are not supported yet")
    if spec.classifier is not None and spec.has_head:
        return _classifier(reader, spec)
    if (ids := _score_token_ids(path, reader, folders)) is not None:
        return PoolerConfig("last", spec.hidden_size, score_token_ids=ids)
    if (texts := _score_tokens(reader)) is not None:
        return PoolerConfig("last", spec.hidden_size, score_tokens=texts)
    has_config = "Pooling" in folders or (path / POOLING_FOLDER / CONFIG_FILE).exists()
    pooling: PoolingKind = "last" if spec.is_causal else "cls"  # as in vLLM
    if has_config:
        pooling = _pooling_kind(path, folders.get("Pooling", POOLING_FOLDER), spec)
    dimensions = _matryoshka_dimensions(reader, spec)
    return PoolerConfig(
        pooling,
        spec.hidden_size,
        normalizes="Normalize" in folders if folders else True,
        is_matryoshka=bool(dimensions) or reader.flag("is_matryoshka", False),
        matryoshka_dimensions=dimensions,
    )


def _classifier(reader: ConfigReader, spec: DecoderSpec) -> PoolerConfig:
    """Return the scores of a classifier of pairs, with the activation that sentence-transformers gives its logit."""
    assert spec.classifier is not None
    if spec.classifier.num_labels != 1:
        raise reader.error(
            f"classifiers are served of one label, which is the score of a pair, got {spec.classifier.num_labels}"
        )
    section = reader.nested("sentence_transformers", reader.section("sentence_transformers"))
    key, default = "sbert_ce_default_activation_function", "torch.nn.modules.activation.Sigmoid"
    old = reader.choice(key, _ACTIVATIONS, default=default)
    is_probability = section.choice("activation_fn", _ACTIVATIONS) if section.has("activation_fn") else old
    pooling = spec.classifier.pooling
    return PoolerConfig(pooling, spec.hidden_size, has_classifier=True, is_probability=is_probability)


def _modules(path: Path) -> list[tuple[str, str]]:
    """Return the modules of modules.json: the last part of the type, and the folder; empty without the file."""
    if not (path / MODULES_FILE).exists():
        return []
    found = read_json(path, MODULES_FILE)
    if not isinstance(found, list) or len(found) > _MAX_MODULES or not all(isinstance(each, dict) for each in found):
        raise ModelError(f"{path / MODULES_FILE}: expected a list of at most {_MAX_MODULES} objects")
    modules = [(each.get("type"), each.get("path", "")) for each in found]
    if not all(isinstance(kind, str) and isinstance(folder, str) for kind, folder in modules):
        raise ModelError(f"{path / MODULES_FILE}: type and path of each module must be texts")
    return [(kind.rpartition(".")[2], folder) for kind, folder in modules]


def _pooling_kind(path: Path, folder: str, spec: DecoderSpec) -> PoolingKind:
    """Return the pooling of 1_Pooling/config.json, which has one mode, as a text or as the only flag that is true."""
    values = read_json_object(path, CONFIG_FILE, folder)
    place = f"{path / folder / CONFIG_FILE}"
    named = values.get("pooling_mode")
    prefix = "pooling_mode_"
    modes = [named] if named is not None else [
        key.removeprefix(prefix) for key, value in values.items() if key.startswith(prefix) and value is True
    ]  # fmt: skip
    if len(modes) != 1 or modes[0] not in _KINDS:
        raise ModelError(f"{place}: pooling_mode must be one of lasttoken, mean or cls, got {shown(modes)}: "
                         f"{', '.join(map(str, modes))[:80]}")
    for key in ("word_embedding_dimension", "embedding_dimension"):
        if values.get(key, spec.hidden_size) != spec.hidden_size:
            raise ModelError(f"{place}: {key} must be {spec.hidden_size}, got {shown(values[key])}")
    return _KINDS[modes[0]]


def _matryoshka_dimensions(reader: ConfigReader, spec: DecoderSpec) -> tuple[int, ...]:
    value = reader.raw("matryoshka_dimensions")
    if value is None:
        return ()
    is_list = isinstance(value, list) and all(type(each) is int and 1 <= each <= spec.hidden_size for each in value)
    if not is_list:
        raise reader.error(f"matryoshka_dimensions must be a list of 1 to {spec.hidden_size}, got {shown(value)}")
    return tuple(value)  # type: ignore[arg-type]


def _score_token_ids(path: Path, reader: ConfigReader, folders: Mapping[str, str]) -> tuple[int, int] | None:
    """Return the tokens for no and yes of sentence-transformers' LogitScore."""
    if "LogitScore" not in folders:
        return None
    _check_is_reranker(reader)
    values = read_json_object(path, CONFIG_FILE, folders["LogitScore"])
    scores = ConfigReader(values, str(path / folders["LogitScore"] / CONFIG_FILE))
    limit = reader.size("vocab_size") - 1
    no, yes = (scores.size(key, least=0, limit=limit) for key in ("false_token_id", "true_token_id"))
    return no, yes


def _score_tokens(reader: ConfigReader) -> tuple[str, str] | None:
    """Return the tokens for no and yes as texts, by vLLM's key."""
    tokens = reader.names("classifier_from_token")
    if not tokens:
        if reader.flag("is_original_qwen3_reranker", False):
            raise reader.error("is_original_qwen3_reranker needs classifier_from_token, the tokens for no and yes")
        return None
    _check_is_reranker(reader)
    if len(tokens) != 2:
        raise reader.error(f"classifier_from_token must be the tokens for no and yes, got {len(tokens)} of them")
    return tokens[0], tokens[1]


def _check_is_reranker(reader: ConfigReader) -> None:
    named = reader.names("architectures")
    if not named or named[0] not in _RERANKERS:
        raise reader.error(f"rerankers are supported of the architecture Qwen3ForCausalLM alone, got {shown(named)}")
