"""Models of gated delta nets or Mamba-2, and attention: no way of serving changes a bit, states are found where kept.

Each answer is that of the request alone in a plain engine: without prefix cache, drafts, preemption or chunks.
"""

import random
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.cache.states import States
from quire.core.errors import ConfigError, EngineError
from quire.engine.loading import check_states
from quire.engine.options import EngineOptions
from quire.execution.swapper import Swapper
from quire.extension.isas import usable_isas
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
    check_every_cut,
)
from support.random_folder import write_random_folder

CONFIG: dict[str, object] = {
    "architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text", "vocab_size": VOCAB_SIZE, "hidden_size": 48,
    "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
    "max_position_embeddings": 256, "full_attention_interval": 4, "tie_word_embeddings": False,
}  # fmt: skip


MAMBA: dict[str, object] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 256,
    "mamba_n_heads": 6, "mamba_d_state": 16,
}  # fmt: skip
HYBRIDS: dict[str, dict[str, object]] = {
    "kimi linear": {
        "architectures": ["KimiLinearForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 48,
        "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "model_max_length": 256,
        "kv_lora_rank": 32, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "num_experts": 4,
        "num_experts_per_token": 2, "moe_intermediate_size": 32,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4], "full_attn_layers": [3], "num_heads": 3, "head_dim": 16,
        },
    },
    "granite 4 h": MAMBA | {
        "architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["mamba", "mamba", "attention", "mamba"],
        "num_local_experts": 4, "num_experts_per_tok": 2, "residual_multiplier": 0.6, "attention_multiplier": 0.3,
    },
    "nemotron-h": MAMBA | {
        "architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M-*E", "mamba_num_heads": 6,
        "mamba_head_dim": 16, "n_groups": 2, "ssm_state_size": 32, "n_routed_experts": 4, "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "falcon-h1": MAMBA | {
        "architectures": ["FalconH1ForCausalLM"], "num_hidden_layers": 2, "mamba_d_ssm": 96, "key_multiplier": 0.7,
        "ssm_multipliers": [0.9, 1.2, 0.8, 1.1, 0.7], "mlp_multipliers": [0.8, 0.6], "ssm_out_multiplier": 0.5,
    },
    "bamba": MAMBA | {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [1], "mamba_n_groups": 3},
}  # fmt: skip
HYBRID_CASES = [  # swapped and computed again in turn
    (name, isa, dtype, "recompute" if (number + place) % 2 else "swap")
    for place, name in enumerate(HYBRIDS) for number, (isa, dtype) in enumerate(CASES)
]


@pytest.fixture(scope="module")
def hybrids(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hybrids")
    return {name: write_random_folder(root / name, config) for name, config in HYBRIDS.items()}


@pytest.mark.parametrize(("name", "isa", "dtype", "mode"), HYBRID_CASES)
def test_hybrids_have_the_same_bits_in_every_way_at_once(
    hybrids: dict[str, Path], name: str, isa: str, dtype: str, mode: str
) -> None:
    stats, poison = check_all_at_once(hybrids[name], isa, dtype, mode, num_state_slots=30)
    assert stats.states["used_slots"] == stats.states["swap_used_slots"] == 0
    assert poison.num_poisoned_slots > 100


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", HYBRIDS)
def test_hybrids_cut_anywhere_have_the_bits_of_the_whole(hybrids: dict[str, Path], name: str, isa: str) -> None:
    check_every_cut(hybrids[name], isa, "bfloat16")


def test_beams_of_mamba_are_those_without_a_prefix_cache(hybrids: dict[str, Path]) -> None:
    check_beams(hybrids["nemotron-h"])


@pytest.mark.parametrize("options", [{"data_parallel_size": 2}, {"enable_sleep_mode": True}], ids=str)
@pytest.mark.usefixtures("forked_processes", "tests_frozen")
def test_engines_of_mamba_and_one_that_has_slept_have_the_bits_of_one(
    hybrids: dict[str, Path], options: dict[str, Any]
) -> None:
    prompts, params = asked()
    expected = alone(hybrids["falcon-h1"], ISAS[0], "bfloat16")
    with LLM(hybrids["falcon-h1"], dtype="bfloat16", max_model_len=160, block_size=8, **options) as llm:
        for _ in range(2):
            assert [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)] == expected
            if "enable_sleep_mode" in options:
                llm.sleep(level=1)
                llm.wake_up()


