"""Engines with random weights: any settings, the same bits in several processes, and no file of weights."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.extension.isas import usable_isas
from support.random_folder import MIXTURE
from support.server import running_server
from support.zero_model import config_of

needs_kernels = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
PROMPTS = [[5, 9, 11, 200, 31] * 5, [7] * 9]
PARAMS = SamplingParams(temperature=0.9, seed=4, max_tokens=12, logprobs=2, ignore_eos=True)
LLAMA = config_of("Llama")
WIDE = LLAMA | {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16, "num_attention_heads": 4}


def write_config(folder: Path, config: dict[str, object]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def answers(folder: Path, **settings: Any) -> list[object]:  # noqa: ANN401
    with LLM(folder, load_format="dummy", num_kv_blocks=64, **settings) as llm:
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [(output.outputs[0].token_ids, output.outputs[0].logprobs) for output in outputs]


@pytest.mark.parametrize(
    "settings",
    [{}, {"dtype": "float16"}, {"dtype": "bfloat16", "quantization": "int8"}, {"quantization": "int4"}],
    ids=str,
)
@pytest.mark.parametrize("config", [WIDE, MIXTURE], ids=["dense", "experts"])
def test_answers_are_finite_and_the_same_every_time(
    tmp_path: Path, config: dict[str, object], settings: dict[str, Any]
) -> None:
    folder = write_config(tmp_path, config)
    found = answers(folder, **settings)
    assert found == answers(folder, **settings)
    (first, _), (second, _) = found
    assert len(set(first)) > 2, "a model that writes the same token all the time"
    assert first != second


@needs_kernels
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize("settings", [{}, {"dtype": "bfloat16", "quantization": "int8"}], ids=str)
@pytest.mark.parametrize("config", [LLAMA | {"attention_bias": True}, MIXTURE], ids=["dense", "experts"])
def test_ranks_have_the_bits_of_one_process(
    tmp_path: Path, config: dict[str, object], settings: dict[str, Any]
) -> None:
    folder = write_config(tmp_path, config)
    assert answers(folder, tensor_parallel_size=2, **settings) == answers(folder, **settings)


def test_weights_in_the_folder_are_not_used(demo_model: Path, caplog: pytest.LogCaptureFixture) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    texts = []
    for load_format in ("auto", "dummy"):
        with caplog.at_level(logging.WARNING), LLM(demo_model, load_format=load_format) as llm:
            texts.append(llm.generate("def f(", greedy, use_tqdm=False)[0].outputs[0].text)
        warned = [line for line in caplog.messages if "answers mean nothing" in line]
        assert len(warned) == (load_format == "dummy")
    assert texts[0] != texts[1]


@needs_kernels
def test_draft_model_has_random_weights_too(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "target", WIDE)
    draft = write_config(tmp_path / "draft", WIDE | {"num_hidden_layers": 1})
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 2}
    assert answers(folder, speculative_config=speculation) == answers(folder)


def test_hub_ids_need_no_file_of_weights() -> None:
    assert "*.safetensors" in EngineOptions("owner/name").model_files
    files = EngineOptions("owner/name", load_format="dummy").model_files
    assert "*.json" in files
    assert not any("safetensors" in each for each in files)


def test_model_through_transformers_is_refused(demo_model: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ConfigError, match="load_format 'dummy': not supported for a model through transformers"):
        LLM(demo_model, load_format="dummy", model_impl="transformers")


def test_server_answers_without_weights_and_warns(tmp_path: Path) -> None:
    folder = write_config(tmp_path, WIDE)
    with running_server(str(folder), "--load-format", "dummy", "--skip-tokenizer-init") as server:
        body = {"prompt": PROMPTS[0], "max_tokens": 4, "ignore_eos": True, "return_token_ids": True}
        answer = server.post("/v1/completions", body).json()
        assert len(answer["choices"][0]["token_ids"]) == 4
        assert server.log.count("are random numbers, and answers mean nothing") == 1
