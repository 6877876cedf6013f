"""Inputs of a step on a GPU: arrays in one buffer, which goes up in one transfer.

A buffer is as long as its step, or as the graph that the step is padded to. Padding are rows without a sequence, of
context length 0, tokens of slot -1, which read and write nothing, and draws for no row.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.execution.batch import StepInputs
from quire.kernels.low_rank import RowAdapters
from quire.kernels.sampling import SETTINGS
from quire.model.kv_cache import ALIGNMENT
from quire.model.language_model import ForwardBatch

IDLE = np.array((1, 0, 0, 0, 1), SETTINGS)  # a row without a sequence draws its highest logit


class Draws(NamedTuple):
    """The draws of a graph: settings float64 [num_rows, 4], SETTINGS a row, the others int64 [num_rows]."""

    settings: Tensor
    rows: Tensor        # where the drawn tokens are written: the last tokens of all rows
    logit_rows: Tensor  # the token of the batch behind which each is drawn; of decodes, the row's own


class DeviceInputs(NamedTuple):
    """Inputs on the device. The batch has block tables of no columns."""

    forward: ForwardBatch
    rows: Tensor         # int64 [num_rows], of the block tables
    draws: Draws | None


class _Places:
    """Places of arrays in a buffer of bytes, each at a multiple of `ALIGNMENT`. parts: dtype and elements of each."""

    def __init__(self, parts: Sequence[tuple[torch.dtype, int]]) -> None:
        self._parts = parts
        sizes = (length * dtype.itemsize for dtype, length in parts)
        *self._starts, self.num_bytes = accumulate((size + -size % ALIGNMENT for size in sizes), initial=0)

    def write(self, arrays: Sequence[tuple[NDArray[Any], Any]], device: torch.device) -> Tensor:
        """Return arrays in host memory, which is pinned for a GPU; each with a filler for the end of its place.

        torch keeps pinned memory from being handed out again before its transfers are over.
        """
        buffer = torch.empty(self.num_bytes, dtype=torch.uint8, pin_memory=device.type == "cuda")
        memory = buffer.numpy()
        for start, (dtype, length), (values, filler) in zip(self._starts, self._parts, arrays, strict=True):
            place = memory[start : start + length * dtype.itemsize].view(values.dtype)
            place[: len(values)] = values
            place[len(values) :] = filler
        return buffer

    def views(self, buffer: Tensor) -> list[Tensor]:
        """Return the arrays of a buffer on any device, in one dimension."""
        places = zip(self._starts, self._parts, strict=True)
        return [buffer.narrow(0, start, length * dtype.itemsize).view(dtype) for start, (dtype, length) in places]


class InputLayout:
    """Places of a step's inputs, of its own sizes or of a graph's."""

    def __init__(self, num_rows: int, num_tokens: int, has_adapters: bool = False, draws: bool = False) -> None:
        self._num_rows, self._num_tokens = num_rows, num_tokens
        of_tokens, of_rows = (torch.int64, num_tokens), (torch.int64, num_rows)
        parts = [of_tokens, of_tokens, of_tokens, (torch.int32, num_rows + 1), (torch.int32, num_rows), of_rows]
        parts += [(torch.int32, num_tokens)] * has_adapters + [(torch.float64, 4 * num_rows), of_rows, of_rows] * draws
        self._places = _Places(parts)
        self.num_bytes = self._places.num_bytes

    def pack(
        self, inputs: StepInputs, settings: NDArray[np.void] | None, idle_row: int, device: torch.device
    ) -> Tensor:
        """Return a step of at most this size in host memory, with the settings of its draws, if it has any.

        `idle_row`: of `Draws`, for the tokens of no sequence. In a graph of decodes each row without a sequence has a
        token, in the others none.
        """
        batch = inputs.forward
        is_mixed = self._num_tokens > self._num_rows
        ends = len(batch.token_ids) if is_mixed else np.arange(len(inputs.rows) + 1, self._num_rows + 1)
        arrays: list[tuple[NDArray[Any], Any]] = [
            (np.asarray(batch.token_ids), 0),
            (np.asarray(batch.positions), 0),
            (np.asarray(batch.slot_mapping), -1),
            (np.asarray(batch.query_starts), ends),
            (np.asarray(batch.context_lens), 0),
            (inputs.rows, 0),
        ]
        if batch.adapters is not None:
            arrays.append((np.asarray(batch.adapters.of_row), -1))
        if settings is not None:
            arrays += [(settings, IDLE), (inputs.sample_rows, idle_row), (inputs.logit_rows, 0)]
        return self._places.write(arrays, device)

    def inputs(self, buffer: Tensor, adapters: RowAdapters | None) -> DeviceInputs:
        """Return the inputs in a buffer on the device; `adapters` with the rows that are in it."""
        token_ids, positions, slots, starts, lens, rows, *others = self._places.views(buffer)
        if adapters is not None:
            adapters = adapters._replace(of_row=others.pop(0))
        tables = torch.empty(self._num_rows, 0, dtype=torch.int32, device=buffer.device)
        batch = ForwardBatch(token_ids, positions, slots, starts, lens, tables, adapters=adapters)
        return DeviceInputs(batch, rows, Draws(others[0].view(-1, 4), *others[1:]) if others else None)


def upload(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    """Return arrays of one dimension on the device, in one transfer, without waiting for it."""
    places = _Places([(torch.from_numpy(array).dtype, len(array)) for array in arrays])
    return places.views(places.write([(array, 0) for array in arrays], device).to(device, non_blocking=True))
