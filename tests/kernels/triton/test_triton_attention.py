"""Paged attention in Triton against the reference, and to the bit against itself in other company."""

import os
from itertools import accumulate
from typing import Any

import pytest
import torch

from quire.kernels.choice import cuda_back_end
from quire.kernels.paged_attention import AttentionMetadata, build_metadata
from quire.kernels.reference.back_ends import REFERENCE
from support.interpreter import rows_alike
from support.paged_cache import Paging, Part, Tokens, attend, plain_spec

attention = pytest.importorskip("quire.kernels.triton.triton_attention")
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
needs_host_tensors = pytest.mark.skipif(not IS_INTERPRETED, reason="host tensors")
DTYPES = [(torch.float32, 2e-5), (torch.float16, 3e-3)] + ([] if IS_INTERPRETED else [(torch.bfloat16, 2e-2)])
SPANS = [(16, 17), (0, 3), (30, 70), (269, 270)]  # decodes and chunks; a context of two partitions
OTHERS = [((6, 2, 32), 8), ((2, 2, 128), 128), ((4, 2, 256), 32), ((71, 1, 64), 16)]  # heads, block size


def parts_of(spans: list[tuple[int, int]], heads: tuple[int, int, int], dtype: torch.dtype) -> list[Part]:
    return [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize(
    ("heads", "block_size"),
    [((3, 1, 80), 16), ((33, 1, 16), 16), *(pytest.param(*case, marks=pytest.mark.matrix) for case in OTHERS)],
    ids=str,
)
def test_step_matches_the_reference(
    heads: tuple[int, int, int], block_size: int, window: int | None, dtype: torch.dtype, tol: float,
    device: torch.device,
) -> None:  # fmt: skip
    spans = SPANS if heads[0] < 16 else [(16, 17), (30, 34), (269, 270)]  # the interpreter takes long for many heads
    parts, paging = parts_of(spans, heads, dtype), Paging(block_size, 1)
    results = attend(parts, paging, window, cuda_back_end(), device)
    for result, wanted in zip(results, attend(parts, paging, window, REFERENCE), strict=True):
        torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)


