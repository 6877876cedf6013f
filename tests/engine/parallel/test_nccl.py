"""Exchanges between GPUs, over gloo and a stand-in for a process group: values, and what a graph must not contain."""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch._C._distributed_c10d import Store
from torch.distributed import ProcessGroup, ProcessGroupGloo
from torch.utils._python_dispatch import TorchDispatchMode

from quire.engine.parallel import nccl
from quire.engine.parallel.nccl import (
    COLLECTIVE_TIMEOUT,
    InterruptedCollectiveError,
    NcclRanks,
    file_store,
    open_group,
)
from quire.extension.isas import usable_isas
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.reference.linear import make_linear
from quire.model.sharding import Cut, Shard
from support.imitated_gpu import gloo_group

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

HOST = torch.device("cpu")
CUT = Cut((0, 5, 8, 8 + 7))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[NcclRanks]]:
    """Return three ranks that are connected by gloo."""
    monkeypatch.setattr(nccl, "open_group", gloo_group)
    book = os.memfd_create("book")
    found = [NcclRanks(Shard(rank, 3, "reduce"), HOST, file_store(book, 3)) for rank in range(3)]
    os.close(book)
    run(found, NcclRanks.reset)
    yield found
    for each in found:
        each.close()


def run(ranks: list[NcclRanks], call: Callable[[NcclRanks], Any]) -> list[Any]:
    """Return what `call` returns for each rank, all at once."""
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(call, ranks))


