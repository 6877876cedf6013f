"""Paged attention against its reference, and to the bit against itself under other layouts of the same step."""

import itertools
import random
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from quire.core.config import KERNEL_BLOCK_SIZES
from quire.kernels.paged_attention import build_metadata
from quire.kernels.reference import paged_attention
from quire.kernels.reference.back_ends import REFERENCE
from support.paged_cache import Paging, Part, Tokens, attend, plain_spec
from support.pairwise import covering

DTYPES = [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)]
HEADS = [(4, 4, 8), (4, 2, 32), (14, 2, 64), (8, 1, 80), (8, 2, 128)]  # groups of 1, 2, 7, 8 and 4
LENGTH = 300  # several key tiles, the last one not full
LONG = 1200  # many key tiles
ROOT = Path(__file__).parents[2]
SOURCES = (".py", ".pyi", ".hpp", ".cpp", ".cu")
FAMILIES_WITH_SINKS = {"src/quire/model/families/gpt_oss.py"}


def parts_of(tokens: Tokens, chunk: int, begin: int = 0) -> list[Part]:
    """Cut a sequence from `begin` on into parts of `chunk` tokens."""
    length = len(tokens.query)
    return [Part(tokens, start, min(start + chunk, length)) for start in range(begin, length, chunk)]


def in_chunks(
    tokens: Tokens, chunk: int, window: int | None = None, begin: int = 0, paging: Paging | None = None
) -> Tensor:
    """Compute a sequence's positions from `begin` on, `chunk` tokens per step, nothing beside it."""
    return torch.cat([attend([part], paging, window)[0] for part in parts_of(tokens, chunk, begin)])


@pytest.mark.parametrize(("dtype", "tol"), DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 1, 50])
@pytest.mark.parametrize(
    "spans",
    [[(0, 1)], [(0, 16)], [(63, 64), (64, 65)], [(16, 17), (0, 3), (0, 250), (249, 250)], [(5, 70), (31, 33)]],
    ids=["one token", "full block", "tile border", "ragged", "chunks"],
)
def test_back_end_matches_reference(
    spans: list[tuple[int, int]], window: int | None, heads: tuple[int, int, int], dtype: torch.dtype, tol: float
) -> None:
    parts = [Part(Tokens.random(stop, heads, dtype, seed), start, stop) for seed, (start, stop) in enumerate(spans)]
    expected = attend(parts, window=window, back_end=REFERENCE)
    for result, wanted in zip(attend(parts, window=window), expected, strict=True):
        torch.testing.assert_close(result, wanted, rtol=tol, atol=tol)


