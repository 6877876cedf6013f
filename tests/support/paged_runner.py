"""A decoder driven the way the worker drives it, and the fixtures of tests that run one."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.plan import MAX_SNAPSHOTS
from quire.extension.isas import usable_isas
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.kernels.delta_net import StateRows
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from support.on_tensors import run
from support.threads import set_num_threads


class PagedRunner:
    """Runs token lists through a decoder and a paged cache whose blocks are handed out in a shuffled order.

    A sequence's states are updated in their slot; they lag behind its last `lag` tokens, which can be taken back.
    """

    def __init__(self, decoder: Decoder, *, block_size: int = 8, num_blocks: int = 96, lag: int = 0) -> None:
        self.decoder = decoder
        num_slots = 8 if decoder.kv_geometry.states else 0
        self.cache = KVCache.allocate(
            decoder.kv_geometry, num_blocks, block_size, decoder.back_end, num_slots=num_slots
        )
        for states in self.cache.states:
            states[:] = 0xFF  # NaN
        self._lag, self._committed = lag, dict[str, int]()
        self._free = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}

    def step(self, pieces: dict[str, list[int]], num_read: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Append each sequence's tokens in one forward pass; return the logits of each, [num_tokens, vocab_size].

        num_read: as in `ForwardBatch`.
        """
        starts = {name: self._grow(name, len(tokens)) for name, tokens in pieces.items()}
        positions = {name: torch.arange(start, self._lengths[name]) for name, start in starts.items()}
        tables = [torch.tensor(self._tables[name], dtype=torch.int32) for name in pieces]
        batch = ForwardBatch(
            token_ids=torch.tensor([token for tokens in pieces.values() for token in tokens]),
            positions=torch.cat(list(positions.values())),
            slot_mapping=torch.cat([self._slots(name, where) for name, where in positions.items()]),
            query_starts=torch.tensor([0, *accumulate(map(len, pieces.values()))], dtype=torch.int32),
            context_lens=torch.tensor([self._lengths[name] for name in pieces], dtype=torch.int32),
            block_tables=torch.nn.utils.rnn.pad_sequence(tables, batch_first=True),
            state_rows=self._state_rows(starts) if self.cache.states else None,
            num_read=None if num_read is None else np.array(num_read, np.int64),
        )
        logits = run(self.decoder, batch, self.cache)
        return dict(zip(pieces, logits.split([len(tokens) for tokens in pieces.values()]), strict=True))

    def run(self, name: str, tokens: Sequence[int], chunks: Sequence[int]) -> Tensor:
        """Append the tokens chunk by chunk, what is left over one by one; return all logits."""
        borders = [0, *accumulate(chunks)]
        borders += range(borders[-1] + 1, len(tokens) + 1)
        pieces = [list(tokens[start:stop]) for start, stop in pairwise(borders)]
        return torch.cat([self.step({name: piece})[name] for piece in pieces])

    def truncate(self, name: str, num_tokens: int) -> None:
        """Take back a sequence's last tokens; what they have written stays where it is until it is overwritten."""
        assert num_tokens <= self._lengths[name], f"{name} has {self._lengths[name]} tokens"
        self._lengths[name] = num_tokens

    def table(self, name: str) -> list[int]:
        """Return a sequence's blocks."""
        return self._tables[name]

    def _grow(self, name: str, count: int) -> int:
        start = self._lengths.get(name, 0)
        table = self._tables.setdefault(name, [])
        self._lengths[name] = start + count
        while len(table) * self.cache.block_size < start + count:
            table.append(self._free.pop())
        return start

    def _state_rows(self, starts: dict[str, int]) -> StateRows:
        before = {name: self._committed.get(name, 0) for name in starts}
        for name in starts:
            self._committed[name] = max(before[name], self._lengths[name] - self._lag)
        slots = [list(self._committed).index(name) for name in starts]
        read = [slot if starts[name] else -1 for name, slot in zip(starts, slots, strict=True)]
        after = [self._committed[name] for name in starts]
        rows = (torch.tensor(each, dtype=torch.int32) for each in (read, list(before.values()), slots, after))
        return StateRows(*rows, torch.full((len(starts), MAX_SNAPSHOTS, 2), -1, dtype=torch.int32))

    def _slots(self, name: str, positions: Tensor) -> Tensor:
        block_size = self.cache.block_size
        return torch.tensor(self._tables[name])[positions // block_size] * block_size + positions % block_size


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tensors here are too small to share out; threads that wait for each other only make the tests slow."""
    threads = torch.get_num_threads()
    set_num_threads(1)
    yield
    set_num_threads(threads)


@pytest.fixture(scope="session", params=["torch", "cpp"])
def back_end(request: pytest.FixtureRequest) -> BackEnd:
    if request.param == "cpp" and not usable_isas():
        pytest.skip("the C++ kernels were not built")
    return choose_back_end(torch.device("cpu"), request.param)


@pytest.fixture(scope="session")
def paged_runner() -> type[PagedRunner]:
    return PagedRunner
