"""Numbers of blocks and the longest sequence, by options, model and free memory."""

from dataclasses import replace
from typing import Any

import pytest

from quire.core.config import batched_tokens_of_card
from quire.core.errors import ConfigError
from quire.core.host_limits import free_memory_bytes
from quire.engine.options import EngineOptions
from quire.engine.sizing import ModelLimits, size_engine, table_positions

GIB = 2**30
LLAMA_8B = ModelLimits(max_position_embeddings=8192, kv_bytes_per_token=128 * 1024, sliding_window=None)


@pytest.mark.parametrize(
    ("gib", "name", "tokens"),
    [
        (24, "NVIDIA GeForce RTX 4090", 2048), (44.4, "NVIDIA L40S", 2048), (79.3, "NVIDIA A100-SXM4-80GB", 2048),
        (69.9, "a card", 2048), (70, "a card", 8192), (79.1, "NVIDIA H100 80GB HBM3", 8192),
        (139.8, "NVIDIA H200", 8192), (178.4, "NVIDIA B200", 8192),
    ],
)  # fmt: skip
def test_card_sets_the_token_budget_unless_it_is_set(gib: float, name: str, tokens: int) -> None:
    default = batched_tokens_of_card(gib * GIB, name)
    assert default == tokens
    for asked, found in ((None, tokens), (512, 512)):
        options = EngineOptions(max_num_batched_tokens=asked)
        _, scheduler = size_engine(options, LLAMA_8B, 10 * GIB, default_batched_tokens=default)
        assert scheduler.max_num_batched_tokens == found


def test_blocks_take_forty_percent_of_the_free_memory() -> None:
    cache, scheduler = size_engine(EngineOptions(), LLAMA_8B, free_bytes=10 * GIB)
    assert cache.num_blocks == 4 * GIB // (16 * 128 * 1024)
    assert scheduler.max_model_len == 8192


def test_blocks_never_exceed_what_all_sequences_can_use() -> None:
    cache, _ = size_engine(EngineOptions(max_num_seqs=2, max_model_len=100), LLAMA_8B, free_bytes=100 * GIB)
    assert cache.num_blocks == 2 * 7


def test_memory_that_no_sequence_can_use_is_told(caplog: pytest.LogCaptureFixture) -> None:
    options = EngineOptions(max_num_seqs=2, max_model_len=100, kv_cache_memory="1TiB")
    with caplog.at_level("INFO", logger="quire.engine.sizing"):
        size_engine(options, LLAMA_8B, free_bytes=100 * GIB)
    assert caplog.messages == [
        f"of kv_cache_memory 1TiB the KV cache takes {14 * 2**21} bytes: 2 sequences (max_num_seqs) of 100 tokens use "
        "no more"
    ]


def test_number_of_blocks_wins_over_memory() -> None:
    cache, _ = size_engine(EngineOptions(num_kv_blocks=77, kv_cache_memory="1GiB"), LLAMA_8B, free_bytes=GIB)
    assert cache.num_blocks == 77


def test_longest_sequence_is_cut_to_what_the_cache_holds() -> None:
    cache, scheduler = size_engine(EngineOptions(kv_cache_memory="512MiB"), LLAMA_8B, free_bytes=GIB)
    assert cache.num_blocks * 16 == scheduler.max_model_len == 4096


def test_length_asked_for_that_the_cache_cannot_hold_is_refused_with_the_nearest_that_works() -> None:
    told = r"max_model_len is 5000.*holds 4096 tokens.*lower max_model_len to 4096.*313 blocks"
    with pytest.raises(ConfigError, match=told):
        size_engine(EngineOptions(kv_cache_memory="512MiB", max_model_len=5000), LLAMA_8B, free_bytes=GIB)


def test_longest_sequence_is_cut_to_the_longest_chunk_where_memory_is_contiguous() -> None:
    options = EngineOptions(num_kv_blocks=100, memory_policy="contiguous-pow2")
    cache, scheduler = size_engine(options, LLAMA_8B, free_bytes=GIB)
    assert (cache.memory_policy, scheduler.max_model_len) == ("contiguous-pow2", 64 * 16)


def test_length_beyond_the_model_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 9000.*8192 positions"):
        size_engine(EngineOptions(max_model_len=9000), LLAMA_8B, free_bytes=100 * GIB)


@pytest.mark.parametrize(
    ("asked", "positions"),
    [({}, 4096), ({"max_model_len": 8000}, 8000), ({"num_kv_blocks": 3}, 48), ({"kv_cache_memory": "1TiB"}, 2**22)],
    ids=str,
)
def test_tables_are_as_long_as_sequences_can_be(asked: dict[str, Any], positions: int) -> None:
    limits = ModelLimits(2**22, 128 * 1024, None, table_bytes_per_position=512)
    assert table_positions(EngineOptions(**asked), limits, GIB, share=0.5) == positions


