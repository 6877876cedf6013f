"""Adapters of a worker's rows: those that the tokens of a step have, as linear layers need them."""

from collections.abc import Callable

import numpy as np

from quire.core.plan import StepPlan
from quire.kernels.low_rank import AdapterSlots, AdapterWeights, RowAdapters


class AdapterRows:
    """The adapters of the worker's rows. `weights` returns an adapter by its digest; `slots`: of a device with some."""

    def __init__(self, weights: Callable[[str], AdapterWeights], slots: AdapterSlots | None = None) -> None:
        self._weights, self.slots = weights, slots
        self._digests = dict[int, str]()  # digests of rows that have one, or had until their sequence ended

    def of_step(self, plan: StepPlan) -> RowAdapters | None:
        """Apply a plan's new rows; return the adapters of its tokens, None if none of them has one."""
        for new in plan.new_rows:
            if new.scope.adapter is None:
                self._digests.pop(new.row, None)
            else:
                self._digests[new.row] = new.scope.adapter
        if not self._digests:
            return None
        found: dict[str, int] = {}
        digests = [self._digests.get(row) for row in plan.rows]
        of_entry = [-1 if each is None else found.setdefault(each, len(found)) for each in digests]
        if not found:
            return None
        of_row = np.array(of_entry, np.int32).repeat(plan.counts)
        adapters = [self._weights(digest) for digest in found]
        if self.slots is None:
            return RowAdapters(adapters, of_row)
        by_index = np.array([*self.slots.place(adapters), -1], np.int32)
        return RowAdapters((), by_index[of_row], self.slots)
