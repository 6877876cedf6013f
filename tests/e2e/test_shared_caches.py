"""A Gemma 4 with all of its parts: layers that read an earlier layer's cache, inputs by layer, experts, other heads.

No way of serving changes a bit: each answer is that of the request alone in a plain engine.
"""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, LoRARequest, SamplingParams
from quire.core.errors import ConfigError, ModelError
from quire.extension.isas import usable_isas
from quire.kernels.back_end import require
from quire.model.config import num_layer_weights, num_parameters, spec_from_config
from quire.model.kv_cache import KVGeometry, LayerKV
from quire_lab.sim.footprint import kv_bytes_per_token
from support.answers import answers_of
from support.every_way import (
    CASES,
    ISAS,
    VOCAB_SIZE,
    alone,
    asked,
    check_all_at_once,
    check_beams,
    check_disk_and_sleep,
    check_every_cut,
)
from support.peft_folders import ALL, write_adapter
from support.random_folder import write_random_folder

CONFIG: dict[str, object] = {
    "architectures": ["Gemma4ForCausalLM"], "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 96,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "head_dim": 16, "global_head_dim": 32, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
    "sliding_window": 13, "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "use_double_wide_mlp": True,
    "vocab_size_per_layer_input": VOCAB_SIZE, "enable_moe_block": True, "num_experts": 6, "top_k_experts": 2,
    "moe_intermediate_size": 32, "final_logit_softcapping": 9.0,
}  # fmt: skip
needs_kernels = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_random_folder(tmp_path_factory.mktemp("gemma4"), CONFIG)


@pytest.mark.parametrize("mode", ["swap", "recompute"])
@pytest.mark.parametrize(("isa", "dtype"), CASES)
def test_hits_drafts_preemption_chunks_and_forks_change_no_bit(model: Path, isa: str, dtype: str, mode: str) -> None:
    _, poison = check_all_at_once(model, isa, dtype, mode)
    assert poison.num_poisoned_blocks > 100


@pytest.mark.parametrize(
    "forms", [{"quantization": "int8"}, {"quantization": "int4"}, {"kv_cache_dtype": "int8_per_token_head"}], ids=str
)
def test_they_change_none_with_weights_or_a_cache_of_fewer_bits(model: Path, forms: dict[str, Any]) -> None:
    check_all_at_once(model, ISAS[0], "bfloat16", "swap", **forms)


def test_every_cut_of_70_tokens_has_the_bits_of_the_whole(model: Path) -> None:
    check_every_cut(model, ISAS[0], "bfloat16")


def test_beams_are_those_without_a_prefix_cache(model: Path) -> None:
    check_beams(model)


@needs_kernels
@pytest.mark.parametrize(
    "changes",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 4},
        {"data_parallel_size": 2},
        {"speculative_config": {"method": "draft_model", "num_speculative_tokens": 3}},
    ],
    ids=str,
)
@pytest.mark.usefixtures("forked_processes")
def test_ranks_engines_and_a_draft_model_have_the_bits_of_one(model: Path, changes: dict[str, Any]) -> None:
    if "speculative_config" in changes:
        changes = {"speculative_config": changes["speculative_config"] | {"model": str(model)}}
    prompts, params = asked()
    with LLM(model, dtype="bfloat16", max_model_len=160, block_size=8, **changes) as llm:
        found = [answers_of(each) for each in llm.generate(prompts, params, use_tqdm=False)]
    assert found == alone(model, ISAS[0], "bfloat16")


@needs_kernels
@pytest.mark.usefixtures("forked_processes")
def test_sums_over_ranks_are_close_to_one_rank(model: Path) -> None:
    prompts, params = asked()[0][:3], SamplingParams(max_tokens=4, temperature=0.0, logprobs=1)
    found = []
    for changes in ({}, {"tensor_parallel_size": 2, "tensor_parallel_mode": "reduce"}):
        with LLM(model, dtype="float32", max_model_len=160, **changes) as llm:  # type: ignore[arg-type]
            found.append([answers_of(each)[0] for each in llm.generate(prompts, params, use_tqdm=False)])
    assert [each.token_ids for each in found[0]] == [each.token_ids for each in found[1]]


@needs_kernels
@pytest.mark.usefixtures("tests_frozen")
def test_disk_tier_and_sleep_keep_the_caches_that_there_are(model: Path, tmp_path: Path) -> None:
    _, cached = check_disk_and_sleep(model, tmp_path)
    assert all(each > 0 for each in cached)