@pytest.mark.parametrize("how", [{"softcap": 1.5}, {"sinks": True}, {"softcap": 1.5, "sinks": True}], ids=str)
def test_softcap_and_sinks_match_the_reference(how: dict[str, object], device: torch.device) -> None:
    parts = parts_of(SPANS, (3, 1, 24), torch.float32)
    more = how | ({"sinks": torch.tensor([-3.0, 0.5, 6.0])} if "sinks" in how else {})
    results = attend(parts, Paging(16, 1), 50, cuda_back_end(), device, **more)
    for result, wanted in zip(results, attend(parts, Paging(16, 1), 50, REFERENCE, **more), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("context_len", [256, 257, 513, 8193])
def test_partitions_cover_the_context_once(context_len: int, device: torch.device) -> None:
    parts = parts_of([(context_len - 1, context_len)], (1, 1, 16), torch.float32)
    (result,) = attend(parts, Paging(128), back_end=cuda_back_end(), device=device)
    torch.testing.assert_close(result, attend(parts, Paging(128), back_end=REFERENCE)[0], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("is_exact", [False, True])
def test_rows_behind_the_last_sequence_are_left_alone(
    is_exact: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph pads tokens; the position of one behind a context of the maximum length has no parts to be added up."""

    def filled(*size: Any, **how: Any) -> torch.Tensor:  # noqa: ANN401
        return torch.full(size[0] if isinstance(size[0], tuple) else size, 7, **how)

    query, cache = torch.randn(5, 2, 16, device=device), torch.randn(64, 16, 1, 16, device=device)
    starts, lens = (torch.tensor(each, dtype=torch.int32, device=device) for each in ([0, 3], [1024]))
    metadata = build_metadata(torch.arange(64, dtype=torch.int32, device=device)[None], starts, lens, 16)
    monkeypatch.setattr(torch, "empty", filled)
    spec = plain_spec(query, 1, 0.3)
    result = cuda_back_end(is_exact=is_exact).paged_attention(spec, query, cache, cache, metadata)
    assert [0, 2] in [plan.tolist() for plan in metadata.plans.values()], "two parts"
    assert (result[3:] == 7).all()
    torch.testing.assert_close(result[:3], REFERENCE.paged_attention(spec, query[:3], cache, cache, metadata))


def test_neighbours_block_size_and_programs_never_change_a_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_end = cuda_back_end()
    watched, *neighbours = parts_of([(599, 600), (700, 701), (0, 20)], (2, 1, 32), torch.float32)
    (alone,) = attend([watched], Paging(16), back_end=back_end, device=device)
    monkeypatch.setattr("quire.kernels.triton.triton_attention.DECODE_ITEMS", 2)  # an item is a whole context
    among = attend([neighbours[0], watched, neighbours[1]], Paging(32, 1), back_end=back_end, device=device)
    assert torch.equal(among[1], alone)


def test_row_of_no_sequence_reads_and_writes_nothing(device: torch.device) -> None:
    """A decode graph pads its batch with contexts of 0, whose tables hold anything."""
    back_end, out_of_reach = cuda_back_end(), 10**6
    query, cache = torch.randn(2, 2, 16, device=device), torch.randn(3, 16, 1, 16, device=device)
    tables = torch.tensor([[1], [out_of_reach]], dtype=torch.int32, device=device)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 2], [5, 0]))
    spec = plain_spec(query, 1, 0.3)
    padded = back_end.paged_attention(spec, query, cache, cache, build_metadata(tables, starts, lens, 16))
    metadata = build_metadata(tables[:1], starts[:2], lens[:1], 16)
    assert torch.equal(padded[:1], back_end.paged_attention(spec, query[:1], cache, cache, metadata))


def step_of(contexts: list[int], counts: list[int]) -> AttentionMetadata:
    """Return the metadata of a step with so many tokens of contexts, without a cache."""
    starts = torch.tensor([0, *accumulate(counts)], dtype=torch.int32)
    tables = torch.zeros(len(counts), -(-max(contexts) // 16), dtype=torch.int32)
    return build_metadata(tables, starts, torch.tensor(contexts, dtype=torch.int32), 16)


def items_of(contexts: list[int], counts: list[int], *, is_decode: bool, max_parts: int = 64) -> list[int]:
    """Return how many items of 8 tokens or one the plan of a step makes of each sequence, for 8 key-value heads."""
    kind = {"IS_DECODE": is_decode, "IS_EXACT": False, "WINDOW": 0}
    plan = attention._plan(step_of(contexts, counts), 8, 1 if is_decode else 8, max_parts, kind)
    return torch.diff(plan).tolist()


@needs_host_tensors
def test_plan_shares_a_long_context_among_many_short_ones() -> None:
    contexts = [500] * 255 + [32_000]
    items = items_of(contexts, [1] * 256, is_decode=True)
    longest = max(context / count for context, count in zip(contexts, items, strict=True))
    assert longest < 1.6 * sum(contexts) / (attention.DECODE_ITEMS / 8), "tokens of an item, before segments"
    assert items[:255] == [1] * 255
    assert items_of([500, 0, 700], [1, 1, 9], is_decode=True) == [2, 0, 0], "padding, and a chunk"


@needs_host_tensors
def test_plan_cuts_the_context_of_a_short_query_and_not_that_of_a_prompt() -> None:
    assert items_of([8192], [5], is_decode=False)[0] >= 16
    assert items_of([8192, 300], [5, 1], is_decode=False, max_parts=1) == [1, 0]
    assert items_of([8192], [4096], is_decode=False) == [512], "one for each tile"


@pytest.mark.parametrize("context_len", [0, 1, 256, 257, 4096, 4097, 4608, 4609, 8192, 8193, 131_072, 1 << 20])
def test_segments_are_of_256_tokens_and_double_beyond_4096(context_len: int) -> None:
    count = begin = 0
    while begin < context_len:
        begin += 256 if count < 16 else 512 << (count - 16) // 8
        count += 1
    assert attention.count_segments(context_len) == count


HOWS = [
    pytest.param(torch.float16, None, {}, marks=pytest.mark.matrix), (torch.float32, 300, {}),
    (torch.float16, None, {"softcap": 1.5, "sinks": torch.tensor([0.5, 6.0])}),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "window", "more"), HOWS, ids=["plain", "window", "softcap and sinks"])
def test_exact_rows_have_the_same_bits_in_every_batch_and_chunk(
    dtype: torch.dtype, window: int | None, more: dict[str, object], device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Decodes, chunks cut anywhere, whole prompts; with contexts in one program, and shared by several."""
    rows_alike(monkeypatch)
    back_end = cuda_back_end(is_exact=True)
    tokens, other = (Tokens.random(540, (2, 1, 16), dtype, seed) for seed in range(2))
    ways = [[(500, 540)], [(500, 507), (507, 538), (538, 540)], [(at, at + 1) for at in (511, 512, 539)]]
    rows = dict[int, torch.Tensor]()
    for items in (264, 1):  # programs of a step: the context is shared, and it is not
        monkeypatch.setattr("quire.kernels.triton.triton_attention.CHUNK_ITEMS", items)
        for block_size, way in zip((16, 8, 32), ways, strict=True):
            for start, stop in way:
                parts = [Part(other, 3, 9), Part(tokens, start, stop), Part(other, 539, 540)][block_size < 16 :]
                results = attend(parts, Paging(block_size), window, back_end, device, **more)
                for position, row in zip(range(start, stop), results[-2], strict=True):
                    assert torch.equal(rows.setdefault(position, row), row), (position, way)
    (expected,) = attend([Part(tokens, 500, 540)], Paging(16), window, REFERENCE, **more)
    found = torch.stack([rows[position] for position in range(500, 540)])
    tolerance = 2e-5 if dtype == torch.float32 else 3e-3
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 300])
def test_context_shared_by_programs_matches_the_reference(window: int | None, device: torch.device) -> None:
    """A few queries on a long context: the end of a chunk, or drafts to verify."""
    parts = parts_of([(1195, 1200), (60, 63)], (2, 1, 16), torch.float32)
    results = attend(parts, Paging(32), window, cuda_back_end(), device)
    for result, wanted in zip(results, attend(parts, Paging(32), window, REFERENCE), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-5)
