"""Defaults of sampling, and ends of answers, from generation_config.json and its override."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ConfigError, ModelError
from quire.engine.formats import read_source
from quire.engine.messages import SamplingDefaults
from quire.engine.options import EngineOptions
from quire.engine.requests.generation_config import eos_token_ids, sampling_defaults
from support.random_folder import write_random_folder

FILE = {"temperature": 0.6, "top_k": 20, "top_p": 1, "do_sample": True, "max_new_tokens": 64, "min_p": None}
CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 48, "hidden_size": 16, "intermediate_size": 16,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6, "eos_token_id": 3,
}  # fmt: skip


def write(folder: Path, content: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def defaults(model: Path, source: str = "auto", **override: Any) -> SamplingDefaults:  # noqa: ANN401 (JSON)
    options = EngineOptions(str(model), generation_config=source, override_generation_config=json.dumps(override))
    return sampling_defaults(options, model)


def test_parameters_of_the_file_are_defaults_and_other_keys_are_not(tmp_path: Path) -> None:
    model = write(tmp_path / "model", FILE)
    assert defaults(model) == SamplingDefaults({"temperature": 0.6, "top_k": 20, "top_p": 1.0, "max_tokens": 64})
    assert defaults(tmp_path) == SamplingDefaults()
    assert defaults(tmp_path / "model.gguf") == SamplingDefaults()


def test_override_wins_and_its_max_new_tokens_bounds_all_requests(tmp_path: Path) -> None:
    model = write(tmp_path / "model", FILE)
    found = defaults(model, temperature=0, max_new_tokens=9, repetition_penalty=1.1, skip_special_tokens=False)
    assert found.max_output_tokens == 9
    assert found.params == {
        "temperature": 0.0, "top_k": 20, "top_p": 1.0, "max_tokens": 9, "repetition_penalty": 1.1,
        "skip_special_tokens": False,
    }  # fmt: skip


def test_another_source_takes_the_place_of_the_models_file(tmp_path: Path) -> None:
    model, other = write(tmp_path / "model", FILE), write(tmp_path / "other", {"top_p": 0.5, "max_new_tokens": 7})
    assert defaults(model, "vllm") == SamplingDefaults()
    assert defaults(model, "vllm", top_k=3) == SamplingDefaults({"top_k": 3})
    assert defaults(model, str(other)) == SamplingDefaults({"top_p": 0.5, "max_tokens": 7}, 7)
    with pytest.raises(ModelError, match=r"generation_config '.*': .* has no generation_config.json"):
        defaults(model, str(tmp_path))


@pytest.mark.parametrize(
    ("key", "value", "told"),
    [
        ("temperature", -1, r"temperature must be a number from 0 to 100, got -1"),
        ("top_p", "0.9", r"top_p must be a number above 0 to 1, got '0.9'"),
        ("top_k", 2.5, r"top_k must be an integer .*, got 2.5"),
        ("repetition_penalty", 0, "repetition_penalty must be"),
        ("max_new_tokens", 0, "max_new_tokens must be an integer from 1 to .*, got 0"),
        ("max_new_tokens", True, "max_new_tokens must be .*, got True"),
    ],
)
def test_bad_value_is_refused_with_its_place_and_key(tmp_path: Path, key: str, value: object, told: str) -> None:
    model = write(tmp_path / "model", {key: value})
    with pytest.raises(ModelError, match=rf"model/generation_config.json: {told}"):
        defaults(model)
    with pytest.raises(ConfigError, match=f"override_generation_config: {told}"):
        defaults(tmp_path, **{key: value})


@pytest.mark.parametrize("text", ["[]", "{", '"x"', "1", "[" * 100_000])
def test_override_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="override_generation_config must be a JSON object"):
        EngineOptions(override_generation_config=text)


def test_ends_of_answers_are_of_the_first_place_that_names_them(tmp_path: Path) -> None:
    model, other = write_random_folder(tmp_path / "model", CONFIG), write(tmp_path / "other", {"eos_token_id": [5, 6]})
    source = read_source(model)

    def ends(generation_config: str = "auto", override: str = "") -> set[int]:
        options = EngineOptions(generation_config=generation_config, override_generation_config=override)
        return set(eos_token_ids(options, model, source.spec.vocab_size, source.eos_token_ids))

    assert ends() == ends("vllm") == {3}
    assert ends(str(other)) == {5, 6}
    assert ends(str(other), '{"eos_token_id": 7}') == {7}
    write(other, {})
    assert ends(str(other)) == {3}
    write(model, {"eos_token_id": [1, 2]})
    assert ends() == ends("vllm") == {1, 2}
    with pytest.raises(ModelError, match="override_generation_config: eos_token_id must be a token id from 0 to 47"):
        ends(override='{"eos_token_id": 48}')
