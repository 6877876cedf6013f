"""The whole engine on the CUDA back end's kernels: on a GPU tests/engine/test_cuda.py does it."""

import os
from pathlib import Path

import pytest
import torch

from quire import LLM, LoRARequest, SamplingParams
from quire.execution.cuda.cuda_graphs import CudaGraphRunner
from quire.execution.cuda.cuda_worker import CudaWorker
from quire.kernels.choice import cuda_back_end
from quire.kernels.cuda.cuda_attention import CUDA_ATTENTION
from quire.kernels.paged_attention import AttentionBackEnd
from quire.kernels.reference.back_ends import TORCH
from quire.model.loader import load_model
from support.cuda_engine import PROMPTS, check_sharing, differences_beyond_margin, tokens_of
from support.cuda_threads import run_on_host
from support.interpreter import rows_alike
from support.paged_runner import PagedRunner
from support.peft_folders import write_adapter
from support.random_folder import write_random_folder
from support.random_model import write_random_model
from support.steps_in_flight import executor_in_flight

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
AT_A_BORDER = [[*PROMPTS[0], *range(1, 8)], PROMPTS[1]]  # 47 tokens, so that the second decode begins a block of 16
FEW = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning"),
    pytest.mark.skipif(not INTERPRETS, reason="host tensors: tests/engine/test_cuda.py runs on a GPU"),
]


def interpreted(attention: AttentionBackEnd | None = None, **settings: object) -> LLM:
    """Make an engine whose ops are those of a GPU, on tensors in host memory."""
    back_end = cuda_back_end(is_exact=settings.get("exact") is True, attention=attention)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("quire.engine.loading.choose_back_end", lambda *args, **how: back_end)
        patch.setattr("quire.execution.device.HostDevice.executor", executor_in_flight)
        return LLM(device="cpu", **settings)  # type: ignore[arg-type]


def test_answers_are_those_of_the_cpu(tmp_path: Path, device: torch.device) -> None:
    model = write_random_model(tmp_path)
    with interpreted(model=model, dtype="float32", num_kv_blocks=32) as llm:
        answers = tokens_of(llm, AT_A_BORDER, FEW)
    for prompt, (tokens,) in zip(AT_A_BORDER, answers, strict=True):
        assert not differences_beyond_margin(model, prompt, tokens, margin=1e-3)


def test_answers_with_decodes_by_the_kernel_in_cuda_are_those_of_the_cpu(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_on_host(monkeypatch)
    model = write_random_model(tmp_path)
    with interpreted(CUDA_ATTENTION, model=model, dtype="float32", num_kv_blocks=32) as llm:
        answers = tokens_of(llm, AT_A_BORDER, FEW)
    for prompt, (tokens,) in zip(AT_A_BORDER, answers, strict=True):
        assert not differences_beyond_margin(model, prompt, tokens, margin=1e-3)


@pytest.mark.parametrize(
    "kv_dtype", ["int8_per_token_head", pytest.param("fp8_per_token_head", marks=pytest.mark.matrix), "fp8"]
)
def test_cache_of_8_bits_gives_the_logprobs_of_the_cpu(kv_dtype: str, tmp_path: Path, device: torch.device) -> None:
    settings = {"model": write_random_model(tmp_path), "num_kv_blocks": 32, "dtype": "float32"}
    settings["kv_cache_dtype"] = kv_dtype
    params, found = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0), list[list[float]]()
    for make in (interpreted, LLM):
        with make(**settings) as llm:
            (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        chosen = output.outputs[0]
        found.append([entry[token].logprob for token, entry in zip(chosen.token_ids, chosen.logprobs, strict=True)])
    assert found[0] == pytest.approx(found[1], abs=2e-3)


@pytest.mark.parametrize("method", ["int8", pytest.param("int4", marks=pytest.mark.matrix)])
def test_quantized_weights_give_the_logprobs_of_the_cpu(method: str, tmp_path: Path, device: torch.device) -> None:
    """int8 activations have the same bits on both, so rounding of norms and attention alone moves a logprob."""
    settings = {"model": write_random_model(tmp_path), "quantization": method, "num_kv_blocks": 32, "dtype": "float32"}
    params, found = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logprobs=0), list[list[float]]()
    for make in (interpreted, LLM):
        with make(**settings) as llm:
            (output,) = llm.generate([PROMPTS[0]], params, use_tqdm=False)
        chosen = output.outputs[0]
        found.append([entry[token].logprob for token, entry in zip(chosen.token_ids, chosen.logprobs, strict=True)])
    assert found[0] == pytest.approx(found[1], abs=2e-3)


def make_graphs(monkeypatch: pytest.MonkeyPatch) -> list[CudaWorker]:
    """Let workers have graphs that are called again instead of replayed; return the list that they will be in."""
    workers, make = list[CudaWorker](), CudaWorker.__init__

    def with_graphs(worker: CudaWorker, *parts: object) -> None:
        make(worker, *parts)  # type: ignore[arg-type]
        num_rows, max_blocks = worker.compute.batch.block_tables.shape
        adapters, device = worker.compute.adapters, torch.device("cpu")
        slots = None if adapters is None else adapters.slots
        worker._graphs = CudaGraphRunner(
            worker.compute.forward, max_blocks, device, lambda call: call, num_rows, slots, draw=worker.draw,
            idle_row=num_rows,
        )  # fmt: skip
        workers.append(worker)

    monkeypatch.setattr(CudaWorker, "__init__", with_graphs)
    return workers


