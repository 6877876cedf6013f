"""Rotary embedding against transformers', and its properties."""

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from quire.kernels.reference.kv_cache import apply_rotary
from support.rotary import frequencies, table_of


def heads(num_tokens: int, head_dim: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(head_dim)
    return tuple(torch.randn(num_tokens, count, head_dim, generator=generator).to(dtype) for count in (6, 2))


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-6), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
@pytest.mark.parametrize("head_dim", [8, 32, 64, 80, 128])
def test_rotation_matches_transformers(head_dim: int, dtype: torch.dtype, tol: float) -> None:
    query, key = heads(50, head_dim, dtype)
    positions = torch.randperm(500, generator=torch.Generator().manual_seed(1))[:50]
    angles = torch.outer(positions.float(), frequencies(head_dim)).repeat(1, 2)
    expected = apply_rotary_pos_emb(
        query.float().transpose(0, 1)[None], key.float().transpose(0, 1)[None], angles.cos()[None], angles.sin()[None]
    )
    rotated = apply_rotary(query, key, positions, table_of(frequencies(head_dim), 500))
    for ours, theirs in zip(rotated, expected, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs[0].transpose(0, 1).to(dtype), rtol=tol, atol=tol)


def test_position_zero_turns_nothing() -> None:
    query, key = heads(3, 32)
    rotated = apply_rotary(query, key, torch.zeros(3, dtype=torch.int64), table_of(frequencies(32), 4))
    assert torch.equal(rotated[0], query)
    assert torch.equal(rotated[1], key)


def test_dimensions_past_the_rotary_ones_pass_through() -> None:
    query, key = heads(5, 64)
    table, positions = table_of(frequencies(24), 10), torch.arange(5)
    rotated = apply_rotary(query, key, positions, table)
    assert torch.equal(rotated[0][..., 24:], query[..., 24:])
    assert torch.equal(rotated[1][..., :24], apply_rotary(query, key[..., :24], positions, table)[1])


def test_scores_depend_on_distance_alone() -> None:
    query, key = heads(1, 64)
    table = table_of(frequencies(64), 300)
    scores = []
    for shift in (0, 100, 250):
        turned_query, _ = apply_rotary(query, key, torch.tensor([shift + 7]), table)
        _, turned_key = apply_rotary(query, key, torch.tensor([shift]), table)
        scores.append((turned_query[0, 0] * turned_key[0, 0]).sum())
    torch.testing.assert_close(torch.stack(scores), scores[0].expand(3), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("num_threads", [1, 2], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("head_dim", [8, 80, 128])
def test_tokens_have_the_same_bits_among_any_others(head_dim: int, dtype: torch.dtype, num_threads: int) -> None:
    query, key = heads(300, head_dim, dtype)
    positions, table = torch.arange(300).flip(0), table_of(frequencies(head_dim), 300)
    together = apply_rotary(query, key, positions, table)
    for begin, end in [(i, i + 1) for i in range(0, 300, 7)] + [(3, 90)]:
        part = apply_rotary(query[begin:end], key[begin:end], positions[begin:end], table)
        assert torch.equal(part[0], together[0][begin:end])
        assert torch.equal(part[1], together[1][begin:end])