@pytest.mark.parametrize("kv_dtype", ["fp8", "int8_per_token_head"])
def test_mamba_beside_keys_and_values_in_8_bits_has_the_bits_of_requests_alone(
    hybrids: dict[str, Path], kv_dtype: str
) -> None:
    prompts, params = asked()
    settings: dict[str, Any] = {"dtype": "bfloat16", "kv_cache_dtype": kv_dtype, "max_model_len": 160}
    with LLM(hybrids["falcon-h1"], enable_prefix_caching=False, **settings) as llm:
        expected = [
            answers_of(llm.generate([prompt], own, use_tqdm=False)[0])
            for prompt, own in zip(prompts, params, strict=True)
        ]
    with LLM(hybrids["falcon-h1"], block_size=8, max_num_batched_tokens=23, num_kv_blocks=60, **settings) as llm:
        for _ in range(2):
            assert [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)] == expected


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    ("name", "num_ranks", "mode"),
    [("granite 4 h", 3, "swap"), ("nemotron-h", 2, "recompute"), ("kimi linear", 2, "swap")],
)
def test_ranks_of_hybrids_have_the_bits_of_one_in_every_way_at_once(
    hybrids: dict[str, Path], name: str, num_ranks: int, mode: str
) -> None:
    """Each of three ranks has the whole group of a Granite; of a Nemotron-H each of two has a group.

    One of two ranks has two of the three heads of a Kimi Linear, with their rows' decays.
    """
    stats, poison = check_all_at_once(
        hybrids[name], ISAS[0], "bfloat16", mode, num_state_slots=30, tensor_parallel_size=num_ranks
    )
    assert stats.states["used_slots"] == stats.states["swap_used_slots"] == 0
    assert poison.num_poisoned_slots > 100


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(("name", "num_ranks", "mode"), [("granite 4 h", 3, "recompute"), ("bamba", 4, "swap")])
def test_ranks_that_add_squares_of_a_norm_have_the_same_bits_in_every_way_at_once(
    hybrids: dict[str, Path], name: str, num_ranks: int, mode: str
) -> None:
    """Of six heads of a Granite in one group, each of three ranks has two. A Bamba's three groups have two each, of
    which four ranks have 1, 1, 2 and 2. The tokens are those of one process, logprobs near them.
    """
    settings = {"tensor_parallel_size": num_ranks, "tensor_parallel_mode": "reduce"}
    stats, poison = check_all_at_once(hybrids[name], ISAS[0], "bfloat16", mode, num_state_slots=30, **settings)
    assert stats.states["used_slots"] == stats.states["swap_used_slots"] == 0
    assert poison.num_poisoned_slots > 100
    found, expected = (alone(hybrids[name], ISAS[0], "float32", **each)[::4] for each in (settings, {}))  # greedy
    for (own,), (one,) in zip(found, expected, strict=True):
        assert own.token_ids == one.token_ids
        scores, others = ([dict(each) for each in answer.logprobs] for answer in (own, one))
        assert scores != others, "not the arithmetic of ranks that add"
        for score, other in zip(scores, others, strict=True):
            assert all(abs(float.fromhex(score[token]) - float.fromhex(other[token])) < 1e-4 for token in score)


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(("name", "isa", "num_slots"), [
    (name, ISAS[number % len(ISAS)], 3 * num_slots)
    for number, (name, num_slots) in enumerate([("granite 4 h", 12), ("kimi linear", 12), ("falcon-h1", 5)])
])  # fmt: skip
def test_prompts_that_are_computed_apart_change_no_bit(
    hybrids: dict[str, Path], name: str, isa: str, num_slots: int
) -> None:
    """With few slots states are given up on both sides: by tickets, and by loads. What does not come is computed."""
    check_apart(hybrids[name], isa, "bfloat16", 15310, num_state_slots=num_slots, max_num_seqs=num_slots // 4)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("states"), CONFIG)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_hits_drafts_preemption_chunks_and_forks_change_no_bit(model: Path, isa: str, dtype: str, mode: str) -> None:
    stats, poison = check_all_at_once(model, isa, dtype, mode, num_state_slots=30)
    assert stats.states["used_slots"] == stats.states["swap_used_slots"] == 0
    assert poison.num_poisoned_slots > 100


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(("num_ranks", "mode"), [(2, "swap"), (3, "recompute")])
def test_ranks_have_the_bits_of_one_in_every_way_at_once(model: Path, num_ranks: int, mode: str) -> None:
    """With three ranks, two have a copy of a key head, and the third both value heads of the other."""
    stats, poison = check_all_at_once(
        model, ISAS[0], "bfloat16", mode, num_state_slots=30, tensor_parallel_size=num_ranks
    )
    assert stats.states["used_slots"] == stats.states["swap_used_slots"] == 0
    assert poison.num_poisoned_slots > 100


def committed_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = States.plan
    monkeypatch.setattr(States, "plan", lambda self, entries: [
        each._replace(commit_to=max(each.committed, each.commit_to + 1)) for each in plan(self, entries)
    ])  # fmt: skip


def states_stay_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Swapper.move
    monkeypatch.setattr(Swapper, "move", lambda self, plan, slots: (plan.state_ins.clear(), move(self, plan, slots))[1])


def no_snapshots(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = States.plan
    monkeypatch.setattr(States, "plan", lambda self, entries: [e._replace(snapshots=()) for e in plan(self, entries)])


@pytest.mark.parametrize("fault", [committed_drafts, states_stay_behind, no_snapshots])
def test_faults_would_show(model: Path, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:  # noqa: ANN401
    alone(model, ISAS[0], "bfloat16")
    fault(monkeypatch)
    with pytest.raises((AssertionError, ValueError, EngineError)):  # the kernel refuses states of other tokens
        test_hits_drafts_preemption_chunks_and_forks_change_no_bit(model, ISAS[0], "bfloat16", "swap")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("isa", ISAS)
def test_every_cut_of_70_tokens_has_the_bits_of_the_whole(model: Path, isa: str, dtype: str) -> None:
    check_every_cut(model, isa, dtype)


def test_turns_of_a_chat_begin_at_the_last_block_of_the_turn_before(model: Path) -> None:
    rng, params = random.Random(8), SamplingParams(max_tokens=21, temperature=0.0, ignore_eos=True, logprobs=1)
    history = [rng.randrange(VOCAB_SIZE) for _ in range(37)]
    with LLM(model, max_model_len=256, enable_prefix_caching=False) as plain, LLM(model, max_model_len=256) as llm:
        num_known = 0
        for _ in range(3):
            (found,), (expected,) = (each.generate([history], params, use_tqdm=False) for each in (llm, plain))
            assert answers_of(found) == answers_of(expected)
            assert found.num_cached_tokens == num_known
            (again,) = llm.generate([history], params, use_tqdm=False)
            assert answers_of(again) == answers_of(expected)
            assert again.num_cached_tokens == (len(history) - 1) // 16 * 16
            num_known = (len(history) + 20) // 16 * 16
            history += [*found.outputs[0].token_ids, *(rng.randrange(VOCAB_SIZE) for _ in range(11))]


def test_beams_are_those_without_a_prefix_cache(model: Path) -> None:
    check_beams(model)


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
@pytest.mark.usefixtures("forked_processes", "tests_frozen")
def test_engines_and_one_that_has_slept_have_the_bits_of_one(model: Path) -> None:
    prompts, params = asked()
    with LLM(model, dtype="bfloat16", max_model_len=160, block_size=8, data_parallel_size=2) as llm:
        found = [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)]
    assert found == alone(model, ISAS[0], "bfloat16")
    with LLM(model, dtype="bfloat16", max_model_len=160, block_size=8, enable_sleep_mode=True) as llm:
        for _ in range(2):
            found = [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)]
            assert found == alone(model, ISAS[0], "bfloat16")
            llm.sleep(level=1)
            llm.wake_up()


def test_what_is_not_served_is_refused_by_name(model: Path) -> None:
    with pytest.raises(ConfigError, match="memory_policy 'contiguous-max' is not supported for a model that keeps"):
        LLM(model, memory_policy="contiguous-max")
    with pytest.raises(ConfigError, match="device 'cuda' is not supported for a model that keeps states"):
        check_states(EngineOptions(str(model)), "cuda")
    with LLM(model, max_model_len=64, num_state_slots=4) as llm, pytest.raises(ValueError, match="n is 4"):
        llm.generate([[1]], SamplingParams(n=4, max_tokens=2), use_tqdm=False)


def test_num_state_slots_of_a_model_without_states_is_refused(demo_model: Path) -> None:
    with pytest.raises(ConfigError, match="num_state_slots is 4, but the model keeps no states"):
        LLM(demo_model, num_state_slots=4)
