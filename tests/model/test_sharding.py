"""Sharding: heads, outputs and vocabulary of each rank."""

from dataclasses import replace

import pytest

from quire.core.errors import ConfigError
from quire.model.config import spec_from_config
from quire.model.shapes import LinearShape
from quire.model.sharding import Shard, check_shardable, head_ranges, shifted
from quire.model.spec import DecoderSpec, DeltaNet, Mamba, Part

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "vocab_size": 301, "hidden_size": 896, "intermediate_size": 4864,
    "num_hidden_layers": 1, "num_attention_heads": 14, "num_key_value_heads": 2, "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}  # fmt: skip


def spec_of(num_heads: int, num_kv_heads: int) -> DecoderSpec:
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    return spec_from_config(CONFIG | heads | {"hidden_size": num_heads * 64, "head_dim": 64})


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "num_ranks", "expected"),
    [
        (14, 2, 2, [((0, 7), (0, 1)), ((7, 14), (1, 2))]),
        (14, 2, 3, [((0, 4), (0, 1)), ((4, 7), (0, 1)), ((7, 14), (1, 2))]),
        (14, 2, 4, [((0, 4), (0, 1)), ((4, 7), (0, 1)), ((7, 11), (1, 2)), ((11, 14), (1, 2))]),
        (9, 3, 2, [((0, 6), (0, 2)), ((6, 9), (2, 3))]),
        (5, 1, 2, [((0, 3), (0, 1)), ((3, 5), (0, 1))]),
        (3, 3, 2, [((0, 2), (0, 2)), ((2, 3), (2, 3))]),
    ],
)
def test_a_rank_has_whole_groups_or_a_part_of_one(
    num_heads: int, num_kv_heads: int, num_ranks: int, expected: list[object]
) -> None:
    assert head_ranges(spec_of(num_heads, num_kv_heads).attentions[0], num_ranks) == expected


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 6, 12])
@pytest.mark.parametrize("num_ranks", range(1, 13))
def test_every_head_is_on_one_rank_beside_its_kv_head(num_kv_heads: int, num_ranks: int) -> None:
    ranges = head_ranges(spec_of(12, num_kv_heads).attentions[0], num_ranks)
    assert [head for heads in ranges for head in range(*heads.query)] == list(range(12))
    group = 12 // num_kv_heads
    for heads in ranges:
        assert {head // group for head in range(*heads.query)} == set(range(*heads.kv))
        assert heads.num_heads % heads.num_kv_heads == 0


NET = DeltaNet(num_key_heads=4, num_value_heads=8, key_dim=16, value_dim=32, taps=4)


@pytest.mark.parametrize(
    ("num_ranks", "is_tiled", "expected"),
    [
        (2, False, [((0, 4), (0, 2)), ((4, 8), (2, 4))]),
        (3, False, [((0, 4), (0, 2)), ((4, 6), (2, 3)), ((6, 8), (3, 4))]),
        (2, True, [((0, 4), (0, 4)), ((4, 8), (0, 4))]),
        (4, True, [((0, 2), (0, 2)), ((2, 4), (2, 4)), ((4, 6), (0, 2)), ((6, 8), (2, 4))]),
    ],
)
def test_a_rank_has_value_heads_beside_their_key_heads(num_ranks: int, is_tiled: bool, expected: list[object]) -> None:
    net = replace(NET, is_tiled=is_tiled)
    assert head_ranges(net, num_ranks) == expected
    group = net.num_value_heads // net.num_key_heads
    for rank, (values, keys) in enumerate(head_ranges(net, num_ranks)):
        own = Shard(rank, num_ranks).local_net(net)
        for place, head in enumerate(range(*values)):
            read = place % own.num_key_heads if is_tiled else place // (own.num_value_heads // own.num_key_heads)
            assert keys[0] + read == (head % net.num_key_heads if is_tiled else head // group)


@pytest.mark.parametrize(
    ("has_norm", "num_groups", "num_ranks", "expected"),
    [
        (True, 2, 2, [((0, 4), (0, 1)), ((4, 8), (1, 2))]),
        (False, 2, 3, [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 8), (1, 2))]),
        (False, 1, 3, [((0, 3), (0, 1)), ((3, 6), (0, 1)), ((6, 8), (0, 1))]),
    ],
)
def test_a_rank_has_heads_of_mamba_beside_their_group(
    has_norm: bool, num_groups: int, num_ranks: int, expected: list[object]
) -> None:
    mamba = Mamba(num_groups, num_heads=8, state_dim=32, head_dim=16, taps=4, has_norm=has_norm)
    assert head_ranges(mamba, num_ranks) == expected
    ranks = [Shard(rank, num_ranks) for rank in range(num_ranks)]
    for shard, (heads, groups) in zip(ranks, head_ranges(mamba, num_ranks), strict=True):
        own = shard.local_mamba(mamba)
        assert [stop - start for start, stop in shard.mamba_ranges(mamba)] == list(own.sections)
        assert (own.num_heads, own.num_groups) == (heads[1] - heads[0], groups[1] - groups[0])
    with pytest.raises(ConfigError, match="9 is above the model's 8 heads of Mamba-2"):
        head_ranges(replace(mamba, has_norm=False), 9)


