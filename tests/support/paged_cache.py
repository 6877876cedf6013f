"""Sequences laid out in a hostile paged cache: NaN and garbage wherever nothing should look."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from quire.core.config import QUANTIZED
from quire.kernels.back_end import BackEnd
from quire.kernels.kv_cache import ONES, KVScales
from quire.kernels.paged_attention import AttentionSpec, Heads, RotarySpec, build_metadata
from quire.kernels.reference.back_ends import TORCH
from quire.kernels.reference.kv_cache import as_bytes, is_quantized, stored_rows

GARBAGE_BLOCK = 10**6


@dataclass(frozen=True)
class Tokens:
    """One sequence: query [length, num_heads, head_dim], key and value [length, num_kv_heads, head_dim]."""

    query: Tensor
    key: Tensor
    value: Tensor

    @staticmethod
    def random(length: int, heads: tuple[int, int, int], dtype: torch.dtype = torch.float32, seed: int = 0) -> "Tokens":
        num_heads, num_kv_heads, head_dim = heads
        generator = torch.Generator().manual_seed(seed)
        return Tokens(
            *(
                torch.randn(length, count, head_dim, generator=generator).to(dtype)
                for count in (num_heads, num_kv_heads, num_kv_heads)
            )
        )


def random_latents(length: int, heads: tuple[int, int, int], dtype: torch.dtype, seed: int = 0) -> Tokens:
    """Return tokens with keys of which each hundred dimensions is ten times as large as the one before."""
    tokens = Tokens.random(length, heads, dtype, seed)
    sizes = 10.0 ** (torch.arange(heads[2]) // 100 - heads[2] // 100)
    return Tokens(tokens.query, (tokens.key * sizes).to(dtype), tokens.value)


@dataclass(frozen=True)
class Part:
    """Positions [start, stop) of a sequence: what one step computes of it. `runs` of positions see each other."""

    tokens: Tokens
    start: int
    stop: int
    runs: tuple[tuple[int, int], ...] = ()

    def seen_ends(self) -> list[int]:
        """Return one past the last position that each position sees."""
        ends = {place: stop for start, stop in self.runs for place in range(start, stop)}
        return [ends.get(place, place + 1) for place in range(self.start, self.stop)]


@dataclass(frozen=True)
class Paging:
    """How a step is laid out: none of this may change a bit of the result."""

    block_size: int = 16
    seed: int = 0


def attend(
    parts: Sequence[Part],
    paging: Paging | None = None,
    window: int | None = None,
    back_end: BackEnd = TORCH,
    device: torch.device | str = "cpu",
    kv: str = "auto",
    scales: KVScales = ONES,
    **more: object,
) -> list[Tensor]:
    """Compute the parts in one step over a cache of NaN with shuffled blocks; garbage wherever nothing should look.

    `kv`: how the cache is stored, a value of --kv-cache-dtype; `scales`: of fp8; `more`: other fields of the spec.
    """
    paging = paging or Paging()
    generator = torch.Generator().manual_seed(paging.seed)
    max_blocks = max(-(-part.stop // paging.block_size) for part in parts) + 2
    shape = (len(parts) * max_blocks, paging.block_size, *parts[0].tokens.key.shape[1:])
    latent_dim = int(str(more.get("value_dim", 0)))
    key_cache, value_cache = (_empty_cache(shape, parts[0].tokens.key.dtype, kv, latent_dim) for _ in range(2))
    tables = torch.randperm(shape[0], generator=generator).view(len(parts), max_blocks).int()
    for table, part in zip(tables, parts, strict=True):
        _fill(table, part, window, (key_cache, value_cache), scales, latent_dim)
    counts = torch.tensor([0] + [part.stop - part.start for part in parts])
    context_lens = torch.tensor([part.stop for part in parts]).int()
    seen_ends = None
    if any(part.runs for part in parts):
        seen_ends = torch.tensor([end for part in parts for end in part.seen_ends()], dtype=torch.int32, device=device)
    metadata = build_metadata(
        tables.to(device), counts.cumsum(0).int().to(device), context_lens.to(device), paging.block_size, seen_ends
    )
    if back_end.name == "cuda":
        key_cache, value_cache = (scales_behind(x, parts[0].tokens.key.shape[2]) for x in (key_cache, value_cache))
    query, key_cache, value_cache = (
        x.to(device)
        for x in (torch.cat([part.tokens.query[part.start : part.stop] for part in parts]), key_cache, value_cache)
    )
    more = {name: value.to(device) if isinstance(value, Tensor) else value for name, value in more.items()}
    spec = plain_spec(query, parts[0].tokens.key.shape[1], window=window, kv_scales=scales, **more)
    out = back_end.paged_attention(spec, query, key_cache, value_cache, metadata)
    assert out.shape == (*query.shape[:2], spec.output_dim)
    assert out.dtype == query.dtype
    return list(out.cpu().split(counts[1:].tolist()))


def plain_spec(query: Tensor, num_kv_heads: int, scale: float | None = None, **more: Any) -> AttentionSpec:  # noqa: ANN401
    """Return the attention of a layer with queries [num_tokens, num_heads, head_dim]; causal unless `more` says so."""
    _, num_heads, head_dim = query.shape
    return AttentionSpec(Heads(num_heads, num_kv_heads, head_dim), scale or head_dim**-0.5, **more)


def rotary_spec(query: Tensor, key: Tensor, cos_sin: Tensor | None = None, **more: Any) -> RotarySpec:  # noqa: ANN401
    """Return the rotation of a layer with queries and keys [num_tokens, their heads, head_dim]."""
    return RotarySpec(Heads(*query.shape[1:2], *key.shape[1:]), cos_sin, **more)


def _empty_cache(shape: tuple[int, ...], dtype: torch.dtype, kv: str, latent_dim: int) -> Tensor:
    """Return a cache of NaN; in 8 bits of what is NaN in e4m3 and in scales."""
    stored = QUANTIZED.get(kv)
    if stored is None:
        return torch.full(shape, torch.nan, dtype=dtype)
    rows = (*shape[:-1], shape[-1] + stored.extra_bytes(shape[-1], latent_dim))
    return torch.full(rows, -1, dtype=torch.int8).view(getattr(torch, stored.element))


def scales_behind(cache: Tensor, head_dim: int) -> Tensor:
    """Return a cache as Triton's kernels store it: in a block, scales behind the elements of all its heads."""
    if not is_quantized(cache) or cache.shape[3] == head_dim:
        return cache
    rows = as_bytes(cache).flatten(1, 2)
    blocks = torch.cat([rows[..., :head_dim].flatten(1), rows[..., head_dim:].flatten(1)], dim=1)
    return blocks.view(cache.shape).view(cache.dtype)


def _fill(
    table: Tensor, part: Part, window: int | None, caches: tuple[Tensor, Tensor], scales: KVScales, latent_dim: int
) -> None:
    """Write what the part may see into its blocks; spoil the table's other entries with -1 and ids past the cache."""
    block_size = caches[0].shape[1]
    first = 0 if window is None else max(0, part.start - window + 1)
    positions = torch.arange(first, part.stop)
    blocks = table[positions // block_size].long()
    where = blocks, positions % block_size
    for cache, rows, scale in zip(caches, (part.tokens.key, part.tokens.value), scales, strict=True):
        as_bytes(cache)[where] = stored_rows(rows[first : part.stop], cache, scale, latent_dim)
    is_unseen = torch.ones(len(table), dtype=torch.bool)
    is_unseen[positions // block_size] = False
    spoiled = torch.where(torch.arange(len(table)) % 2 == 0, -1, GARBAGE_BLOCK).int()
    table[is_unseen] = spoiled[is_unseen]
