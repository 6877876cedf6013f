"""Exchange of activations through shared memory, by ranks that are threads."""

import threading
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from quire.engine.parallel.rank_messages import MemoryLayout
from quire.engine.parallel.shared_memory import SharedRanks
from quire.kernels.cpp.cpp_gather import InterruptedExchangeError
from quire.kernels.linear_weight import LinearWeight
from quire.model.sharding import Cut
from support.cpp_kernels import CppLinear
from support.on_tensors import called
from support.thread_ranks import in_threads, make_ranks

SMALL = MemoryLayout(region_bytes=512, max_rows=4, vocab_size=33)


def columns(whole: Tensor, cut: Cut, rank: SharedRanks) -> Tensor:
    return whole[:, slice(*cut.of(rank.shard.rank))].contiguous()


@pytest.mark.parametrize("bounds", [(0, 5, 12), (0, 12, 12), (0, 4, 4, 12), (0, 1, 2, 3, 12)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_all_ranks_get_the_columns_of_all(bounds: Sequence[int], dtype: torch.dtype) -> None:
    cut, counts = Cut(tuple(bounds)), [1, 3, 0, 400, 2]  # 400 rows take several parts
    wholes = [torch.randint(1000, (count, cut.width)).to(dtype) for count in counts]

    def exchange(rank: SharedRanks) -> list[Tensor]:
        gather = rank.gather(cut)
        return [called(gather, columns(whole, cut, rank)) for whole in wholes]

    for found in in_threads(make_ranks(len(bounds) - 1, SMALL), exchange):
        assert all(torch.equal(rows, whole) for rows, whole in zip(found, wholes, strict=True))


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_partial_sums_are_added_in_the_order_of_the_ranks(num_ranks: int, dtype: torch.dtype) -> None:
    """With few rows every rank adds all, with many a part; rows that do not fit into a region are added in portions."""
    width, counts = 37, [1, 3, 0, 900, 2]
    layout = MemoryLayout(region_bytes=num_ranks * 600 * width * 4, max_rows=4, vocab_size=33)
    partial = [torch.randn(num_ranks, count, width) * 10.0 ** torch.randint(-3, 4, (width,)) for count in counts]
    partial[0][0, 0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    expected = []
    for each in partial:
        sums = each[0].clone()
        for other in each[1:]:
            sums += other
        expected.append(sums.to(dtype))

    def exchange(rank: SharedRanks) -> list[Tensor]:
        add = rank.sum(width)
        return [called(add, each[rank.shard.rank], dtype) for each in partial]

    for found in in_threads(make_ranks(num_ranks, layout), exchange):
        for sums, right in zip(found, expected, strict=True):
            assert sums.dtype == dtype
            torch.testing.assert_close(sums, right, rtol=0, atol=0, equal_nan=True)


def test_partial_sums_that_do_not_fit_are_refused() -> None:
    def exchange(rank: SharedRanks) -> None:
        called(rank.sum(100), torch.zeros(1, 100), torch.float32)

    with pytest.raises(ValueError, match="partial sums of 800 bytes do not fit into a region"):
        in_threads(make_ranks(2, SMALL), exchange)


def test_rows_that_do_not_fit_are_refused() -> None:
    def exchange(rank: SharedRanks) -> None:
        called(rank.gather(Cut((0, 100, 200))), torch.zeros(1, 100))

    with pytest.raises(ValueError, match="a row of 800 bytes does not fit into a region"):
        in_threads(make_ranks(2, SMALL), exchange)


def test_broadcast_sends_rows_of_rank_0() -> None:
    sent = torch.arange(12).view(3, 4)

    def exchange(rank: SharedRanks) -> Tensor:
        return called(rank.broadcast, sent if rank.shard.rank == 0 else None, sent.shape, sent.dtype).clone()

    assert all(torch.equal(found, sent) for found in in_threads(make_ranks(3, SMALL), exchange))


def test_head_of_ranks_has_the_bits_of_one() -> None:
    weight, x = torch.randn(33, 24), torch.randn(9, 24)  # more rows than logits fit
    alone = CppLinear(LinearWeight.dense(weight))(x)

    def compute(rank: SharedRanks) -> Tensor:
        cut = rank.shard.cut(33)
        head = CppLinear(LinearWeight.dense(weight[slice(*cut.of(rank.shard.rank))]))
        joined = rank.joined_head(head, cut)
        return torch.cat([called(joined, x).clone(), called(joined, x[:2]).clone()])

    first, other = in_threads(make_ranks(2, SMALL), compute)
    assert torch.equal(first, torch.cat([alone, alone[:2]]))
    assert len(other) == 0


def test_interruption_ends_every_exchange_until_all_are_reset() -> None:
    ranks, cut = make_ranks(3, SMALL), Cut((0, 1, 2, 3))
    gathers, has_met = [rank.gather(cut) for rank in ranks], threading.Barrier(3)

    def exchange(rank: SharedRanks) -> Tensor:
        index = rank.shard.rank
        own = torch.full((2, 1), float(index))
        called(gathers[index], own)
        has_met.wait()
        if index == 2:
            rank.group.interrupt()
        for _ in range(2):
            with pytest.raises(InterruptedExchangeError):
                called(gathers[index], own)
        has_met.wait()
        rank.group.reset()
        has_met.wait()
        if index == 0:
            rank.group.resume()
        has_met.wait()
        return called(gathers[index], own)

    assert all(found.tolist() == [[0, 1, 2]] * 2 for found in in_threads(ranks, exchange))


def test_exchanges_keep_their_order_between_ranks_of_any_speed() -> None:
    cut, num_exchanges = Cut((0, 2, 4)), 2000

    def exchange(rank: SharedRanks) -> int:
        gather, own, wrong = rank.gather(cut), torch.empty(3, 2, dtype=torch.int64), 0
        for number in range(num_exchanges):
            own.fill_(2 * number + rank.shard.rank)
            found = called(gather, own)
            wrong += int(found[:, :2].ne(2 * number).any()) + int(found[:, 2:].ne(2 * number + 1).any())
        return wrong

    assert in_threads(make_ranks(2, SMALL), exchange) == [0, 0]
