"""Rows of a step that are read: a program computes the others up to the last op that keeps something of a token.

Tokens of a prompt are computed for their keys, values and states. Behind the last op that keeps some, hidden states
serve the rows that are read alone: those with logits. That part is most of the last layer, and of models with layers
that read an earlier layer's cache all of these (Gemma 4 E2B: 20 of 35). A row depends on no other row of the step, so
its bits are the same.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.kernels.program import (
    Activations,
    LayerInputs,
    Op,
    OpTime,
    Program,
    ProgramTimer,
    RotaryWriteOp,
    live_after,
    run_ops,
)
from quire.kernels.special_ops import DeltaNetOp, MambaOp, ShortConvOp
from quire.kernels.tensors import Tensor, take_rows

Fuse = Callable[[Program], Program]


class ReadRows(NamedTuple):
    """The rows of a step that are read: the last ones of each sequence."""

    rows: NDArray[np.int64]     # [num_rows], those of a sequence ascending
    entries: NDArray[np.int64]  # [num_seqs], the sequences that have some
    query_starts: Tensor        # [num_seqs + 1] int32, among the rows

    @classmethod
    def of(cls, query_starts: NDArray[np.int32], num_read: NDArray[np.int64]) -> "ReadRows":
        """Return them for sequences that begin at `query_starts` [S + 1], by the number of each one's last rows [S]."""
        entries = num_read.nonzero()[0]
        counts, stops = num_read[entries], query_starts[1:][entries]
        starts = np.zeros(len(entries) + 1, np.int32)
        starts[1:] = counts.cumsum()
        rows = np.arange(starts[-1]) + (stops - starts[1:]).repeat(counts)
        return cls(rows, entries, starts)

    def inputs_of(self, inputs: LayerInputs) -> LayerInputs:
        """Return the inputs of ops that read caches, and no states, for these rows."""
        rows, metadata, adapters, token_ids = self.rows, inputs.metadata, inputs.adapters, inputs.token_ids
        return replace(
            inputs,
            positions=take_rows(inputs.positions, rows),
            slot_mapping=take_rows(inputs.slot_mapping, rows),
            metadata=replace(
                metadata,
                block_tables=take_rows(metadata.block_tables, self.entries),
                query_starts=self.query_starts,
                context_lens=take_rows(metadata.context_lens, self.entries),
                seen_ends=None if metadata.seen_ends is None else take_rows(metadata.seen_ends, rows),
                plans={},
            ),
            adapters=None if adapters is None else adapters._replace(of_row=take_rows(adapters.of_row, rows)),
            state_rows=None,
            token_ids=None if token_ids is None else take_rows(token_ids, rows),
            read_rows=None,
        )


class ReadRowsOp:
    """Ops behind the last one that keeps something of a token, for the rows that are read: the result has no others."""

    def __init__(self, name: str, program: Program, reads: tuple[str, ...]) -> None:
        self.name, self.program, self.reads, self.writes = name, program, reads, (program.result,)
        self._timer: ProgramTimer | None = None

    def run(self, activations: Activations, inputs: LayerInputs) -> None:
        """Take the rows, and run the ops."""
        read = inputs.read_rows
        assert read is not None, "a step that reads all rows"
        own = {name: take_rows(activations[name], read.rows) for name in self.reads}
        program = self.program if self._timer is None else self._timer.timed
        run_ops(program.ops, program.dead, own, read.inputs_of(inputs))
        activations[program.result] = own[program.result]

    def fused(self, fuse: Fuse) -> "ReadRowsOp":
        """Return the op with its own ops fused."""
        return ReadRowsOp(self.name, fuse(self.program), self.reads)

    def start_timing(self) -> None:
        """Time each op of the runs to come."""
        self._timer = ProgramTimer(self.program)

    def stop_timing(self) -> list[OpTime]:
        """Return the times of the ops, in their order."""
        assert self._timer is not None, "nothing is timed"
        times, self._timer = self._timer.stop(), None
        return times


def keeps_something(op: Op) -> bool:
    """Return whether an op writes to a cache or a state."""
    return isinstance(op, ShortConvOp | DeltaNetOp | MambaOp) or (isinstance(op, RotaryWriteOp) and op.key is not None)


def of_read_rows(program: Program) -> Program | None:
    """Return the program with what follows the last op that keeps something as one op; None if no op does."""
    kept = [index for index, op in enumerate(program.ops) if keeps_something(op)]
    if not kept:
        return None
    ops, behind = program.ops, kept[-1] + 1
    reads = tuple(sorted(live_after(ops, program.result)[kept[-1]]))
    rest = ReadRowsOp("read_rows", Program(ops[behind:], program.result), reads)
    return Program((*ops[:behind], rest), program.result)