def test_adapters_change_all_of_its_modules_alone_and_beside_others(tmp_path: Path) -> None:
    model = write_random_folder(tmp_path / "model", CONFIG)
    targets = (*ALL, "per_layer_input_gate", "per_layer_projection")
    adapter = LoRARequest("all", 1, str(write_adapter(tmp_path / "adapter", model, 1, targets=targets, size=0.3)))
    prompts, params = asked()[0][:4], SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    with LLM(model, dtype="bfloat16", max_model_len=160, enable_lora=True) as llm:
        def answers(chosen: list[LoRARequest | None]) -> list[Any]:
            outputs = llm.generate(prompts, params, lora_request=chosen, use_tqdm=False)
            return [answers_of(each) for each in outputs]

        plain, all_adapted = answers([None] * 4), answers([adapter] * 4)
        assert all(a != b for a, b in zip(plain, all_adapted, strict=True))
        assert answers([adapter, None, adapter, None]) == [all_adapted[0], plain[1], all_adapted[2], plain[3]]


def test_layers_that_read_another_cache_take_no_memory() -> None:
    """Gemma 4 E2B: 15 of 35 layers have a cache, 3 of them with heads of 512; the others have heads of 256."""
    types = (["sliding_attention"] * 4 + ["full_attention"]) * 7
    sizes = {"hidden_size": 1536, "num_hidden_layers": 35, "num_attention_heads": 8, "num_key_value_heads": 1}
    config = {"architectures": ["Gemma4ForCausalLM"], "layer_types": types, "num_kv_shared_layers": 20} | sizes
    spec = spec_from_config(config)
    geometry = KVGeometry.of(spec, "bfloat16")
    assert geometry.layers.count(LayerKV(1, 512, "bfloat16")) == 3
    assert geometry.layers.count(LayerKV(1, 256, "bfloat16", window=512)) == 12
    assert geometry.bytes_per_token(16) == kv_bytes_per_token(spec, 2) == 2 * 2 * (3 * 512 + 12 * 256)


@pytest.mark.parametrize(
    ("sizes", "billions", "active"),
    [
        (
            {"hidden_size": 2816, "num_hidden_layers": 30, "num_attention_heads": 16, "num_key_value_heads": 8}
            | {"intermediate_size": 2112, "num_global_key_value_heads": 2, "enable_moe_block": True, "num_experts": 128}
            | {"top_k_experts": 8, "moe_intermediate_size": 704},
            25.2, 3.8,
        ),
        (
            {"hidden_size": 5376, "num_hidden_layers": 60, "num_attention_heads": 32, "num_key_value_heads": 16}
            | {"intermediate_size": 21_504, "num_global_key_value_heads": 4},
            30.7, 30.7,
        ),
    ],
    ids=["26B-A4B", "31B"],
)  # fmt: skip
def test_published_models_have_their_published_sizes(sizes: dict[str, Any], billions: float, active: float) -> None:
    config = {"architectures": ["Gemma4ForCausalLM"], "attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    spec = spec_from_config(config | sizes)
    num_active = num_layer_weights(spec) + spec.vocab_size * spec.hidden_size
    assert [round(each / 1e9, 1) for each in (num_parameters(spec), num_active)] == [billions, active]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_kv_shared_layers": 4}, "num_kv_shared_layers = 4: layer 1 is of the type 'full_attention', and none"),
        ({"num_kv_shared_layers": 5}, "num_kv_shared_layers must be an integer from 0 to 4, got 5"),
        ({"vocab_size_per_layer_input": 95}, "vocab_size_per_layer_input 95 must be at least vocab_size 96"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention = 'all' is not supported yet"),
        ({"top_k_experts": 7}, "top_k_experts must be an integer from 1 to 6, got 7"),
        ({"num_experts": None}, "num_experts is missing"),
        ({"per_layer_config": {"1": {"head_dim": 64}, "4": {"head_dim": 32}}}, "layer 4 has other heads than layer 1"),
        ({"head_dim": 12}, r"layers with heads of \[12, 32\] dimensions need multiples of 8, and 12 is none"),
        ({"per_layer_config": {"1": {"hidden_size": 64}}}, "per_layer_config: 1: unknown option 'hidden_size'"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "proportional", "partial_rotary_factor": 1.5}}},
            r"partial_rotary_factor must be a number up to 1, got 1\.5",
        ),
    ],
    ids=str,
)
def test_configs_that_do_not_fit_are_refused_by_key_value_and_limit(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config(CONFIG | changes)


@pytest.mark.parametrize(
    "part", ["HeadNorm", "Lookup", "Multiply", "keys and values of another layer", "experts beside a feed-forward"]
)
def test_its_parts_are_refused_on_gpus_by_name(part: str) -> None:
    with pytest.raises(ConfigError, match=f"device cuda does not support {part} yet; use --device cpu"):
        require("cuda", [part])