def test_length_whose_tables_exceed_the_free_memory_is_refused() -> None:
    limits = ModelLimits(2**22, 128 * 1024, None, table_bytes_per_position=512)
    with pytest.raises(ConfigError, match=r"max_model_len is 4194304, .* take 2147483648 bytes, .* at most 2097152"):
        table_positions(EngineOptions(max_model_len=2**22), limits, GIB)
    with pytest.raises(ConfigError, match=r"max_model_len is 4194305.*4194304 positions"):
        table_positions(EngineOptions(max_model_len=2**22 + 1), limits, GIB)


def test_length_that_changes_short_answers_has_to_be_asked_for() -> None:
    limits = ModelLimits(8192, 1024, None, default_positions=4096)
    assert size_engine(EngineOptions(), limits, GIB)[1].max_model_len == 4096
    assert size_engine(EngineOptions(max_model_len=8192), limits, GIB)[1].max_model_len == 8192


def test_memory_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"holds no KV block; one block of 16 tokens takes 2097152 bytes"):
        size_engine(EngineOptions(kv_cache_memory="1MiB"), LLAMA_8B, free_bytes=GIB)


@pytest.mark.parametrize("asked", [{"num_kv_blocks": 10**13}, {"kv_cache_memory": "2GiB"}], ids=str)
def test_cache_beyond_the_free_memory_is_refused(asked: dict[str, int | str]) -> None:
    with pytest.raises(ConfigError, match=r"bytes, but 1073741824 are free; lower num_kv_blocks to at most 512 or"):
        size_engine(EngineOptions(**asked), LLAMA_8B, free_bytes=GIB)  # type: ignore[arg-type]


def test_sliding_window_reaches_the_cache() -> None:
    limits = ModelLimits(8192, 1024, sliding_window=4096)
    assert size_engine(EngineOptions(), limits, free_bytes=GIB)[0].sliding_window == 4096


def test_free_memory_is_read_from_the_system() -> None:
    assert 2**20 < free_memory_bytes() < 2**50


@pytest.mark.parametrize("enabled", [True, False])
def test_prefix_caching_is_as_asked_for(enabled: bool) -> None:
    cache, _ = size_engine(EngineOptions(enable_prefix_caching=enabled), LLAMA_8B, free_bytes=10 * GIB)
    assert cache.enable_prefix_caching is enabled


@pytest.mark.parametrize(
    ("asked", "num_blocks"),
    [({}, 0), ({"swap_space": 0}, 0), ({"swap_space": "1GiB"}, 512), ({"swap_space": "1GiB", "num_swap_blocks": 7}, 7)],
    ids=str,
)
def test_swap_space_is_as_asked_for(asked: dict[str, Any], num_blocks: int) -> None:
    cache, scheduler = size_engine(EngineOptions(preemption_mode="recompute", **asked), LLAMA_8B, free_bytes=10 * GIB)
    assert cache.num_swap_blocks == num_blocks
    assert scheduler.preemption_mode == "recompute"


def test_swap_space_nobody_asked_for_is_no_larger_than_all_sequences_can_use() -> None:
    sizes = [EngineOptions(max_num_seqs=2, max_model_len=100), EngineOptions()]
    caches = [size_engine(each, LLAMA_8B, 10 * GIB, default_swap_bytes=GIB)[0] for each in sizes]
    assert [cache.num_swap_blocks for cache in caches] == [2 * 7, 512]


def test_gpus_of_a_machine_divide_its_swap_space() -> None:
    shared = replace(LLAMA_8B, num_swap_shares=4)
    asked, _ = size_engine(EngineOptions(swap_space="1GiB"), shared, 10 * GIB, default_swap_bytes=2 * GIB)
    default, _ = size_engine(EngineOptions(), shared, 10 * GIB, default_swap_bytes=2 * GIB)
    exact, _ = size_engine(EngineOptions(num_swap_blocks=7), shared, 10 * GIB, default_swap_bytes=2 * GIB)
    assert [each.num_swap_blocks for each in (asked, default, exact)] == [128, 256, 7]
    with pytest.raises(ConfigError, match=r"swap_space of 1048576 bytes holds no KV block"):  # bytes of each
        size_engine(EngineOptions(swap_space="4MiB"), shared, 10 * GIB)


def test_swap_space_for_less_than_a_block_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"swap_space of 1048576 bytes holds no KV block; one block of 16 .* 2097152"):
        size_engine(EngineOptions(swap_space="1MiB"), LLAMA_8B, free_bytes=GIB)


def test_each_engine_of_a_machine_has_scratch_memory_of_its_own() -> None:
    free_bytes, options = 1 << 30, EngineOptions(data_parallel_size=4, max_num_seqs=1024)
    scratch_bytes = 100 << 20
    limits = ModelLimits(4096, 1024, None, scratch_bytes=scratch_bytes)
    cache, _ = size_engine(options, limits, free_bytes)
    assert cache.num_blocks == int((free_bytes - 4 * scratch_bytes) * 0.4) // 4 // (16 * 1024)
    with pytest.raises(ConfigError, match=f"but {free_bytes - scratch_bytes} are free"):  # one engine's own blocks
        size_engine(EngineOptions(data_parallel_size=4, num_kv_blocks=4 << 16), limits, free_bytes)