def test_reference_is_softmax_attention() -> None:
    tokens = Tokens.random(40, (4, 2, 16))
    (result,) = attend([Part(tokens, 0, 40)], back_end=REFERENCE)
    query, key, value = (x.transpose(0, 1) for x in (tokens.query, tokens.key, tokens.value))
    expected = torch.nn.functional.scaled_dot_product_attention(
        query, key.repeat_interleave(2, 0), value.repeat_interleave(2, 0), is_causal=True
    )
    torch.testing.assert_close(result, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_reference_with_runs_that_see_each_other_is_softmax_attention_with_that_mask() -> None:
    tokens, runs, places = Tokens.random(40, (4, 2, 16)), ((3, 12), (12, 20), (25, 40)), torch.arange(40)
    query, key, value = (x.transpose(0, 1) for x in (tokens.query, tokens.key, tokens.value))
    seen = places[:, None] >= places
    for start, stop in runs:
        seen[start:stop, start:stop] = True
    for window in (None, 7):
        (result,) = attend([Part(tokens, 0, 40, runs)], window=window, back_end=REFERENCE)
        mask = seen if window is None else seen & (places[:, None] - places < window)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(2, 0), value.repeat_interleave(2, 0), attn_mask=mask
        )
        torch.testing.assert_close(result, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_reference_in_both_directions_is_softmax_attention_without_a_mask() -> None:
    tokens = Tokens.random(40, (4, 2, 16))
    query, key, value = (x.transpose(0, 1) for x in (tokens.query, tokens.key, tokens.value))
    seen = {None: None, 5: (torch.arange(40)[:, None] - torch.arange(40)).abs() < 5}
    for window, mask in seen.items():
        (result,) = attend([Part(tokens, 0, 40)], window=window, back_end=REFERENCE, is_causal=False)
        expected = torch.nn.functional.scaled_dot_product_attention(
            query, key.repeat_interleave(2, 0), value.repeat_interleave(2, 0), attn_mask=mask
        )
        torch.testing.assert_close(result, expected.transpose(0, 1), rtol=1e-5, atol=1e-5)


def test_reference_has_the_sinks_of_gpt_oss() -> None:
    gpt_oss = pytest.importorskip("transformers.models.gpt_oss.modeling_gpt_oss")
    tokens, sinks = Tokens.random(40, (4, 2, 16)), torch.tensor([-1.0, 0.0, 2.0, 5.0])
    (result,) = attend([Part(tokens, 0, 40)], back_end=REFERENCE, sinks=sinks)
    query, key, value = (x.transpose(0, 1)[None] for x in (tokens.query, tokens.key, tokens.value))
    module = SimpleNamespace(sinks=sinks, num_key_value_groups=2, training=False)
    mask = torch.full((40, 40), float("-inf")).triu(1)
    expected, _ = gpt_oss.eager_attention_forward(module, query, key, value, mask, scaling=0.25)
    torch.testing.assert_close(result, expected[0], rtol=1e-5, atol=1e-5)


@covering({"heads": HEADS, "dtype": [torch.float32, torch.bfloat16], "window": [None, 100]})
def test_chunking_never_changes_a_bit(heads: tuple[int, int, int], dtype: torch.dtype, window: int | None) -> None:
    tokens = Tokens.random(LENGTH, heads, dtype)
    alone = in_chunks(tokens, 1, window)
    for chunk in (7, 16, 33, LENGTH):
        chunked = in_chunks(tokens, chunk, window)
        assert torch.equal(chunked, alone), f"chunks of {chunk}"


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 70])
def test_block_size_and_block_ids_never_change_a_bit(heads: tuple[int, int, int], window: int | None) -> None:
    tokens = Tokens.random(LENGTH, heads)
    parts = [Part(tokens, 0, 90), Part(tokens, 90, LENGTH - 1), Part(tokens, LENGTH - 1, LENGTH)]
    alone = [attend([part], window=window)[0] for part in parts]
    for seed, block_size in enumerate(KERNEL_BLOCK_SIZES):
        results = attend(parts, Paging(block_size, seed), window)
        assert all(map(torch.equal, results, alone)), f"blocks of {block_size}"


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("window", [None, 40])
def test_neighbours_never_change_a_bit(heads: tuple[int, int, int], window: int | None, num_threads: int) -> None:
    chooser = random.Random(0)
    tokens = Tokens.random(LENGTH, heads)
    watched = [Part(tokens, start, stop) for start, stop in ((0, 40), (LENGTH - 1, LENGTH), (63, 64), (100, 171))]
    alone = [attend([part], window=window)[0] for part in watched]
    for seed in range(2):
        count = chooser.randrange(1, 12)
        starts = [chooser.choice([0, 1, 63, 64, 200, chooser.randrange(LENGTH)]) for _ in range(count)]
        stops = [min(LENGTH, start + chooser.choice([1, 1, 2, 30, 100])) for start in starts]
        neighbours = [
            Part(Tokens.random(stop, heads, seed=100 + i), min(start, stop - 1), stop)
            for i, (start, stop) in enumerate(zip(starts, stops, strict=True))
        ]
        parts = watched + neighbours
        order = chooser.sample(range(len(parts)), len(parts))
        results = dict(zip(order, attend([parts[i] for i in order], Paging(seed=seed), window), strict=True))
        assert all(torch.equal(results[i], alone[i]) for i in range(len(watched)))


@pytest.mark.parametrize("count", [1, 2, 3, 17, 64, 300])
def test_number_of_sequences_never_changes_a_bit(count: int) -> None:
    tokens = [Tokens.random(70 + i % 9, (14, 2, 64), seed=i) for i in range(count)]
    parts = [Part(each, len(each.query) - 1, len(each.query)) for each in tokens]
    results = attend(parts)
    for i in {0, count // 2, count - 1}:
        assert torch.equal(results[i], attend([parts[i]])[0])


@pytest.mark.parametrize("window", [None, 64, 1100])
def test_long_context_has_the_same_bits_by_the_token_and_as_a_whole(window: int | None) -> None:
    tokens = Tokens.random(LONG, (4, 2, 32))
    whole = attend([Part(tokens, 0, LONG)], window=window)[0]
    assert torch.equal(whole[1000:], in_chunks(tokens, 1, window, begin=1000))
    expected = attend([Part(tokens, 0, LONG)], window=window, back_end=REFERENCE)[0]
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)


