"""Adapters in Triton: the addends of `low_rank.RowAdapters`, for many adapters at once.

The factors of the adapters that a step uses are on the device, each adapter in a slot of one stacked weight for each
layer, padded with zeros to the highest rank. Rows are grouped by slot once a step. A layer's addend is one grouped
product with A of all its modules, and one with B of each; rows without an adapter are in no group and keep the addend
-0. A has few outputs and many inputs, so its inputs are cut into parts, each a group of its own, with sums that are
added in their order. An adapter is copied when a step first needs it, in the place of the one that was not used for
longest. All launches follow from the number of rows, so steps with adapters are captured as graphs.
"""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.linear_weight import LinearWeight
from quire.kernels.low_rank import NOTHING, AdapterWeights, FactorSizes, LowRankLayer
from quire.kernels.triton.products import pack, product, tile_height
from quire.kernels.triton.row_groups import RowGroups, add_in_order, group_rows
from quire.kernels.triton.triton_linear import CudaLinear

RANK_MULTIPLE = 16  # rows of B are read 16 bytes at a time
NUM_PARTS = 8       # parts of A's inputs, where they can be cut into as many


class SlotGroups(NamedTuple):
    """Rows by slot, and parts of rows by slot and part."""

    rows: RowGroups
    parts: RowGroups


class KeptUp:
    """B [num_outputs, rank] of an adapter in host memory, from which it is copied to a slot."""

    def __init__(self, weight: Tensor) -> None:
        self.weight, self.num_bytes = weight, weight.nbytes

    def __call__(self, inner: Tensor, /) -> Tensor:
        """Multiply all rows, on the host."""
        return F.linear(inner.float(), self.weight.float())


class TritonSlots:
    """Adapters on a device that computes all of a step together: memory for some of them, each in a slot.

    `sizes` are those of each linear op's factors.
    """

    def __init__(
        self, sizes: Mapping[str, FactorSizes], num_slots: int, max_rank: int, dtype: torch.dtype, device: torch.device,
        *, is_exact: bool = False,
    ) -> None:  # fmt: skip
        rank = max_rank + -max_rank % RANK_MULTIPLE
        shared = num_slots, rank, dtype, device, is_exact
        self._layers = {name: _SlotLayer(each, *shared) for name, each in sizes.items()}
        self._is_exact = is_exact
        self._owners: list[weakref.ref[AdapterWeights] | None] = [None] * num_slots
        self._by_use = list(range(num_slots))  # the slot not used for longest first

    def place(self, adapters: Sequence[AdapterWeights]) -> list[int]:
        """Return the slots of a step's adapters, at most as many as there are slots; copy those that have none.

        Copies run in the order of launches.
        """
        owners = [None if owner is None else owner() for owner in self._owners]
        places = {id(owner): slot for slot, owner in enumerate(owners) if owner is not None}
        needed = {id(adapter) for adapter in adapters}
        free = iter([slot for slot in self._by_use if owners[slot] is None or id(owners[slot]) not in needed])
        slots = []
        for adapter in adapters:
            slot = places.get(id(adapter))
            if slot is None:
                slot = next(free)
                self._owners[slot] = None  # while it is filled, and if that fails
                for name, layer in self._layers.items():
                    layer.fill(slot, adapter.layers.get(name))
                self._owners[slot] = weakref.ref(adapter)
            slots.append(slot)
        self._by_use = [slot for slot in self._by_use if slot not in slots] + slots
        return slots

    def group(self, of_row: Tensor) -> SlotGroups:
        """Return rows by slot, for all layers of a step, in tiles of 16 while there are few for each slot.

        of_row: int32 [num_rows]; -1: none.
        """
        num_slots, parts = len(self._owners), torch.arange(NUM_PARTS, dtype=torch.int32, device=of_row.device)
        height = tile_height(len(of_row) // num_slots, is_exact=self._is_exact)
        of_part = torch.where(of_row[:, None] < 0, -1, of_row[:, None] * NUM_PARTS + parts).flatten()
        return SlotGroups(group_rows(of_row, num_slots, height), group_rows(of_part, num_slots * NUM_PARTS, height))

    def addend(self, name: str, x: Tensor, groups: object) -> Tensor | None:
        """Return the addend of the linear op `name`, as `RowAdapters`; None if the op can have none."""
        assert isinstance(groups, SlotGroups), "rows without groups"
        layer = self._layers.get(name)
        return None if layer is None else layer.addend(x, groups)


class _SlotLayer:
    """Factors of one linear op in all slots."""

    def __init__(
        self, sizes: FactorSizes, num_slots: int, rank: int, dtype: torch.dtype, device: torch.device, is_exact: bool
    ) -> None:
        def zeros(*shape: int) -> Tensor:
            return torch.zeros(num_slots, *shape, dtype=dtype, device=device)

        self._sizes, self._rank, self._dtype, self._is_exact = sizes, rank, dtype, is_exact
        num_parts = 1 if sizes.width % NUM_PARTS else NUM_PARTS
        self._down = zeros(num_parts, len(sizes.parts) * rank, sizes.width // num_parts)
        self._ups = [zeros(num_outputs, rank) for _, num_outputs in sizes.parts]
        self._packed_down, *self._packed_ups = (
            replace(pack(LinearWeight.dense(each.view(-1, each.shape[-1]))), out_features=each.shape[-2])
            for each in (self._down, *self._ups)
        )

    def fill(self, slot: int, layer: LowRankLayer | None) -> None:
        """Replace the factors of a slot; None: by zeros."""
        for tensor in (self._down, *self._ups):
            tensor[slot].zero_()
        if layer is None:
            return
        assert isinstance(layer.down, CudaLinear), "factors of another back end"
        firsts = [first for first, _ in self._sizes.parts]
        for part in layer.parts:
            assert isinstance(part.up, KeptUp), "factors of another back end"
            index = firsts.index(part.first_output)
            rows = layer.down.weight.elements[part.first_input : part.first_input + part.rank]
            down = self._down[slot, :, index * self._rank : index * self._rank + part.rank]
            down.copy_(rows.unflatten(1, (len(down), -1)).transpose(0, 1))  # [num_parts, rank, inputs]
            self._ups[index][slot, :, : part.rank].copy_(part.up.weight)

    def addend(self, x: Tensor, groups: SlotGroups) -> Tensor:
        """Return float32 [num_rows, num_outputs] for x [num_rows, width]."""
        num_parts, width = self._down.shape[1], self._down.shape[3]
        own_groups, dtype = (groups.rows, self._dtype) if num_parts == 1 else (groups.parts, torch.float32)
        inner = product(
            x.reshape(-1, width), self._packed_down, dtype=dtype, is_exact=self._is_exact, groups=own_groups
        )
        if num_parts > 1:
            inner = add_in_order(inner.view(len(x), num_parts, -1), self._dtype)
        addend = torch.full((len(x), self._sizes.num_outputs), NOTHING, device=x.device)
        for index, (first, num_outputs) in enumerate(self._sizes.parts):
            own = inner[:, index * self._rank : (index + 1) * self._rank]
            out = addend[:, first : first + num_outputs]
            up, is_exact = self._packed_ups[index], self._is_exact
            product(own, up, dtype=torch.float32, is_exact=is_exact, groups=groups.rows, out=out)
        return addend
