"""Settings of speculative decoding: JSON, the flags for its keys, bounds and errors."""

import json
from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.core.speculation import SpeculationConfig, parse_speculation


def parsed(**keys: Any) -> SpeculationConfig | None:  # noqa: ANN401
    return parse_speculation(json.dumps(keys))


def test_nothing_given_is_no_speculation() -> None:
    assert parse_speculation("") is None
    assert parse_speculation("{}") is None
    assert parsed(method=None) is None


def test_keys_and_flags_make_a_configuration() -> None:
    assert parsed(method="ngram") == SpeculationConfig("ngram")
    assert parsed(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=4) == (
        SpeculationConfig("ngram", 3, None, 1, 4)
    )
    assert parsed(method="ngram", prompt_lookup_max=1) == SpeculationConfig("ngram", 4, None, 1, 1)
    assert parsed(method="ngram", prompt_lookup_min=9) == SpeculationConfig("ngram", 4, None, 9, 9)
    assert parsed(model="folder") == SpeculationConfig("draft_model", model="folder")
    for keys in ({"method": "eagle3"}, {}):
        assert parsed(model="AngelSlim/Qwen3-8B_Eagle3", **keys).method == "eagle3"  # type: ignore[union-attr]
    for method in ("mtp", "deepseek_mtp", "qwen3_5_mtp", "qwen3_next_mtp", "glm4_moe_mtp", "glm4_moe_lite_mtp"):
        assert parsed(method=method, num_speculative_tokens=2) == SpeculationConfig("mtp", 2)
    assert parse_speculation("", "suffix", None, 7) == SpeculationConfig("suffix", 7)
    assert parse_speculation('{"method": "suffix"}', "suffix") == SpeculationConfig("suffix")


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        ({"num_speculative_tokens": 3}, "needs a method: ngram, suffix, draft_model, mtp, eagle3"),
        ({"method": "eagle3"}, "with the method eagle3 needs a model: folder or hub id of a head .*, got None"),
        ({"method": "eagle"}, "eagle3, got 'eagle': heads of EAGLE 1 and 2 are not read, those of EAGLE-3 are: eagle3"),
        ({"method": "medusa"}, "got 'medusa': Medusa heads are not read"),
        ({"method": "dflash"}, "got 'dflash': DFlash heads, which draft whole blocks"),
        ({"method": "gemma4_mtp"}, "got 'gemma4_mtp': Gemma 4's assistants, which read keys and values of their"),
        ({"method": "mtp", "model": "folder"}, "but the method mtp has no model: an MTP head is in the folder of"),
        ({"method": "mtp", "num_speculative_tokens": 17}, "from 1 to 16, got 17"),
        ({"method": "mtp", "prompt_lookup_min": 2}, "prompt_lookup_min, but the method mtp has none"),
        ({"method": ["ngram"]}, "the method must be one of"),
        ({"method": "ngram", "disable_by_batch_size": 4}, "can have method, .*, got 'disable_by_batch_size'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, "num_speculative_tokens must be .* from 1 to 16, got 0"),
        ({"method": "ngram", "num_speculative_tokens": 17}, "from 1 to 16, got 17"),
        ({"method": "ngram", "num_speculative_tokens": True}, "from 1 to 16, got True"),
        ({"method": "ngram", "num_speculative_tokens": 2.0}, r"from 1 to 16, got 2\.0"),
        ({"method": "ngram", "prompt_lookup_max": 65}, "prompt_lookup_max must be an integer from 1 to 64, got 65"),
        ({"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}, "lookup_min .* from 1 to 4, got 5"),
        ({"method": "ngram", "prompt_lookup_min": "2"}, "prompt_lookup_min must be an integer from 1 to 64, got '2'"),
        ({"method": "ngram", "prompt_lookup_min": 65}, "must be an integer from 1 to 64, got 65"),
        ({"method": "suffix", "prompt_lookup_min": 2}, "prompt_lookup_min, but the method suffix has none"),
        ({"method": "suffix", "model": "folder"}, "the model 'folder', but the method suffix has no model"),
        ({"method": "draft_model"}, "needs a model: .*, got None"),
        ({"method": "draft_model", "model": 5}, "needs a model: .*, got 5"),
        ({"method": "x" * 1000}, "got 'x{79}" + r"\.\.\.$"),
    ],
)  # fmt: skip
def test_unknown_keys_and_invalid_values_are_refused(keys: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=f"^speculative_config.*{told}"):
        parsed(**keys)


@pytest.mark.parametrize("text", ["ngram", "[1]", "3", "{", "[" * 100_000])
def test_text_that_is_no_object_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="speculative_config must be a JSON object, got"):
        parse_speculation(text)


@pytest.mark.parametrize("model", ["ngram", "[ngram]"])
def test_model_of_vllm_s_may_be_the_method_ngram(model: str) -> None:
    config = parse_speculation(json.dumps({"model": model, "num_speculative_tokens": 5, "prompt_lookup_max": 5}))
    assert config == SpeculationConfig("ngram", 5)


def test_flag_and_json_that_disagree_are_refused() -> None:
    with pytest.raises(ConfigError, match="spec_tokens is 3, but speculative_config has num_speculative_tokens 4"):
        parse_speculation('{"method": "ngram", "num_speculative_tokens": 4}', None, None, 3)
