"""A model of short convolutions and attention: no way of serving changes a bit, prefixes are found at every block.

Each answer is that of the request alone in a plain engine: without prefix cache, drafts, preemption or chunks.
"""

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.config import CacheConfig
from quire.core.errors import ConfigError
from quire.engine import sizing
from quire.engine.options import EngineOptions
from quire.extension.isas import usable_isas
from quire.kernels.back_end import require_ops
from quire.kernels.special_ops import ShortConvOp
from support.answers import answers_of
from support.every_way import (
    CASES,
    ISAS,
    VOCAB_SIZE,
    alone,
    asked,
    check_all_at_once,
    check_apart,
    check_beams,
    check_disk_and_sleep,
    check_every_cut,
    check_near,
)
from support.random_folder import write_random_folder

CONFIG: dict[str, object] = {
    "architectures": ["Lfm2ForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 4, "num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "layer_types": ["conv", "full_attention", "conv", "conv"], "tie_word_embeddings": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("convolutions"), CONFIG)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_hits_drafts_preemption_chunks_and_forks_change_no_bit(model: Path, isa: str, dtype: str, mode: str) -> None:
    _, poison = check_all_at_once(model, isa, dtype, mode)
    assert poison.num_poisoned_blocks > 100


@pytest.mark.parametrize(
    ("rounding", "bound"),
    [
        ({"quantization": "int8"}, 0.1), ({"kv_cache_dtype": "fp8"}, 0.05),
        ({"quantization": "int4", "kv_cache_dtype": "int8_per_token_head"}, 0.6),  # unlike models differ by 0.9
    ],
    ids=str,
)
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
def test_rounded_weights_keys_and_values_change_no_bit_more(
    model: Path, rounding: dict[str, str], bound: float
) -> None:
    """In every way at once, and with two ranks; near the model that is not rounded."""
    check_all_at_once(model, ISAS[0], "bfloat16", "swap", **rounding)
    check_all_at_once(model, ISAS[0], "bfloat16", "recompute", **rounding, tensor_parallel_size=2)
    check_near(model, bound, **rounding)


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
    check_every_cut(model, isa, dtype)


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
    check_beams(model)


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.parametrize("changes", [{"tensor_parallel_size": 2}, {"data_parallel_size": 2}], ids=str)
@pytest.mark.usefixtures("forked_processes")
def test_ranks_and_engines_have_the_bits_of_one(model: Path, changes: dict[str, Any]) -> None:
    prompts, params = asked()
    with LLM(model, dtype="bfloat16", max_model_len=160, block_size=8, **changes) as llm:
        found = [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)]
    assert found == alone(model, ISAS[0], "bfloat16")


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("forked_processes")
def test_prompts_that_are_computed_apart_change_no_bit(model: Path) -> None:
    check_apart(model, ISAS[0], "bfloat16", 15300)


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("tests_frozen")
def test_disk_tier_and_sleep_keep_the_ends_of_blocks(model: Path, tmp_path: Path) -> None:
    num_tokens, cached = check_disk_and_sleep(model, tmp_path)
    assert cached == [(num_tokens - 1) // 16 * 16] * 3


def test_what_is_not_served_is_refused_by_name(model: Path) -> None:
    with pytest.raises(ConfigError, match=r"memory_policy 'contiguous-max' is not supported .* short convolutions"):
        LLM(model, memory_policy="contiguous-max")
    with pytest.raises(ConfigError, match="device cuda does not support ShortConv yet"):
        require_ops("cuda", [ShortConvOp("conv", 0, None, None, "x", "y")])  # type: ignore[arg-type]
