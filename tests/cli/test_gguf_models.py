"""Models in one GGUF file, used as a folder is: by LLM, `quire generate` and `quire plan`."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from support.answers import answers_of
from support.gguf_files import convert
from support.server import running_server

Run = Callable[..., Any]
PROMPTS = ["def f(x):\n    return", "import os", "naïve 日本"]
CHAT = [{"role": "user", "content": "Return the sum of a list."}]
GREEDY = SamplingParams(max_tokens=12, temperature=0, logprobs=3)


@pytest.fixture(scope="module")
def demo_file(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return convert(demo_model, tmp_path_factory.mktemp("gguf") / "demo.gguf")


def test_file_of_the_demo_model_answers_as_its_folder_to_the_bit(demo_model: Path, demo_file: Path) -> None:
    told = []
    for model in (demo_model, demo_file):
        with LLM(str(model), num_kv_blocks=64) as llm:
            outputs = [*llm.generate(PROMPTS, GREEDY, use_tqdm=False), *llm.chat(CHAT, GREEDY, use_tqdm=False)]
            told.append([(output.prompt_token_ids, answers_of(output)) for output in outputs])
    assert told[0] == told[1]


def test_generate_and_plan_take_a_file(run: Run, demo_model: Path, demo_file: Path, tmp_path: Path) -> None:
    texts, plans = [], []
    for model in (demo_model, demo_file):
        ran = run("generate", model, "--prompt", "import os", "--max-tokens", 8, "--temperature", 0)
        assert ran.code == 0, ran.err
        texts.append(ran.out)
        planned = run("plan", model, "--device-memory", "1GiB", "--json", tmp_path / "plan.json")
        assert planned.code == 0, planned.err
        plans.append(json.loads((tmp_path / "plan.json").read_text()) | {"model": ""})
    assert texts[0] == texts[1]
    assert plans[0] == plans[1]


def test_server_takes_a_file(demo_file: Path, tmp_path: Path) -> None:
    other = shutil.copy(demo_file, tmp_path / "demo.of.another.name")  # known by its first bytes
    with running_server(str(other), "--num-kv-blocks", "64", "--served-model-name", "demo") as server:
        asked = {"model": "demo", "messages": CHAT, "max_tokens": 12, "temperature": 0}
        answer = server.post("/v1/chat/completions", asked).json()["choices"][0]["message"]["content"]
    with LLM(str(other), num_kv_blocks=64) as llm:
        assert llm.chat(CHAT, GREEDY, use_tqdm=False)[0].outputs[0].text == answer


def test_tokenizer_of_a_folder_replaces_that_of_the_file(demo_model: Path, demo_file: Path, tmp_path: Path) -> None:
    unknown = convert(demo_model, tmp_path / "unknown.gguf", **{"tokenizer.ggml.pre": "viking"})
    with LLM(str(unknown), tokenizer=str(demo_model), num_kv_blocks=64) as ours, LLM(str(demo_file)) as theirs:
        for llm in (ours, theirs):
            assert llm.tokenizer is not None
        assert ours.tokenizer.encode("import os") == theirs.tokenizer.encode("import os")
        assert ours.tokenizer.chat_template == theirs.tokenizer.chat_template
