"""Latents in 8 bits: no way of serving changes a bit, the counted bytes are those taken, and answers stay near."""

import os
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from e2e.test_quantized_cache import log_probs
from quire import LLM, SamplingParams
from quire.core.config import QUANTIZED
from quire.engine.fleet.offline_fleet import BlockingFleet
from quire.extension.isas import usable_isas
from quire.kernels.choice import choose_back_end
from quire.model.loader import load_model
from support.answers import answers_of
from support.every_way import (
    ISAS,
    VOCAB_SIZE,
    alone,
    asked,
    check_all_at_once,
    check_disk_and_sleep,
    check_every_cut,
)
from support.random_folder import write_random_folder
from support.server import wait_until

CONFIG: dict[str, object] = {
    "architectures": ["DeepseekV3ForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
    "kv_lora_rank": 128, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 16,
    "n_routed_experts": 6, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1,
}  # fmt: skip
INT8 = {"kv_cache_dtype": "int8_per_token_head"}
MAX_KL = {"int8_per_token_head": 0.0003, "fp8_per_token_head": 0.003, "fp8": 0.005}  # nats per token
# An address of its own for each process of tests: all of 127.0.0.0/8 is this machine.
HOST = f"127.{1 + os.getpid() // 65536 % 250}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
needs_kernels = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU has no attention over latents yet")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("latents"), CONFIG)


@pytest.mark.parametrize(("isa", "dtype", "mode", "kv_dtype"), [
    (ISAS[0], "bfloat16", "swap", "int8_per_token_head"), (ISAS[-1], "bfloat16", "recompute", "fp8"),
    (ISAS[0], "float32", "recompute", "fp8_per_token_head"),
])  # fmt: skip
def test_hits_drafts_preemption_chunks_and_forks_change_no_bit(
    model: Path, isa: str, dtype: str, mode: str, kv_dtype: str
) -> None:
    _, poison = check_all_at_once(model, isa, dtype, mode, kv_cache_dtype=kv_dtype)
    assert poison.num_poisoned_blocks > 100


def test_every_cut_of_70_tokens_has_the_bits_of_the_whole(model: Path) -> None:
    check_every_cut(model, ISAS[0], "bfloat16", **INT8)


@needs_kernels
@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
@pytest.mark.usefixtures("forked_processes")
def test_ranks_and_engines_have_the_bits_of_one(model: Path, changes: dict[str, Any]) -> None:
    prompts, params = asked()
    with LLM(model, dtype="bfloat16", max_model_len=160, block_size=8, **INT8, **changes) as llm:
        found = [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)]
    assert found == alone(model, ISAS[0], "bfloat16", **INT8)


@needs_kernels
@pytest.mark.usefixtures("forked_processes")
def test_prompts_that_are_computed_apart_have_the_bits_of_one_engine(model: Path) -> None:
    (prompts, params), salts = asked(), count()
    apart: dict[str, Any] = {"data_parallel_size": 2, "prefill_engines": 1, "prefill_least_tokens": 17}
    apart |= {"kv_host": HOST, "kv_port": 15200}
    with LLM(model, dtype="bfloat16", max_model_len=160, block_size=8, **INT8, **apart) as llm:
        assert isinstance(llm._runner, BlockingFleet)
        decodes = llm._runner._client.engines[1]
        wait_until(lambda: decodes.state.kv is not None and decodes.state.kv.transfer.get("peers_connected") == 1)

        def is_fetched() -> bool:  # again on a machine that stood still: a read that takes long is given up
            salt = str(next(salts))
            salted: list[Any] = [{"prompt_token_ids": each, "cache_salt": salt} for each in prompts]
            outputs = llm.generate(salted, params, use_tqdm=False)
            assert [answers_of(each) for each in outputs] == alone(model, ISAS[0], "bfloat16", **INT8)
            return any(each.metrics.num_peer_tokens for each in outputs if each.metrics is not None)

        wait_until(is_fetched)


@needs_kernels
@pytest.mark.usefixtures("tests_frozen")
def test_disk_tier_and_sleep_keep_the_latents(model: Path, tmp_path: Path) -> None:
    _, cached = check_disk_and_sleep(model, tmp_path, **INT8)
    assert all(each > 0 for each in cached)


def test_restored_session_has_the_bits_of_a_computation(model: Path, tmp_path: Path) -> None:
    options: dict[str, Any] = INT8 | {"max_model_len": 160, "kv_disk_dir": tmp_path, "kv_disk_size": "4MiB"}
    known, params = [number * 7 % VOCAB_SIZE for number in range(90)], SamplingParams(max_tokens=8, logprobs=1, seed=1)
    with LLM(model, **options) as llm:
        (expected,) = llm.generate([[*known, 5, 6]], params, use_tqdm=False)
        llm.create_session({"prompt_token_ids": known}).save("one")
    with LLM(model, **options) as llm:
        (found,) = llm.generate([llm.restore_session("one").prompt([5, 6])], params, use_tqdm=False)
        assert found.num_cached_tokens >= 80
    assert answers_of(found) == answers_of(expected)


def test_blocks_take_the_bytes_that_the_plan_counts(model: Path) -> None:
    """Two layers of a latent of 128, with a scale, and 16 rotated dimensions, in 16 bits."""
    for kv_dtype, num_bytes in {"auto": 288, "fp8": 144, "int8_per_token_head": 164, "fp8_per_token_head": 164}.items():
        with LLM(model, dtype="bfloat16", kv_cache_dtype=kv_dtype, num_kv_blocks=9) as llm:
            assembled = llm._engine
            assert assembled.ready.kv_bytes_per_token == 2 * num_bytes
            tensors = assembled.engine.executor.worker.compute.cache.tensors  # type: ignore[attr-defined]
            assert sum(tensor.nbytes for tensor in tensors) == 9 * 16 * 2 * num_bytes


@pytest.mark.parametrize("kv_dtype", QUANTIZED)
def test_distributions_stay_near_those_of_floats(kv_dtype: str, tmp_path: Path) -> None:
    """Without experts: of random ones another may be chosen, which is 0.006 in bfloat16 alone."""
    folder = write_random_folder(tmp_path, CONFIG | {"first_k_dense_replace": 2})
    back_end, tokens = choose_back_end("cpu"), [number * 31 % VOCAB_SIZE for number in range(200)]
    plain, quantized = (
        log_probs(load_model(folder, dtype="float32", back_end=back_end, kv_cache_dtype=each), tokens)
        for each in ("auto", kv_dtype)
    )
    kl = (plain.exp() * (plain - quantized)).sum(dim=-1).mean().item()
    assert 1e-7 < kl < MAX_KL[kv_dtype]