def test_memory_of_the_machine_is_divided_among_its_engines() -> None:
    limits = ModelLimits(4096, 1024, None)
    sizes = {"kv_cache_memory": 64 << 20, "swap_space": 32 << 20}
    alone, _ = size_engine(EngineOptions(**sizes), limits, 1 << 30)
    divided, _ = size_engine(EngineOptions(**sizes, data_parallel_size=4), limits, 1 << 30)
    assert (divided.num_blocks, divided.num_swap_blocks) == (alone.num_blocks // 4, alone.num_swap_blocks // 4)
    by_default, _ = size_engine(EngineOptions(data_parallel_size=4, max_num_seqs=1024), limits, 1 << 30)
    assert by_default.num_blocks == int((1 << 30) * 0.4) // 4 // (16 * 1024)
    exact, _ = size_engine(EngineOptions(num_kv_blocks=10, num_swap_blocks=7, data_parallel_size=4), limits, 1 << 30)
    assert (exact.num_blocks, exact.num_swap_blocks) == (2, 1)
    with pytest.raises(ConfigError, match=r"num_kv_blocks is 3, but each of 4 engines \(data_parallel_size\) needs"):
        size_engine(EngineOptions(num_kv_blocks=3, data_parallel_size=4), limits, 1 << 30)


def test_slots_beyond_the_memory_are_refused_with_values_that_work() -> None:
    """Beside 512 slots of 64 MiB, which kv_cache_memory had room for, and beside slots that are set."""
    hybrid, blocks = replace(LLAMA_8B, slot_bytes=64 << 20), {"num_kv_blocks": 100}
    with pytest.raises(ConfigError, match=rf"kv_cache_memory to at most {10 * GIB}, or leave both"):
        size_engine(EngineOptions(kv_cache_memory="1TiB"), hybrid, free_bytes=10 * GIB)
    cache, _ = size_engine(EngineOptions(kv_cache_memory=str(10 * GIB)), hybrid, free_bytes=10 * GIB)
    assert cache.num_state_slots == 80
    with pytest.raises(ConfigError, match=r"num_state_slots is 999, but slots of 67108864 bytes .* to at most 159$"):
        size_engine(EngineOptions(num_state_slots=999, **blocks), hybrid, free_bytes=10 * GIB)
    with pytest.raises(ConfigError, match="lower num_kv_blocks to at most 32"):
        size_engine(EngineOptions(num_state_slots=159, **blocks), hybrid, free_bytes=10 * GIB)
    cache, _ = size_engine(EngineOptions(num_state_slots=159, num_kv_blocks=32), hybrid, free_bytes=10 * GIB)
    assert (cache.num_state_slots, cache.num_blocks) == (159, 32)


def test_one_sequence_alone_has_slots_for_snapshots() -> None:
    hybrid = replace(LLAMA_8B, slot_bytes=64 << 20)
    for memory, num_slots in (("4GiB", 8), ("640MiB", 5)):
        cache, _ = size_engine(EngineOptions(max_num_seqs=1, kv_cache_memory=memory), hybrid, free_bytes=10 * GIB)
        assert cache.num_state_slots == num_slots


@pytest.mark.parametrize(
    ("settings", "num_blocks", "num_slots"),
    [
        ({"num_swap_blocks": 320}, 320, 10), ({"num_swap_blocks": 32 * 64, "max_num_seqs": 7}, 32 * 64, 7),
        ({"num_swap_blocks": 31}, 31, 0), ({"num_swap_blocks": 0}, 0, 0),
        ({"num_swap_blocks": 640, "data_parallel_size": 2}, 320, 10),
        ({"swap_space": "1GiB"}, 256, 8), ({"swap_space": "100MiB"}, 50, 0), ({"swap_space": 0}, 0, 0),
    ],
)
def test_swapped_states_take_no_more_bytes_than_swapped_blocks(
    settings: dict[str, Any], num_blocks: int, num_slots: int
) -> None:
    """Slots of 64 MiB beside blocks of 2 MiB."""
    hybrid = replace(LLAMA_8B, slot_bytes=64 << 20)
    cache, _ = size_engine(EngineOptions(kv_cache_memory="2GiB", **settings), hybrid, free_bytes=10 * GIB)
    assert (cache.num_swap_blocks, cache.num_swap_slots) == (num_blocks, num_slots)
    if num_blocks and not num_slots:
        options = EngineOptions(kv_cache_memory="2GiB", preemption_mode="swap", **settings)
        with pytest.raises(ConfigError, match=r"needs room for a state of 67108864 bytes, but .* at least 2 times as"):
            size_engine(options, hybrid, free_bytes=10 * GIB)
