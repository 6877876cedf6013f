"""Paged attention in C++ against the reference, and to the bit against itself under other layouts of the same step."""

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from quire.core.config import KERNEL_BLOCK_SIZES
from quire.kernels.paged_attention import build_metadata
from quire.kernels.reference.back_ends import REFERENCE, TORCH
from support.cpp_kernels import cache_shapes, kernel_dtype, paged_attention
from support.packed_cache import CPP, pack, unpack
from support.paged_cache import Paging, Part, Tokens, attend, plain_spec
from support.pairwise import covering
from support.threads import set_num_threads

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
EXACT_DTYPES = [torch.float32, torch.bfloat16]  # float16 is float32 between two conversions
HEADS = [(4, 4, 8), (4, 2, 24), (14, 2, 64), (8, 1, 80), (40, 2, 64), (8, 2, 128)]  # groups of 1, 2, 7, 8, 20 and 4
WIDE_GROUPS = [(33, 1, 8), (48, 1, 16), (64, 1, 8), (142, 2, 64), (128, 1, 8), (300, 1, 8)]
LENGTH = 600  # more than two partitions of 256 tokens


def in_chunks(
    tokens: Tokens, chunk: int, window: int | None = None, begin: int = 0, end: int = LENGTH
) -> Tensor:
    """Compute a sequence's positions from `begin` to `end`, `chunk` tokens per step, nothing beside it."""
    parts = [Part(tokens, start, min(start + chunk, end)) for start in range(begin, end, chunk)]
    return torch.cat([attend([part], None, window, CPP)[0] for part in parts])


SPANS = {
    "one token": [(0, 1)], "full block": [(0, 16)], "partition border": [(255, 256), (256, 257)],
    "ragged": [(16, 17), (0, 3), (0, 250), (249, 250)], "chunks": [(5, 70), (31, 33)],
}  # fmt: skip