@pytest.mark.parametrize("num_rows", [0, 1, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_gets_the_columns_of_all(ranks: list[NcclRanks], num_rows: int, dtype: torch.dtype) -> None:
    whole = torch.randn(num_rows, CUT.width).to(dtype)
    hooks = [rank.gather(CUT) for rank in ranks]
    assert [(hook.num_own, hook.width) for hook in hooks] == [(5, 15), (3, 15), (7, 15)]
    found = run(ranks, lambda rank: rank.gather(CUT)(whole[:, slice(*CUT.of(rank.shard.rank))]))
    assert all(torch.equal(each, whole) for each in found)


@pytest.mark.parametrize("num_rows", [0, 1, 6])
def test_every_rank_gets_the_same_sums(ranks: list[NcclRanks], num_rows: int) -> None:
    parts = torch.randn(3, num_rows, 40)
    hook = ranks[0].sum(40)
    assert hook.partial_dtype is None
    found = run(ranks, lambda rank: rank.sum(40)(parts[rank.shard.rank].clone(), torch.float32))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[0], parts.sum(0))


def test_rows_of_the_first_rank_reach_all(ranks: list[NcclRanks]) -> None:
    rows = torch.arange(12)[:, None]
    found = run(ranks, lambda rank: rank.broadcast(None if rank.shard.rank else rows, (12, 1), torch.int64))
    assert all(torch.equal(each, rows) for each in found)


def test_first_rank_has_the_logits_of_all(ranks: list[NcclRanks]) -> None:
    weight, x = torch.randn(CUT.width, 8), torch.randn(4, 8)

    def logits(rank: NcclRanks) -> Tensor:
        own = make_linear(LinearWeight.dense(weight[slice(*CUT.of(rank.shard.rank))]), dtype=torch.float32)
        return rank.joined_head(own, CUT)(x)

    found = run(ranks, logits)
    torch.testing.assert_close(found[0], x @ weight.T)
    assert [each.shape for each in found[1:]] == [(0, CUT.width)] * 2


class Group:
    """A process group of two alike ranks that keeps what it is asked for. What it launches is done at once."""

    def __init__(self) -> None:
        self.options: list[Any] = []
        self.num_aborts = 0

    def allreduce(self, tensors: list[Tensor], options: object) -> None:
        self.options.append(options)
        tensors[0].mul_(2)

    def broadcast(self, tensors: list[Tensor], options: object) -> None:
        self.options.append(options)

    def _allgather_base(self, received: Tensor, sent: Tensor, options: object) -> None:
        self.options.append(options)
        received.copy_(sent.repeat(2))

    def abort(self) -> None:
        self.num_aborts += 1


class CaptureRules(TorchDispatchMode):
    """Refuses ops that a graph cannot contain: those that need values on the host, or memory of it."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch would import its compiler for 3 s."""
        return False

    def __torch_dispatch__(self, op: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
        kwargs = kwargs or {}
        reads_values = ("_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique")
        assert op._schema.name.removeprefix("aten::") not in reads_values, f"{op} waits for the device"
        assert torch.device(kwargs.get("device") or "meta").type == "meta", f"{op} leaves the device"
        assert not kwargs.get("pin_memory"), f"{op} allocates on the host"
        return op(*args, **kwargs)


def test_exchanges_can_be_captured() -> None:
    """On tensors without values, with collectives in the stream of their caller."""
    group: Any = Group()
    book = os.memfd_create("book")
    ranks, cut = NcclRanks(Shard(0, 2), torch.device("meta"), file_store(book, 2)), Cut((0, 5, 8))
    os.close(book)
    ranks._group = group
    own = torch.empty(3, 8, device="meta", dtype=torch.bfloat16)
    with CaptureRules():
        assert ranks.sum(8)(own, torch.bfloat16).data_ptr() == own.data_ptr()  # written in place
        assert ranks.gather(cut)(own[:, :5]).shape == (3, 8)
        assert ranks.broadcast(None, (3, 1), torch.int64).shape == (3, 1)
        ranks.broadcast(own, own.shape, own.dtype)
    assert len(group.options) == 4
    assert all(options.asyncOp is False for options in group.options)
    with pytest.raises(AssertionError, match="waits for the device"), CaptureRules():
        _ = own.sum().item()
    ranks.close()
    ranks.close()
    assert group.num_aborts == 1
    with pytest.raises(InterruptedCollectiveError):
        ranks.sum(8)(own, torch.bfloat16)


class Nccl(ProcessGroupGloo):
    """Stands in for torch's `ProcessGroupNCCL`, of which only torch with CUDA has one."""

    class Options:
        """Options."""

    connected: ClassVar[list[torch.device]] = []

    def __init__(self, store: Store, rank: int, size: int, options: Any) -> None:  # noqa: ANN401
        assert options._timeout == COLLECTIVE_TIMEOUT
        super().__init__(store, rank, size, options._timeout)

    def eager_connect_single_device(self, device: torch.device) -> None:
        self.connected.append(device)


def test_group_is_connected_when_it_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """A first collective that connects would do so in a graph."""
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Nccl, raising=False)
    group = open_group(torch._C._distributed_c10d.HashStore(), Shard(0, 1), HOST)
    assert Nccl.connected == [HOST]
    assert isinstance(group, ProcessGroup)
    total = torch.ones(3)
    group.allreduce([total], nccl.SUM)


def test_rank_that_waits_for_the_others_can_be_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, released = threading.Event(), threading.Event()

    def wait(*parts: object) -> None:
        begun.set()
        released.wait()

    monkeypatch.setattr(nccl, "open_group", wait)
    book = os.memfd_create("book")
    ranks = NcclRanks(Shard(0, 2), HOST, file_store(book, 2))
    os.close(book)
    with ThreadPoolExecutor(1) as threads:
        connecting = threads.submit(ranks.reset)
        begun.wait()
        ranks.interrupt()
        with pytest.raises(InterruptedCollectiveError, match="did not find each other"):
            connecting.result()
    released.set()


def test_error_of_connecting_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*parts: object) -> None:
        raise RuntimeError("NCCL error")

    monkeypatch.setattr(nccl, "open_group", fail)
    book = os.memfd_create("book")
    with pytest.raises(RuntimeError, match="NCCL error"):
        NcclRanks(Shard(0, 2), HOST, file_store(book, 2)).reset()
    os.close(book)
