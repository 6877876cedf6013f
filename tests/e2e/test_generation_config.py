"""Requests that leave parameters out get those of generation_config.json: in Python, over HTTP, on the command line."""

import json
import shutil
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from support.server import running_server, wait_until

PROMPT, CHAT = "def add(first, second):", [{"role": "user", "content": "What does read_file do?"}]


@pytest.fixture(scope="module")
def greedy_model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the demo model, with a file that makes it greedy, and its answers short."""
    folder = tmp_path_factory.mktemp("greedy") / "model"
    shutil.copytree(demo_model, folder)
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"temperature": 0.0, "top_k": 7, "max_new_tokens": 5}))
    return folder


def test_llm_has_the_defaults_of_its_model(greedy_model: Path) -> None:
    with LLM(greedy_model, num_kv_blocks=16) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.0, top_k=7, max_tokens=5)
        (found,) = llm.generate(PROMPT, use_tqdm=False)
        (named,) = llm.generate(PROMPT, SamplingParams(temperature=0.0, max_tokens=9), use_tqdm=False)
    assert len(found.outputs[0].token_ids) == 5
    assert len(named.outputs[0].token_ids) == 9
    assert found.outputs[0].token_ids == named.outputs[0].token_ids[:5]
    override = {"temperature": 0.5}
    with LLM(greedy_model, num_kv_blocks=16, generation_config="vllm", override_generation_config=override) as llm:
        assert llm.get_default_sampling_params() == SamplingParams(temperature=0.5)


def test_server_has_the_defaults_of_its_model_and_the_bound_of_its_operator(greedy_model: Path) -> None:
    with running_server(str(greedy_model), "--override-generation-config", '{"max_new_tokens": 20}') as server:
        def choice(path: str, **body: object) -> tuple[str, int]:
            answer = server.post(path, {"seed": 1} | body).json()
            shown = answer["choices"][0]
            return shown.get("text") or shown["message"]["content"], answer["usage"]["completion_tokens"]

        asked = choice("/v1/completions", prompt=PROMPT, max_tokens=9)
        assert asked == choice("/v1/completions", prompt=PROMPT, max_tokens=9, temperature=0, seed=2)
        assert asked != choice("/v1/completions", prompt=PROMPT, max_tokens=9, temperature=2, top_k=0, seed=3)
        assert choice("/v1/chat/completions", messages=CHAT, ignore_eos=True)[1] == 20
        assert choice("/v1/chat/completions", messages=CHAT, ignore_eos=True, max_tokens=40)[1] == 20
        assert choice("/v1/completions", prompt=PROMPT, max_tokens=40, min_tokens=30)[1] == 20
        beams = {"prompt": PROMPT, "n": 2, "use_beam_search": True, "max_tokens": 3}
        assert server.post("/v1/completions", beams).status_code == 200
        wait_until(lambda: "temperature 0.0, top_k 7, max_tokens 20" in server.log)