def test_windows_far_apart_share_a_step() -> None:
    near, far = Tokens.random(20, (4, 2, 32)), Tokens.random(4000, (4, 2, 32), seed=1)
    for parts in ([Part(near, 19, 20), Part(far, 3999, 4000)], [Part(far, 3900, 4000), Part(near, 0, 20)]):
        together = attend(parts, window=100)
        alone = [attend([part], window=100)[0] for part in parts]
        assert all(map(torch.equal, together, alone))


def test_later_tokens_of_the_same_step_do_not_reach_earlier_ones() -> None:
    tokens = Tokens.random(100, (4, 2, 32))
    before = attend([Part(tokens, 0, 100)])[0][:60].clone()
    tokens.key[60:] = 1e30
    tokens.value[60:] = -1e30
    assert torch.equal(attend([Part(tokens, 0, 100)])[0][:60], before)


def test_scores_far_apart_leave_no_nan() -> None:
    tokens = Tokens.random(200, (4, 2, 32))
    tokens.key[:] *= 1e4
    assert attend([Part(tokens, 0, 200)])[0].isfinite().all()


def test_layers_with_and_without_window_share_a_plan() -> None:
    tokens = Tokens.random(32, (4, 2, 32))
    caches = tokens.key.view(4, 8, 2, 32), tokens.value.view(4, 8, 2, 32)
    step = torch.arange(4).view(1, 4).int(), torch.tensor([0, 32]).int(), torch.tensor([32]).int()
    metadata = build_metadata(*step, block_size=8)
    for window in (None, 5, None):
        spec = plain_spec(tokens.query, 2, window=window)
        result = paged_attention.paged_attention(spec, tokens.query, *caches, metadata)
        expected = paged_attention.reference(spec, tokens.query, *caches, metadata)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)


def test_sequence_without_tokens_in_the_step_is_passed_over() -> None:
    tokens = Tokens.random(8, (4, 2, 32))
    caches = tokens.key.view(1, 8, 2, 32), tokens.value.view(1, 8, 2, 32)
    starts, lengths = torch.tensor([0, 0, 8]).int(), torch.tensor([5, 8]).int()
    metadata = build_metadata(torch.zeros(2, 1).int(), starts, lengths, block_size=8)
    alone = build_metadata(torch.zeros(1, 1).int(), starts[1:], lengths[1:], block_size=8)
    spec = plain_spec(tokens.query, 2)
    attended = [paged_attention.paged_attention(spec, tokens.query, *caches, each) for each in (metadata, alone)]
    assert torch.equal(*attended)


def test_attention_sinks_are_in_the_files_that_the_page_lists_for_a_new_feature() -> None:
    folders = "src/quire/kernels", "src/quire/model", "csrc"
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.*"))
    sources = {str(each.relative_to(ROOT)): each.read_text("utf-8") for each in files if each.suffix in SOURCES}
    found = {name for name, text in sources.items() if re.search(r"\bsinks\b", text)}
    page = (ROOT / "docs/kernels.md").read_text(encoding="utf-8")
    section = page.split("## A new feature of attention\n")[1].split("\n## ")[0]
    assert found - FAMILIES_WITH_SINKS == set(re.findall(r"^    (\S+)", section, re.MULTILINE))


@pytest.mark.parametrize("block_size", [4, 12, 256])
def test_block_size_that_kernels_do_not_take_is_refused(block_size: int) -> None:
    ints = torch.zeros(2).int()
    with pytest.raises(AssertionError, match="block size"):
        build_metadata(torch.zeros(1, 1).int(), ints, ints[:1], block_size)


@pytest.mark.matrix
@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("head_dim", [8, 16, 32, 64, 80, 96, 128, 256])
@pytest.mark.parametrize("group", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("window", [None, 33])
def test_every_head_shape_is_exact(head_dim: int, group: int, window: int | None, num_threads: int) -> None:
    tokens = Tokens.random(LENGTH, (2 * group, 2, head_dim))
    whole = None
    for chunk, block_size in itertools.product((1, 7, 32, LENGTH), (8, 128)):
        paging = Paging(block_size, seed=chunk)
        result = in_chunks(tokens, chunk, window, paging=paging)
        whole = result if whole is None else whole
        assert torch.equal(result, whole), f"chunks of {chunk}, blocks of {block_size}"