def test_a_rank_has_all_heads_of_mamba_where_ranks_would_divide_a_group_that_is_normed() -> None:
    mamba = Mamba(num_groups=2, num_heads=8, state_dim=32, head_dim=16, taps=4)
    assert head_ranges(mamba, 3) == [((0, 8), (0, 2))] * 3
    rows = [Shard(rank, 3).mamba_ranges(mamba) for rank in range(3)]
    assert [shifted(each, mamba.sections) for each in rows] == [
        [(0, 128), (128, 144), (256, 256), (320, 320), (384, 384)],
        [(128, 128), (144, 256), (256, 272), (320, 320), (384, 384)],
        [(128, 128), (256, 256), (272, 320), (320, 384), (384, 392)],
    ]
    assert Shard(0, 3).local_mamba(mamba) == mamba


def test_ranks_that_add_divide_the_heads_of_a_group_of_mamba_that_is_normed() -> None:
    mamba = Mamba(num_groups=2, num_heads=8, state_dim=32, head_dim=16, taps=4)
    assert head_ranges(mamba, 3, "reduce") == [((0, 2), (0, 1)), ((2, 4), (0, 1)), ((4, 8), (1, 2))]
    ranks = [Shard(rank, 3, "reduce") for rank in range(3)]
    assert [shard.local_mamba(mamba).num_heads for shard in ranks] == [2, 2, 4]
    assert [shard.mixed_cut(mamba).of(shard.rank) for shard in ranks] == [(0, 32), (32, 64), (64, 128)]
    spec = spec_of(14, 2).with_layers(lambda layer: replace(layer, beside=mamba))
    check_shardable(spec, 8, "reduce")
    with pytest.raises(ConfigError, match="tensor_parallel_size 9 is above the model's 8 heads of Mamba-2"):
        check_shardable(spec, 9, "reduce")


def test_adapters_add_to_all_outputs_of_layers_that_ranks_have_whole() -> None:
    shape, layer = LinearShape(("gate",), (48,), 896), spec_of(14, 2).layers[0]
    for op in ("layer_gate", "layer_out", "latent_in", "latent_out"):
        assert Shard(1, 2, "reduce").adapted_ranges(layer, op, shape) == [(0, 48)]
        assert Shard(1, 2, "gather").adapted_ranges(layer, op, shape) == [(32, 48)]


def test_outputs_are_cut_at_strips_as_evenly_as_they_can_be() -> None:
    assert Shard(0, 2).cut(896).bounds == (0, 448, 896)
    assert Shard(0, 3).cut(4864).bounds == (0, 1632, 3248, 4864)
    assert Shard(1, 2).cut(301).of(1) == (160, 301)
    assert Shard(0, 4).cut(30).bounds == (0, 8, 16, 24, 30)  # too few for strips


def test_cut_that_leaves_a_rank_without_a_part_is_refused() -> None:
    assert Shard(0, 3).cut(33, 16).bounds == (0, 16, 32, 33)
    with pytest.raises(ConfigError, match="32 columns cut at multiples of 16 are not enough for 3 ranks"):
        Shard(0, 3).cut(32, 16)


def test_rows_of_fused_modules_are_counted_from_the_first() -> None:
    shard, attention = Shard(1, 2), spec_of(14, 2).attentions[0]
    ranges = shard.qkv_ranges(attention)
    assert ranges == ((448, 896), (64, 128), (64, 128))
    assert shifted(ranges, (896, 128, 128)) == [(448, 896), (960, 1024), (1088, 1152)]


def test_models_that_cannot_be_split_are_refused() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel_size 15 is above the model's 14 attention heads"):
        check_shardable(spec_of(14, 2), 15)
    narrow = spec_from_config(CONFIG | {"vocab_size": 3})
    with pytest.raises(ConfigError, match="tensor_parallel_size 4 is above the 3 outputs of a layer"):
        check_shardable(narrow, 4)
    part = Part("experts", "down", lambda reader, name: None)
    with pytest.raises(ConfigError, match="layers with the part 'experts' are not supported yet"):
        check_shardable(spec_of(14, 2).with_layers(lambda layer: replace(layer, parts=(part,))), 2)
    with pytest.raises(ConfigError, match="9 is above the model's 8 value heads of gated delta nets"):
        head_ranges(NET, 9)
    with pytest.raises(ConfigError, match=r"3: 8 value heads over 4 key heads .* GGUF file, do not divide among"):
        head_ranges(replace(NET, is_tiled=True), 3)
    check_shardable(spec_of(14, 2), 14)
