"""Paged attention in Triton against the reference, and to the bit against itself in other company."""

import os

import pytest
import torch

from quire.kernels.back_end import REFERENCE, cuda_back_end
from quire.kernels.paged_attention import build_metadata
from support.paged_cache import Paging, Part, Tokens, attend

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
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
    parts, paging = parts_of(SPANS, heads, dtype), Paging(block_size, 1)
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


def test_neighbours_block_size_and_programs_never_change_a_bit(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    back_end = cuda_back_end()
    watched, *neighbours = parts_of([(599, 600), (700, 701), (0, 20)], (2, 1, 32), torch.float32)
    (alone,) = attend([watched], Paging(16), back_end=back_end, device=device)
    monkeypatch.setattr("quire.kernels.triton.attention.TARGET_PROGRAMS", 4)  # programs take several partitions
    among = attend([neighbours[0], watched, neighbours[1]], Paging(32, 1), back_end=back_end, device=device)
    assert torch.equal(among[1], alone)


def test_row_of_no_sequence_reads_and_writes_nothing(device: torch.device) -> None:
    """A decode graph pads its batch with contexts of 0, whose tables hold anything."""
    back_end, out_of_reach = cuda_back_end(), 10**6
    query, cache = torch.randn(2, 2, 16, device=device), torch.randn(3, 16, 1, 16, device=device)
    tables = torch.tensor([[1], [out_of_reach]], dtype=torch.int32, device=device)
    starts, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 1, 2], [5, 0]))
    padded = back_end.paged_attention(query, cache, cache, build_metadata(tables, starts, lens, 16), 0.3)
    metadata = build_metadata(tables[:1], starts[:2], lens[:1], 16)
    assert torch.equal(padded[:1], back_end.paged_attention(query[:1], cache, cache, metadata, 0.3))
