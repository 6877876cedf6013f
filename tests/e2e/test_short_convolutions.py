"""A model of short convolutions and attention: no way of serving changes a bit, prefixes are found at every block.

Each answer is that of the request alone in a plain engine: without prefix cache, drafts, preemption or chunks.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.config import CacheConfig
from quire.core.errors import ConfigError
from quire.engine import sizing
from quire.engine.loading import check_tails
from quire.engine.options import EngineOptions
from quire.kernels.back_end import require_ops
from quire.kernels.choice import choose_back_end
from quire.kernels.cpp.isas import usable_isas
from quire.kernels.special_ops import ShortConvOp
from quire.model.loader import load_model
from support.answers import Answer, answers_of
from support.oracle_drafter import let_draft
from support.paged_runner import PagedRunner
from support.poison import Poison, preempt_now_and_then
from support.random_folder import write_random_folder
from support.threads import set_num_threads

ISAS = usable_isas() or ("auto",)
VOCAB_SIZE = 96
CONFIG: dict[str, object] = {
    "architectures": ["Lfm2ForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "layer_types": ["conv", "full_attention", "conv", "conv"], "tie_word_embeddings": False,
}  # fmt: skip
KINDS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0, "logprobs": 2},
    {"seed": 1, "top_p": 0.9, "presence_penalty": 0.5},
    {"seed": 2, "n": 3, "logprobs": 1},
    {"seed": 3, "top_k": 20, "prompt_logprobs": 1},
)
CASES = [(isa, "bfloat16") for isa in ISAS] + [(ISAS[0], "float32")]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("convolutions"), CONFIG)


def asked() -> tuple[list[list[int]], list[SamplingParams]]:
    """Prompts that begin alike and end within blocks, of 1 to 90 tokens."""
    rng = random.Random(3)
    shared = [rng.randrange(VOCAB_SIZE) for _ in range(60)]
    prompts = [
        [*shared[: rng.randrange(60)], *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(1, 30)))]
        for _ in range(10)
    ]
    params = [SamplingParams(max_tokens=rng.randint(1, 24), ignore_eos=True, **KINDS[i % 4]) for i in range(10)]
    return prompts, params


@cache
def alone(model: Path, isa: str, dtype: str) -> list[list[Answer]]:
    num_threads = torch.get_num_threads()
    with LLM(model, cpu_isa=isa, dtype=dtype, enable_prefix_caching=False, max_model_len=160) as llm:
        set_num_threads(1)
        found = [answers_of(llm.generate([each], own, use_tqdm=False)[0]) for each, own in zip(*asked(), strict=True)]
    set_num_threads(num_threads)
    return found


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_hits_drafts_preemption_chunks_and_forks_change_no_bit(model: Path, isa: str, dtype: str, mode: str) -> None:
    """All of them at once, with NaN in all that is free; the second time with the prefixes of the first."""
    expected, (prompts, params) = alone(model, isa, dtype), asked()
    wholes = [prompt + list(answer.token_ids) for prompt, own in zip(prompts, expected, strict=True) for answer in own]
    with LLM(
        model, cpu_isa=isa, dtype=dtype, max_model_len=160, block_size=8, max_num_batched_tokens=23, max_num_seqs=12,
        num_kv_blocks=60, preemption_mode=mode, num_swap_blocks=90 if mode == "swap" else None,
        speculative_config={"method": "ngram", "num_speculative_tokens": 4},
    ) as llm:  # fmt: skip
        set_num_threads(1)
        drafter, poison = let_draft(llm, wholes), Poison(llm)
        poison.spread()
        preempt_now_and_then(llm._engine.engine.scheduler)
        for _ in range(2):
            outputs = llm.generate(prompts, params, use_tqdm=False)
            llm._engine.engine.scheduler.check()
            assert [answers_of(output) for output in outputs] == expected
        stats = llm.kv_stats()
    assert stats.used_blocks == stats.swap_used_blocks == 0
    assert stats.preemptions[mode] > 5
    assert stats.prefix_hits_tokens > 100
    assert 0 < drafter.num_accepted < drafter.num_verified
    assert poison.num_poisoned_blocks > 100


def short_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EngineOptions, "max_truncated", 1)


def matches_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizing, "CacheConfig", partial(_without, CacheConfig))


def _without(kind: Callable[..., CacheConfig], *args: Any, finds_whole_blocks: bool, **named: Any) -> CacheConfig:  # noqa: ANN401
    assert finds_whole_blocks
    return kind(*args, **named)


@pytest.mark.parametrize("fault", [short_rings, matches_inside])
def test_faults_would_show(
    model: Path, fault: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    alone(model, ISAS[0], "bfloat16")
    fault(monkeypatch)
    with pytest.raises(AssertionError):
        test_hits_drafts_preemption_chunks_and_forks_change_no_bit(model, ISAS[0], "bfloat16", "swap")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_cut_of_70_tokens_has_the_bits_of_the_whole(model: Path, isa: str, dtype: str) -> None:
    back_end = choose_back_end("cpu", isa=isa)
    decoder = load_model(model, dtype=dtype, back_end=back_end, max_positions=80)
    tokens = [random.Random(5).randrange(VOCAB_SIZE) for _ in range(70)]
    runner = partial(PagedRunner, decoder, block_size=16, num_blocks=8)
    whole = runner().run("a", tokens, [70])
    for cut in range(1, 70):
        found = runner().run("a", tokens, [cut, 70 - cut])
        assert torch.equal(found, whole), f"cut at {cut}"
    choose_back_end("cpu", isa=ISAS[0])


def test_prefixes_are_found_at_every_block(model: Path) -> None:
    rng = random.Random(8)
    prompt, params = [rng.randrange(VOCAB_SIZE) for _ in range(96)], SamplingParams(max_tokens=3, temperature=0.0)
    with LLM(model, max_model_len=160, block_size=16, enable_prefix_caching=False) as plain, LLM(
        model, max_model_len=160, block_size=16
    ) as llm:
        llm.generate([prompt], params, use_tqdm=False)
        for length in range(1, 96):
            own = [*prompt[:length], (prompt[length] + 1) % VOCAB_SIZE]
            (found,), (expected,) = (each.generate([own], params, use_tqdm=False) for each in (llm, plain))
            assert answers_of(found) == answers_of(expected)
            assert found.num_cached_tokens == length // 16 * 16
        (again,) = llm.generate([prompt], params, use_tqdm=False)
        assert again.num_cached_tokens == 95, "all blocks are there: only the last token's logits are computed"


def test_beams_are_those_without_a_prefix_cache(model: Path) -> None:
    prompts, params = asked()[0][:3], BeamSearchParams(beam_width=4, max_tokens=20)
    found = []
    for caching in (False, True, True):
        with LLM(model, max_model_len=160, block_size=8, num_kv_blocks=80, enable_prefix_caching=caching) as llm:
            outputs = [llm.beam_search([prompt], params, use_tqdm=False)[0] for prompt in prompts * (1 + caching)]
            assert llm.kv_stats().used_blocks == 0
        found.append([[each.token_ids for each in output.outputs] for output in outputs])
    assert found[1] == found[2] == found[0] * 2


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
def test_ranks_and_engines_have_the_bits_of_one(model: Path, changes: dict[str, Any]) -> None:
    prompts, params = asked()
    with LLM(model, dtype="bfloat16", max_model_len=160, block_size=8, **changes) as llm:
        found = [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)]
    assert found == alone(model, ISAS[0], "bfloat16")


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("tests_frozen")
def test_disk_tier_and_sleep_keep_the_ends_of_blocks(model: Path, tmp_path: Path) -> None:
    prompt, params = asked()[0][1] * 2, SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    answers, cached = [], []
    for _ in range(2):
        with LLM(
            model, max_model_len=160, kv_disk_dir=tmp_path, kv_disk_size="4MiB", num_kv_blocks=30,
            enable_sleep_mode=True,
        ) as llm:
            for _ in range(2):
                (output,) = llm.generate([prompt], params, use_tqdm=False)
                answers.append(answers_of(output))
                cached.append(output.num_cached_tokens)
                llm.sleep(level=1)
                llm.wake_up()
    assert all(each == answers[0] for each in answers)
    assert cached[0] == 0
    assert all(each == (len(prompt) - 1) // 16 * 16 for each in cached[1:])


def test_what_is_not_served_is_refused_by_name(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_policy 'contiguous-max' is not supported .* short convolutions"):
        LLM(model, memory_policy="contiguous-max")
    with pytest.raises(ConfigError, match="kv_role 'producer' is not supported for a model with short convolutions"):
        check_tails(replace(EngineOptions(str(model)), kv_role="producer", kv_secret_file="secret"))
    with pytest.raises(ConfigError, match="device cuda does not support ShortConv yet"):
        require_ops("cuda", [ShortConvOp("conv", 0, None, None, "x", "y")])  # type: ignore[arg-type]