@covering({"spans": list(SPANS), "window": [None, 1, 50], "heads": HEADS, ("dtype", "tol"): DTYPES})
def test_kernel_matches_reference(
    spans: str, window: int | None, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    parts = [
        Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(SPANS[spans])
    ]
    expected = attend(parts, window=window, back_end=REFERENCE)
    for result, wanted in zip(attend(parts, window=window, back_end=CPP), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)


@covering({"softcap": [0.3, 50.0], "heads": [(4, 2, 24), (14, 2, 64)], ("dtype", "tol"): DTYPES})
def test_capped_scores_match_the_reference(
    softcap: float, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    spans = [(0, 250), (255, 256), (16, 20)]
    parts = [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]
    expected, uncapped = (attend(parts, back_end=REFERENCE, softcap=cap) for cap in (softcap, 0.0))
    for back_end in (CPP, TORCH):
        for found, wanted in zip(attend(parts, back_end=back_end, softcap=softcap), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=tol, atol=tol)
    if softcap < 1:
        assert not torch.allclose(expected[0], uncapped[0], rtol=tol, atol=tol)


def random_sinks(num_heads: int) -> Tensor:
    """Return scores from far below to far above those of keys, two of them at the ends of what floats hold."""
    sinks = torch.randn(num_heads, generator=torch.Generator().manual_seed(3)) * 4
    sinks[0], sinks[-1] = -3e38, 3e38
    return sinks


@covering(
    {
        ("window", "softcap"): [(None, 0.0), (50, 0.0), (None, 2.0)],
        "heads": [(4, 2, 24), (40, 1, 16)],
        ("dtype", "tol"): DTYPES[:2],
    },
)
def test_sinks_match_the_reference(
    window: int | None, softcap: float, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    spans = [(0, 250), (255, 256), (16, 20), (0, 1), (500, 540)]
    parts = [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]
    sinks = random_sinks(heads[0])
    expected = attend(parts, window=window, back_end=REFERENCE, softcap=softcap, sinks=sinks)
    for back_end in (CPP, TORCH):
        found = attend(parts, window=window, back_end=back_end, softcap=softcap, sinks=sinks)
        for result, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)
            assert not result[:, -1].any(), "the largest sink leaves nothing for values"
    unsunk = attend(parts, window=window, back_end=REFERENCE, softcap=softcap)
    torch.testing.assert_close(expected[0][:, 0], unsunk[0][:, 0], rtol=tol, atol=tol)
    assert not torch.allclose(expected[0], unsunk[0], rtol=tol, atol=tol)


@covering({"window": [None, 1, 50], "heads": [(4, 4, 8), (14, 2, 64)], ("dtype", "tol"): DTYPES[:2]})
def test_attention_in_both_directions_matches_the_reference_and_has_the_bits_of_texts_alone(
    window: int | None, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    spans = [(0, 1), (0, 31), (0, 257), (0, 600), (20, 40)]
    parts = [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]
    expected = attend(parts, window=window, back_end=REFERENCE, is_causal=False)
    for back_end in (CPP, TORCH):
        found = attend(parts, window=window, back_end=back_end, is_causal=False)
        for part, result, wanted in zip(parts, found, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)
            assert torch.equal(attend([part], window=window, back_end=back_end, is_causal=False)[0], result)


RUNS = ((5, 261), (262, 300), (300, 520), (599, 600))  # across partitions, and side by side


@covering({"window": [None, 1, 50], "heads": [(4, 4, 8), (14, 2, 64)], ("dtype", "tol"): DTYPES[:2]})
def test_runs_that_see_each_other_match_the_reference_and_have_the_bits_of_one_step(
    window: int | None, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    tokens, other = (Tokens.random(LENGTH, heads, dtype, seed) for seed in (0, 1))
    (expected,) = attend([Part(tokens, 0, LENGTH, RUNS)], window=window, back_end=REFERENCE)
    plain = attend([Part(other, 0, 40)], window=window, back_end=CPP)[0]
    for back_end in (CPP, TORCH):
        whole = attend([Part(tokens, 0, LENGTH, RUNS)], window=window, back_end=back_end)[0]
        torch.testing.assert_close(whole, expected, rtol=tol, atol=tol)
        chunks = [(0, 5), (5, 261), (261, 300), (300, 530), (530, LENGTH)]
        beside = [[Part(other, 0, 40), Part(tokens, *chunk, RUNS)] for chunk in chunks]
        found = [attend(parts, window=window, back_end=back_end) for parts in beside]
        assert torch.equal(torch.cat([each[1] for each in found]), whole)
        if back_end is CPP:
            assert all(torch.equal(each[0], plain) for each in found)
        (rest,) = attend([Part(tokens, 100, 261, RUNS)], window=window, back_end=back_end)  # behind a prefix hit
        assert torch.equal(rest, whole[100:261])


@covering({"name": ["cpp", "torch"], "dtype": EXACT_DTYPES, "num_threads": [1, 2]}, indirect=["num_threads"])
def test_sinks_keep_the_bits_of_rows_alone_chunked_and_among_others(
    name: str, dtype: torch.dtype, num_threads: int
) -> None:
    back_end, sinks = {"cpp": CPP, "torch": TORCH}[name], random_sinks(14)
    tokens, other = Tokens.random(LENGTH, (14, 2, 64), dtype), Tokens.random(LENGTH, (14, 2, 64), dtype, seed=1)
    whole = attend([Part(tokens, 0, LENGTH)], back_end=back_end, sinks=sinks)[0]
    chunks = [(0, 7), (7, 255), (255, 256), (256, 599), (599, 600)]
    together = [[Part(other, 3, 40), Part(tokens, *chunk)] for chunk in chunks]
    chunked = [attend(parts, back_end=back_end, sinks=sinks)[1] for parts in together]
    assert torch.equal(torch.cat(chunked), whole)
    assert torch.equal(attend([Part(tokens, 599, 600)], back_end=back_end, sinks=sinks)[0], whole[599:])


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_long_context_with_sinks_is_shared_by_threads_and_keeps_its_bits(dtype: torch.dtype, num_threads: int) -> None:
    sinks, tokens = random_sinks(14), Tokens.random(5000, (14, 2, 64), dtype)
    part = Part(tokens, 4999, 5000)
    parts = [Part(tokens, 0, 300), part, Part(tokens, 700, 1000)]
    beside_others = attend(parts, back_end=CPP, sinks=sinks)[1]
    assert torch.equal(attend([part], back_end=CPP, sinks=sinks)[0], beside_others)
    expected = attend([part], back_end=REFERENCE, sinks=sinks)[0]
    tol = dict(DTYPES)[dtype]
    torch.testing.assert_close(beside_others, expected, rtol=tol, atol=tol)


@covering(
    {
        "spans": [[(0, 1)], [(599, 600)], [(0, 40)], [(255, 256), (0, 7), (300, 310)]], "heads": WIDE_GROUPS,
        ("dtype", "tol"): DTYPES[:2], "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)  # fmt: skip
def test_groups_wider_than_a_block_of_rows_match_the_reference(
    spans: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype, tol: float, num_threads: int
) -> None:
    parts = [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]
    together = attend(parts, back_end=CPP)
    for result, wanted in zip(together, attend(parts, back_end=REFERENCE), strict=True):
        torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)
    set_num_threads(1)
    assert all(torch.equal(attend([part], back_end=CPP)[0], bits) for part, bits in zip(parts, together, strict=True))


@covering({"heads": HEADS, "dtype": EXACT_DTYPES, "window": [None, 300]})
def test_chunking_never_changes_a_bit(heads: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    tokens = Tokens.random(LENGTH, heads, dtype)
    whole = in_chunks(tokens, LENGTH, window)
    for chunk, begin, end in ((1, 500, 530), (7, 230, 330), (33, 0, LENGTH), (200, 0, LENGTH)):  # over partitions' ends
        chunked = in_chunks(tokens, chunk, window, begin, end)
        assert torch.equal(chunked, whole[begin:end]), f"chunks of {chunk}"


@covering({"heads": HEADS, "dtype": EXACT_DTYPES, "window": [None, 70]})
def test_block_size_and_block_ids_never_change_a_bit(
    heads: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    tokens = Tokens.random(LENGTH, heads, dtype)
    parts = [Part(tokens, 0, 90), Part(tokens, 90, LENGTH - 1), Part(tokens, LENGTH - 1, LENGTH)]
    alone = [attend([part], window=window, back_end=CPP)[0] for part in parts]
    for seed, block_size in enumerate(KERNEL_BLOCK_SIZES):
        results = attend(parts, Paging(block_size, seed), window, CPP)
        assert all(map(torch.equal, results, alone)), f"blocks of {block_size}"


@covering({"heads": HEADS, "dtype": EXACT_DTYPES, "num_threads": [1, 2, 3]}, indirect=["num_threads"])
def test_neighbours_and_threads_never_change_a_bit(
    heads: tuple[int, int, int], dtype: torch.dtype, num_threads: int
) -> None:
    chooser = random.Random(0)
    tokens = Tokens.random(LENGTH, heads, dtype)
    watched = [Part(tokens, start, stop) for start, stop in ((0, 40), (LENGTH - 1, LENGTH), (255, 256), (200, 271))]
    set_num_threads(1)
    alone = [attend([part], back_end=CPP)[0] for part in watched]
    set_num_threads(num_threads)
    assert all(torch.equal(attend([part], back_end=CPP)[0], bits) for part, bits in zip(watched, alone, strict=True))
    for seed in range(2):
        starts = [chooser.choice([0, 1, 255, 256, chooser.randrange(LENGTH)]) for _ in range(chooser.randrange(1, 12))]
        stops = [min(LENGTH, start + chooser.choice([1, 1, 2, 30, 100])) for start in starts]
        neighbours = [
            Part(Tokens.random(stop, heads, dtype, 100 + i), min(start, stop - 1), stop)
            for i, (start, stop) in enumerate(zip(starts, stops, strict=True))
        ]
        parts = watched + neighbours
        order = chooser.sample(range(len(parts)), len(parts))
        results = dict(zip(order, attend([parts[i] for i in order], Paging(seed=seed), None, CPP), strict=True))
        assert all(torch.equal(results[i], alone[i]) for i in range(len(watched)))


LATENTS = [((16, 1, 576), 512), ((130, 1, 48), 40), ((5, 1, 24), 8)]  # heads, dimensions of keys that are values


@covering(
    {
        "spans": list(SPANS), ("heads", "value_dim"): LATENTS, "window": [None, 50], "block_size": [8, 16, 64],
        ("dtype", "tol"): DTYPES,
    }
)  # fmt: skip
def test_values_that_are_parts_of_keys_match_the_reference(
    spans: str, heads: tuple[int, int, int], value_dim: int, window: int | None, block_size: int, dtype: torch.dtype,
    tol: float,
) -> None:  # fmt: skip
    parts = [
        Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(SPANS[spans])
    ]
    paging = Paging(block_size)
    expected = attend(parts, paging, window, REFERENCE, value_dim=value_dim)
    for back_end in (CPP, TORCH):
        found = attend(parts, paging, window, back_end, value_dim=value_dim)
        for result, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)
    as_values = [Part(replace(part.tokens, value=part.tokens.key), part.start, part.stop) for part in parts]
    for result, wanted in zip(expected, attend(as_values, paging, window, REFERENCE), strict=True):
        torch.testing.assert_close(result, wanted[..., :value_dim], rtol=tol, atol=tol)


@covering(
    {
        ("heads", "value_dim"): LATENTS[:2], "dtype": EXACT_DTYPES, "window": [None, 70], "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)  # fmt: skip
def test_values_that_are_parts_of_keys_keep_their_bits_alone_chunked_and_among_others(
    heads: tuple[int, int, int], value_dim: int, dtype: torch.dtype, window: int | None, num_threads: int
) -> None:
    tokens, other = Tokens.random(290, heads, dtype), Tokens.random(40, heads, dtype, seed=1)
    whole = attend([Part(tokens, 0, 290)], None, window, CPP, value_dim=value_dim)[0]
    for seed, chunk in enumerate([(0, 7), (7, 31), (250, 256), (256, 289), (289, 290)]):
        paging = Paging(KERNEL_BLOCK_SIZES[seed % len(KERNEL_BLOCK_SIZES)], seed)
        beside = attend([Part(other, 3, 40), Part(tokens, *chunk)], paging, window, CPP, value_dim=value_dim)[1]
        assert torch.equal(beside, whole[slice(*chunk)]), f"chunk {chunk}"
    set_num_threads(1)
    assert torch.equal(attend([Part(tokens, 289, 290)], None, window, CPP, value_dim=value_dim)[0], whole[289:])


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_long_context_is_shared_by_threads_and_keeps_its_bits(dtype: torch.dtype, num_threads: int) -> None:
    tokens = Tokens.random(5000, (14, 2, 64), dtype)
    part = Part(tokens, 4999, 5000)
    beside_others = attend([Part(tokens, 0, 300), part, Part(tokens, 700, 1000)], back_end=CPP)[1]
    assert torch.equal(attend([part], back_end=CPP)[0], beside_others)
    tol = dict(DTYPES)[dtype]
    torch.testing.assert_close(beside_others, attend([part], back_end=REFERENCE)[0], rtol=tol, atol=tol)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_later_tokens_of_the_same_step_do_not_reach_earlier_ones(dtype: torch.dtype) -> None:
    tokens = Tokens.random(100, (4, 2, 32), dtype)
    before = attend([Part(tokens, 0, 100)], back_end=CPP)[0][:60].clone()
    tokens.key[60:] = 1e30
    tokens.value[60:] = -1e30
    assert torch.equal(attend([Part(tokens, 0, 100)], back_end=CPP)[0][:60], before)


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_scores_far_apart_leave_no_nan(dtype: torch.dtype) -> None:
    tokens = Tokens.random(600, (4, 2, 32), dtype)
    tokens.key[:] *= 1e4
    assert attend([Part(tokens, 0, 600)], back_end=CPP)[0].isfinite().all()


@pytest.mark.parametrize("dtype", EXACT_DTYPES, ids=str)
def test_queries_cut_from_a_fused_projection_are_read_where_they_stand(dtype: torch.dtype) -> None:
    tokens = Tokens.random(50, (4, 2, 32), dtype)
    fused = torch.cat([tokens.query, tokens.key, tokens.value], dim=1)
    keys, values = (x[:48].view(3, 16, 2, 32) for x in (tokens.key, tokens.value))
    table, starts, lengths = torch.arange(3).view(1, 3).int(), torch.tensor([0, 48]).int(), torch.tensor([48]).int()
    metadata = build_metadata(table, starts, lengths, 16)
    sliced, whole = fused[:48, :4], tokens.query[:48]
    assert not sliced.is_contiguous()
    spec, caches = plain_spec(sliced, 2), pack(keys, values)
    assert torch.equal(*(paged_attention(spec, query, *caches, metadata) for query in (sliced, whole)))


def test_sequence_without_tokens_in_the_step_is_passed_over() -> None:
    tokens = Tokens.random(8, (4, 2, 32))
    caches = pack(tokens.key.view(1, 8, 2, 32), tokens.value.view(1, 8, 2, 32))
    starts, lengths = torch.tensor([0, 0, 8]).int(), torch.tensor([5, 8]).int()
    metadata = build_metadata(torch.zeros(2, 1).int(), starts, lengths, block_size=8)
    alone = build_metadata(torch.zeros(1, 1).int(), starts[1:], lengths[1:], block_size=8)
    spec = plain_spec(tokens.query, 2)
    assert torch.equal(*(paged_attention(spec, tokens.query, *caches, each) for each in (metadata, alone)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block_size", KERNEL_BLOCK_SIZES)
def test_packing_a_cache_can_be_undone(dtype: torch.dtype, block_size: int) -> None:
    plain = [torch.randn(3, block_size, 2, 24).to(dtype) for _ in range(2)]
    packed = pack(*plain)
    assert tuple(x.shape for x in packed) == cache_shapes(3, block_size, 2, 24, kernel_dtype(dtype))
    assert all(torch.equal(ours.to(dtype), theirs) for ours, theirs in zip(unpack(*packed), plain, strict=True))


def test_plain_cache_is_refused() -> None:
    tokens = Tokens.random(16, (4, 2, 32))
    metadata = build_metadata(torch.zeros(1, 1).int(), torch.tensor([0, 16]).int(), torch.tensor([16]).int(), 16)
    with pytest.raises(AssertionError, match="layout"):
        paged_attention(plain_spec(tokens.query, 2), tokens.query, tokens.key[None], tokens.value[None], metadata)
