"""A short convolution driven over paged tails, with its inputs in any pieces."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from quire.kernels.paged_attention import build_metadata
from quire.kernels.short_conv import ShortConvSpec


class ConvRunner:
    """Runs sequences through a convolution; blocks are handed out in a shuffled order, and hold NaN before."""

    def __init__(
        self, convolve: Callable[..., Tensor], spec: ShortConvSpec, dtype: torch.dtype, block_size: int
    ) -> None:
        self._convolve, self._spec, self._block_size = convolve, spec, block_size
        num_blocks = 64
        self.tails = torch.full((num_blocks, min(spec.length, block_size), spec.width), torch.nan, dtype=dtype)
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, pieces: dict[str, Tensor], *, is_stored: bool = False) -> list[Tensor]:
        """Convolve the next tokens of some sequences; those that are stored are written nowhere."""
        firsts = [self._lengths.get(name, 0) for name in pieces]
        positions = [torch.arange(first, first + len(x)) for first, x in zip(firsts, pieces.values(), strict=True)]
        for name, own in zip(pieces, positions, strict=True):
            table = self._tables.setdefault(name, [])
            self._lengths[name] = int(own[-1]) + 1
            while len(table) * self._block_size < self._lengths[name]:
                table.append(self._free.pop())
        tables = [torch.tensor(self._tables[name], dtype=torch.int32) for name in pieces]
        starts = torch.tensor([0, *torch.tensor(list(map(len, positions))).cumsum(0)], dtype=torch.int32)
        lengths = torch.tensor([self._lengths[name] for name in pieces], dtype=torch.int32)
        padded = torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
        slots = torch.cat([
            table.long()[own // self._block_size] * self._block_size + own % self._block_size
            for table, own in zip(tables, positions, strict=True)
        ])  # fmt: skip
        found = self._convolve(
            self._spec, torch.cat(list(pieces.values())), torch.cat(positions), self.tails,
            slots.fill_(-1) if is_stored else slots, build_metadata(padded, starts, lengths, self._block_size),
        )  # fmt: skip
        return list(found.split(list(map(len, positions))))

    def run(self, name: str, x: Tensor, borders: Sequence[int] = ()) -> Tensor:
        """Convolve a sequence, cut at borders."""
        cuts = pairwise([0, *borders, len(x)])
        return torch.cat([self.step({name: x[start:stop]})[0] for start, stop in cuts])

    def truncate(self, name: str, num_tokens: int) -> None:
        """Take back the last tokens of a sequence; its blocks stay."""
        self._lengths[name] = num_tokens


def make_spec(width: int, taps: int, length: int, *, has_bias: bool = False) -> ShortConvSpec:
    """Return random weights."""
    generator = torch.Generator().manual_seed(width)
    bias = torch.randn(width, generator=generator) if has_bias else None
    return ShortConvSpec(torch.randn(taps, width, generator=generator), bias, length)


def make_inputs(num_tokens: int, width: int, dtype: torch.dtype, seed: int = 1) -> Tensor:
    """Return random inputs [num_tokens, 3 * width]."""
    return torch.randn(num_tokens, 3 * width, generator=torch.Generator().manual_seed(seed)).to(dtype)
