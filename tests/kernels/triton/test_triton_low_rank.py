"""Adapters in slots of a device against those of PyTorch: addends, reuse of slots, and bits of rows without one."""

import pytest
import torch

from kernels.triton.test_products import random
from quire.kernels.linear_weight import LinearWeight
from quire.kernels.low_rank import AdapterWeights, FactorSizes, RowAdapters
from quire.kernels.reference.linear import TorchUp, low_rank_addend
from quire.kernels.triton.triton_linear import CudaLinear
from quire.kernels.triton.triton_low_rank import KeptUp, TritonSlots
from support.adapters import adapter, random_layer
from support.interpreter import rows_alike

# inner results of rows without an adapter are never written and never read
pytestmark = pytest.mark.filterwarnings("ignore:.*(overflow|invalid value) encountered:RuntimeWarning")
WIDTH, OUTPUTS, MAX_RANK = 40, 72, 20
SIZES = {"up": FactorSizes(WIDTH, OUTPUTS, ((0, 16), (16, 16), (32, 40))), "down": FactorSizes(8, 12, ((0, 12),))}
RANGES = [[(0, 16, 4), (32, 40, 20)], [(16, 16, 1)], [(0, 16, 7), (16, 16, 8), (32, 40, 16)]]


def adapters_of(dtype: torch.dtype, width: int = WIDTH) -> list[AdapterWeights]:
    """Return three adapters of the op `up`: of some modules, of one, and of all."""
    return [
        adapter(up=random_layer(CudaLinear, KeptUp, width, OUTPUTS, ranges, dtype, seed)[0])
        for seed, ranges in enumerate(RANGES)
    ]


def addend(slots: TritonSlots, adapters: list[AdapterWeights], of_row: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the addend of the op `up`; of_row are indices of `adapters`."""
    places = torch.tensor([*slots.place(adapters), -1], dtype=torch.int32)
    rows = RowAdapters((), places[of_row].to(x.device), slots).grouped()
    found = rows.addend("up", x)
    assert found is not None
    assert rows.addend("another", x) is None
    return found.cpu()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 40), (9, 39), (200, 40)])  # 39 inputs are not cut into parts
def test_addends_are_those_of_each_rows_adapter(
    num_rows: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    sizes = {"up": FactorSizes(width, OUTPUTS, SIZES["up"].parts)}
    slots, x = TritonSlots(sizes, 3, MAX_RANK, dtype, device), random(num_rows, width).to(dtype)
    of_row, tolerance = torch.arange(num_rows, dtype=torch.int32) % 4 - 1, 1e-4 if dtype == torch.float32 else 1e-2
    found = addend(slots, adapters_of(dtype, width), of_row, x.to(device))
    for index, ranges in enumerate(RANGES):
        own, (_, factors) = of_row == index, random_layer(CudaLinear, KeptUp, width, OUTPUTS, ranges, dtype, index)
        expected = torch.zeros(int(own.sum()), OUTPUTS)
        for (first, count, _), (down, up) in zip(ranges, factors, strict=True):
            expected[:, first : first + count] = low_rank_addend(x[own], down, up.float(), 1.0)
        torch.testing.assert_close(found[own], expected, rtol=tolerance, atol=tolerance)
    without = found[of_row == -1].view(torch.int32)
    assert (without == torch.tensor(-0.0).view(torch.int32)).all()


def test_slot_not_used_for_longest_is_reused_with_nothing_left_in_it(device: torch.device) -> None:
    slots, (first, second, third) = TritonSlots(SIZES, 2, MAX_RANK, torch.float32, device), adapters_of(torch.float32)
    x, of_row = random(3, WIDTH).to(device), torch.zeros(3, dtype=torch.int32)
    expected = addend(TritonSlots(SIZES, 1, MAX_RANK, torch.float32, device), [second], of_row, x)
    assert slots.place([first, third]) == [0, 1]
    assert slots.place([first]) == [0]
    assert slots.place([second]) == [1]
    assert torch.equal(addend(slots, [second], of_row, x), expected)
    assert slots.place([second, first]) == [1, 0]
    assert slots.place([third]) == [1]
    assert slots.place([third, second]) == [1, 0]


def test_slot_of_an_adapter_that_is_gone_is_free(device: torch.device) -> None:
    slots = TritonSlots(SIZES, 2, MAX_RANK, torch.float32, device)
    kept, gone = adapters_of(torch.float32)[:2]
    assert slots.place([gone, kept]) == [0, 1]
    del gone
    (other,) = adapters_of(torch.float32)[2:]
    assert slots.place([kept, other]) == [1, 0]


def test_adapter_of_which_only_a_part_was_copied_is_copied_again(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    slots, (first, second) = TritonSlots(SIZES, 1, MAX_RANK, torch.float32, device), adapters_of(torch.float32)[:2]
    x, of_row = random(3, WIDTH).to(device), torch.zeros(3, dtype=torch.int32)
    expected = [addend(slots, [each], of_row, x) for each in (second, first)]
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            slots.place([second])
    for each, own in zip((second, first), expected, strict=True):
        assert torch.equal(addend(slots, [each], of_row, x), own)


@pytest.mark.parametrize("num_rows", [5, 90])
def test_rows_of_an_exact_layer_keep_their_bits_beside_adapters(
    num_rows: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows_alike(monkeypatch)
    slots = TritonSlots(SIZES, 3, MAX_RANK, torch.float16, device, is_exact=True)
    layer = CudaLinear(LinearWeight.dense(random(OUTPUTS, WIDTH, seed=5).half().to(device)), is_exact=True)
    adapters, x = adapters_of(torch.float16), random(num_rows, WIDTH).half().to(device)
    of_row = torch.arange(num_rows, dtype=torch.int32) % 4 - 1
    mixed, plain = layer(x, addend(slots, adapters, of_row, x).to(device)), layer(x)
    for row in range(4):
        if of_row[row] == -1:
            assert torch.equal(mixed[row].view(torch.int16), plain[row].view(torch.int16))
            continue
        alone = layer(x[row : row + 1], addend(slots, adapters, of_row[row : row + 1], x[row : row + 1]).to(device))
        assert torch.equal(mixed[row], alone[0])
        assert not torch.equal(mixed[row], plain[row])


def test_factors_in_host_memory_multiply_as_pytorchs() -> None:
    up, inner = random(12, 3), random(2, 3, seed=4)
    torch.testing.assert_close(KeptUp(up)(inner), TorchUp(up)(inner))