@pytest.mark.filterwarnings("ignore:.*(overflow|invalid value) encountered:RuntimeWarning")  # tokens of no row
def test_adapters_give_the_logprobs_of_the_cpu_in_steps_of_many(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests of three adapters, two in memory at a time, and of none. Steps with adapters and without have graphs."""
    monkeypatch.setattr("quire.execution.cuda.cuda_graphs.WANTED_BEFORE_CAPTURE", 1)
    model = write_random_model(tmp_path)
    write_adapter(tmp_path / "a", model, 1)
    write_adapter(tmp_path / "b", model, 2, targets=("k_proj", "up_proj"), rank=3, lora_alpha=7)
    write_adapter(tmp_path / "c", model, 3, rank=16, ranks={"q_proj": 5, "down_proj": 1}, use_rslora=True)
    requests = [None, *(LoRARequest(name, number, str(tmp_path / name)) for number, name in enumerate("abc", 1)), None]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=0) for n in (3, 3, 3, 3, 9)]
    settings = {"model": model, "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4}
    prompts, found = [[7, 3 + i, 9] for i in range(5)], list[list[float]]()
    for make, lora in ((LLM, {"enable_lora": True}), (interpreted, {"enable_lora": True, "max_loras": 2})):
        workers = make_graphs(monkeypatch)
        with make(**settings, **lora) as llm:
            outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
        answers = [output.outputs[0] for output in outputs]
        found.append(
            [each[token].logprob for own in answers for each, token in zip(own.logprobs, own.token_ids, strict=True)]
        )
    assert found[1] == pytest.approx(found[0], abs=2e-3)
    assert {size.has_adapters for size, graph in workers[0]._graphs._graphs.items() if graph} == {False, True}


@pytest.mark.filterwarnings("ignore:.*(overflow|invalid value) encountered:RuntimeWarning")  # tokens of no row
def test_steps_with_chunks_in_graphs_give_the_same_tokens(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is called again instead of replayed: what it pads reaches no row."""
    monkeypatch.setattr("quire.execution.cuda.cuda_graphs.WANTED_BEFORE_CAPTURE", 1)
    settings = {"model": write_random_model(tmp_path), "dtype": "float32", "num_kv_blocks": 64, "max_num_seqs": 4}
    settings["max_num_batched_tokens"] = 6  # prompts in chunks, beside decodes
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
        SamplingParams(temperature=1.5, top_p=0.95, top_k=200, seed=3, max_tokens=5, ignore_eos=True),
    ]
    prompts, workers, found = [list(prompt) for prompt in PROMPTS[:2]], list[CudaWorker](), list[list[list[int]]]()
    for has_graphs in (False, True):
        if has_graphs:
            workers = make_graphs(monkeypatch)
        with interpreted(**settings) as llm:
            found.append([each.outputs[0].token_ids for each in llm.generate(prompts, params, use_tqdm=False)])
    assert found[0] == found[1]
    captured = [size for size, graph in workers[0]._graphs._graphs.items() if graph is not None]
    assert any(size.is_mixed for size in captured)
    assert any(size.draws for size in captured)


def test_logprobs_of_an_exact_engine_have_the_same_bits_alone_and_together(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch of 40 rows, which torch's product sums in another order than single rows."""
    rows_alike(monkeypatch)
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=3)
    prompts = [list(prompt) for prompt in PROMPTS[:2]] + [[7, 3 + i] for i in range(6)]
    with interpreted(model=write_random_model(tmp_path), dtype="float32", num_kv_blocks=64, exact=True) as llm:
        together = [each.outputs[0].logprobs for each in llm.generate(prompts, params, use_tqdm=False)]
        for index in (0, 5):
            (alone,) = llm.generate([prompts[index]], params, use_tqdm=False)
            assert alone.outputs[0].logprobs == together[index]


@pytest.mark.matrix
def test_sharing_and_preemption_keep_to_the_margin(tmp_path: Path, device: torch.device) -> None:
    check_sharing(interpreted, write_random_model(tmp_path), margin=1e-3)


SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
FAMILIES = {
    "Mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Qwen2Moe": {
        "model_type": "qwen2_moe", "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 40, "decoder_sparse_step": 1,
    },
    "GptOss": {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2},
    "Gemma2": {"model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 16, "attn_logit_softcapping": 2.0},
    "GPTJ": {"model_type": "gptj", "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "rotary_dim": 4},
    "Glm4": {"model_type": "glm4", "partial_rotary_factor": 0.5},
    "Cohere": {"model_type": "cohere", "logit_scale": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", FAMILIES)
def test_families_of_other_parts_than_llama_have_the_logits_of_the_cpu(
    name: str, tmp_path: Path, device: torch.device
) -> None:
    folder = write_random_folder(tmp_path, SMALL | {"architectures": [f"{name}ForCausalLM"]} | FAMILIES[name])
    found, expected = (
        PagedRunner(load_model(folder, back_end=back_end)).run("a", [3 * i % 61 for i in range(14)], [7, 5])
        for back_end in (cuda_back_end(), TORCH)
    )
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
