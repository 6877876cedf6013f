"""Settings are refused before anything is loaded, by name, value and range."""

from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from quire.core.options import parse_bytes
from quire.engine.options import EngineOptions


@pytest.mark.parametrize(
    ("text", "size"),
    [(4096, 4096), ("4096", 4096), ("512MiB", 2**29), ("4GiB", 2**32), ("1.5 GiB", 3 * 2**29), ("2MB", 2 * 10**6)],
)
def test_bytes_are_read_with_their_units(text: int | str, size: int) -> None:
    assert parse_bytes(text, "kv_cache_memory") == size


@pytest.mark.parametrize("text", ["", "GiB", "4 parsecs", "-1", "0", 0, -5, "nan", "1e9", "9" * 400, True])
def test_what_is_no_size_is_refused_by_name(text: int | str) -> None:
    with pytest.raises(ConfigError, match="kv_cache_memory must be"):
        parse_bytes(text, "kv_cache_memory")


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("dtype", "float64"),
        ("device", "tpu"),
        ("quantization", "int3"),
        ("quantization_group_size", -2),
        ("quantization_group_size", 48),
        ("quantization_activations", "fp8"),
        ("max_model_len", 0),
        ("max_model_len", 2.5),
        ("block_size", 4),
        ("block_size", 24),
        ("block_size", 256),
        ("num_kv_blocks", 0),
        ("num_swap_blocks", -1),
        ("swap_space", "much"),
        ("swap_space", -1),
        ("swap_dir", 7),
        ("max_num_seqs", -1),
        ("max_num_seqs", 65_536),
        ("max_num_batched_tokens", True),
        ("kv_cache_memory", "lots"),
        ("preemption_mode", "never"),
        ("memory_policy", "contiguous"),
        ("batching", "dynamic"),
        ("seed", "zero"),
        ("enable_prefix_caching", "no"),
        ("exact", "yes"),
        ("max_logprobs", -2),
        ("scheduling_policy", "lifo"),
        ("max_kv_share_per_key", 0),
        ("max_kv_share_per_key", 1.5),
        ("max_kv_share_per_key", True),
    ],
)
def test_bad_setting_is_refused_by_name(setting: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"{setting} must be .*got {value!r}"):
        EngineOptions(**{setting: value})  # type: ignore[arg-type]


def test_revision_of_a_tokenizer_needs_one() -> None:
    assert EngineOptions("owner/name", revision="v2", tokenizer_revision="v2").tokenizer_revision == "v2"
    assert EngineOptions("owner/name", tokenizer="owner/other", tokenizer_revision="v2").revision is None
    with pytest.raises(ConfigError, match="tokenizer_revision 'v2' needs a tokenizer"):
        EngineOptions("owner/name", tokenizer_revision="v2")


def test_executor_of_one_process_takes_no_ranks() -> None:
    assert EngineOptions(distributed_executor_backend="uni").tensor_parallel_size == 1
    with pytest.raises(ConfigError, match="'uni' is one process: tensor_parallel_size must be 1, got 2"):
        EngineOptions(distributed_executor_backend="uni", tensor_parallel_size=2)


@pytest.mark.parametrize("share", [0, 1.01, True, "0.9", float("nan")])
def test_share_of_a_gpu_is_checked(share: object) -> None:
    with pytest.raises(ConfigError, match="gpu_memory_utilization must be a number above 0, at most 1, got"):
        EngineOptions(gpu_memory_utilization=share)  # type: ignore[arg-type]


def test_swapping_on_a_gpu_needs_no_size() -> None:
    assert EngineOptions(preemption_mode="swap", device="cuda").swap_space is None
    with pytest.raises(ConfigError, match="needs a swap space"):
        EngineOptions(preemption_mode="swap", device="cuda", swap_space=0)


@pytest.mark.parametrize("sizes", [{}, {"swap_space": 0}, {"swap_space": "4GiB", "num_swap_blocks": 0}], ids=str)
def test_swapping_without_swap_space_is_refused(sizes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="preemption_mode 'swap' needs a swap space; set swap_space or"):
        EngineOptions(preemption_mode="swap", **sizes)
    assert EngineOptions(preemption_mode="auto", **sizes).preemption_mode == "auto"


def test_policies_that_do_not_go_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="batching 'static' needs memory_policy 'contiguous-max', got 'paged'"):
        EngineOptions(batching="static")
    with pytest.raises(ConfigError, match="memory_policy 'contiguous-pow2' does not swap; leave swap_space out"):
        EngineOptions(memory_policy="contiguous-pow2", swap_space="1GiB")


@pytest.mark.parametrize("sizes", [{"swap_space": "1GiB"}, {"num_swap_blocks": 1}], ids=str)
def test_swapping_takes_a_swap_space_of_any_size(sizes: dict[str, Any]) -> None:
    assert EngineOptions(preemption_mode="swap", **sizes).preemption_mode == "swap"


def test_kv_share_needs_pages() -> None:
    with pytest.raises(ConfigError, match=r"max_kv_share_per_key 0.5 needs memory_policy 'paged'"):
        EngineOptions(max_kv_share_per_key=0.5, memory_policy="contiguous-max")


def test_answers_of_a_cpu_are_always_exact() -> None:
    with LLM(device="cpu", exact=True, num_kv_blocks=8) as llm:
        assert llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)
    with pytest.raises(ConfigError, match="exact False is not supported on device cpu"):
        LLM(device="cpu", exact=False, num_kv_blocks=8)


@pytest.mark.parametrize("name", ["triton", "cuda", "flashinfer"])
def test_attention_of_a_gpu_is_refused_on_a_cpu(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend '{name}' is not supported on device cpu"):
        LLM(device="cpu", attention_backend=name)
    with pytest.raises(ConfigError, match="attention_backend must be one of"):
        LLM(device="cpu", attention_backend="flash")


def test_graphs_are_refused_on_a_cpu() -> None:
    with pytest.raises(ConfigError, match="capture_graphs True is not supported on device cpu"):
        LLM(device="cpu", capture_graphs=True)


def test_graphs_are_captured_at_start_by_default() -> None:
    found = [EngineOptions(capture_graphs=asked).captures_at_start for asked in (None, True, False)]
    assert found == [True, True, False]
