"""What runs on a CPU, in processes where PyTorch is missing, and with the same bits where it is not."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.embedders import write_reranker
from support.gguf_files import convert
from support.peft_folders import write_adapter
from support.quantized_folder import awq, awq_config, gptq, gptq_config, write_pair
from support.server import running_server

DRAFT = Path(__file__).parent / "data/demo-draft"
MISSING = 'import sys\nsys.modules["torch"] = None  # importing it raises ModuleNotFoundError, and none is found\n'
ANSWERS = """
import json, sys
from quire import LLM, LoRARequest, SamplingParams
from quire.core.pooling import PoolingParams

model, gguf, adapter, draft, *quantized = sys.argv[1:]
prompts = ["def f(", "import", "class A:", "for i in"]
greedy = dict(temperature=0.0, max_tokens=12, ignore_eos=True)
drawn = dict(temperature=0.8, top_p=0.9, seed=3, n=3, logprobs=2, presence_penalty=0.5, max_tokens=12, ignore_eos=True)
found = {}

def run(name, params, model=model, lora=None, prompts=prompts, max_model_len=256, **settings):
    with LLM(model, max_model_len=max_model_len, **settings) as llm:
        outputs = llm.generate(prompts, SamplingParams(**params), use_tqdm=False, lora_request=lora)
        found[name] = [[[*each.token_ids], each.cumulative_logprob] for one in outputs for each in one.outputs]

run("greedy", greedy)
run("float32", greedy, dtype="float32")
run("drawn", drawn)
for quantization in ("int8", "int4"):
    run(quantization, greedy, quantization=quantization)
run("int8 cache", greedy, kv_cache_dtype="int8_per_token_head")
run("recomputed", drawn, num_kv_blocks=24, max_num_batched_tokens=32)
run("swapped", drawn, num_kv_blocks=24, preemption_mode="swap", swap_space="8MiB")
run("gguf", greedy, model=gguf)
for folder in quantized:
    run(folder, greedy, model=folder, prompts=[[5, 6, 7]], max_model_len=64)
run("adapter", greedy, lora=LoRARequest("a", 1, adapter), enable_lora=True)
run("n-grams", greedy, speculative_config={"method": "ngram", "num_speculative_tokens": 3})
run("draft", greedy, speculative_config={"model": draft, "num_speculative_tokens": 3})
run("ranks", greedy, tensor_parallel_size=2)
run("grammar", dict(temperature=0.0, max_tokens=20, structured_outputs={"regex": "[a-c]{4}"}))
with LLM(model, runner="pooling", max_model_len=256) as llm:
    found["embedding"] = [sum(one.outputs.embedding) for one in llm.embed(prompts, use_tqdm=False)]
print(json.dumps(found))
print("torch" in sys.modules and sys.modules["torch"] is not None)
"""


@pytest.fixture(scope="module")
def without_torch(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of processes without PyTorch."""
    folder = tmp_path_factory.mktemp("without")
    (folder / "sitecustomize.py").write_text(MISSING)
    return os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}


def ran(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command], env=environment, capture_output=True, text=True, check=False, timeout=300
    )


def test_answers_have_the_same_bits_with_and_without(
    demo_model: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, without_torch: dict[str, str]
) -> None:
    gguf = convert(demo_model, tmp_path / "demo.gguf")
    adapter = write_adapter(tmp_path / "adapter", demo_model)
    quantized = [
        write_pair(tmp_path_factory.mktemp(name), quantize, config).folder
        for name, quantize, config in (("gptq", gptq(4, 8), gptq_config(4, 8)), ("awq", awq(8), awq_config(8)))
    ]
    command = ["-c", ANSWERS, *map(str, [demo_model, gguf, adapter, DRAFT, *quantized])]
    done = [ran(command, environment) for environment in (without_torch, os.environ | {"OMP_NUM_THREADS": "1"})]
    assert [each.returncode for each in done] == [0, 0], done[0].stderr + done[1].stderr
    (without, is_loaded), (beside, is_loaded_beside) = (each.stdout.splitlines() for each in done)
    assert (is_loaded, is_loaded_beside) == ("False", "False")
    answers: dict[str, Any] = json.loads(without)
    assert answers == json.loads(beside)
    assert len(answers) == 17
    assert answers["greedy"] == answers["ranks"] == answers["n-grams"] == answers["draft"]
    assert answers["drawn"] == answers["swapped"] == answers["recomputed"]
    assert answers["greedy"] != answers["adapter"]


def test_servers_answer(demo_model: Path, tmp_path: Path, without_torch: dict[str, str]) -> None:
    adapter, chat = write_adapter(tmp_path / "adapter", demo_model), [{"role": "user", "content": "hi"}]
    environment, blocks = {"PYTHONPATH": without_torch["PYTHONPATH"]}, ("--num-kv-blocks", "256")
    adapters = "--enable-lora", "--lora-modules", f"a={adapter}"
    with running_server(*blocks, "-dp", "2", *adapters, env=environment, is_new=True) as one:
        completion = one.post("/v1/completions", {"model": "a", "prompt": "def f(", "max_tokens": 4, "temperature": 0})
        chatted = one.post("/v1/chat/completions", {"messages": chat, "max_tokens": 4})
        assert [(each.status_code, each.json()["usage"]["completion_tokens"]) for each in (completion, chatted)] == [
            (200, 4), (200, 4),
        ]  # fmt: skip
    with running_server(str(write_reranker(tmp_path / "reranker")), *blocks, env=environment, is_new=True) as other:
        scores = other.post("/score", {"text_1": "a", "text_2": ["b", "c"]}).json()["data"]
        ranking = other.post("/rerank", {"query": "a", "documents": ["b", "c"]}).json()["results"]
        found = {each["index"]: each["relevance_score"] for each in ranking}
        assert [found[each["index"]] for each in scores] == [each["score"] for each in scores]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--device", "cuda"], "device cuda: this needs PyTorch: pip install 'quire[torch]'"),
        (
            ["-tp", "2", "--nnodes", "2", "--master-addr", "127.0.0.1"],
            "ranks of several machines: this needs PyTorch: pip install 'quire[torch]'",
        ),
        (["--model-impl", "transformers"], "the package torch: pip install 'quire[transformers]'"),
    ],
)
def test_what_needs_it_says_so_in_one_line(flags: list[str], told: str, without_torch: dict[str, str]) -> None:
    done = ran(["-m", "quire", "generate", "--prompt", "a", *flags], without_torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert told in done.stderr
    assert done.stderr.count("\n") == 1


def test_plots_without_their_library_are_refused_before_the_figures(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(MISSING + 'sys.modules["matplotlib"] = None\n')
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    figures, output = ["-m", "quire", "paper", "layout", "--output"], tmp_path / "figures"
    refused = ran([*figures, str(output)], environment)
    assert (refused.returncode, refused.stdout, output.exists()) == (2, "", False)
    told = "a plot needs the package matplotlib: pip install 'quire[paper]', or use --no-plots"
    assert refused.stderr == f"quire: {told}\n"
    made = ran([*figures, str(output), "--no-plots"], environment)
    assert (made.returncode, made.stderr) == (0, "")
    assert [file.name for file in output.iterdir()] == ["layout.json"]


def test_where_there_are_no_kernels_either_it_is_said(without_torch: dict[str, str]) -> None:
    code = (
        "import sys\nsys.modules['quire.extension._kernels'] = None\nsys.argv[1:] = ['generate', '--prompt', 'a']\n"
        "from quire.cli.main import main\nmain()"
    )
    done = ran(["-c", code], without_torch)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("quire: there are no C++ kernels for this model here")
    assert done.stderr.count("\n") == 1
