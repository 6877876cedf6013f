"""StepPlan and StepResult: the whole control message of a step, and its answer (Kwon et al. 2023, section 4.6).

A plan carries changes, not the world. The worker keeps one row per running sequence: its tokens, its block table and
its sampling parameters. A plan fills rows, sets block table entries, and says which rows advance by how many
tokens. Both are plain data: integers, lists, arrays and small records, ready to be sent over a wire.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from msgspec import Struct, field
from numpy.typing import NDArray

from quire.core.beam_search_params import BeamSearchParams
from quire.core.outputs import TokenLogprobs
from quire.core.sampling_params import SamplingParams

BlockIds = list[int] | NDArray[np.int64]  # of a whole table: thousands, so an array


class BlockCopy(NamedTuple):
    """Copy one physical block over another, in every layer, before the step's forward pass.

    Within the cache (copy-on-write), from it to the swap space, or back: the list it is in tells the tiers.
    """

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that begins, or begins again after a preemption, in a row of the worker."""

    row: int
    token_ids: Sequence[int]                           # all known tokens: TokenIds, whose prompt is not a copy
    num_prompt_tokens: int
    block_ids: BlockIds                                # its block table when the plan was made
    params: SamplingParams
    seed: int                                          # of this branch
    eos_token_ids: frozenset[int] = frozenset()        # tokens that min_tokens forbids, besides params.stop_token_ids
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    beam: BeamSearchParams | None = None               # its samples bring the likeliest tokens, as logprobs


class RowFork(NamedTuple):
    """A beam goes on in `row`, from the first `num_tokens` tokens of row `source`, with `token_id` behind them.

    Both rows are of one request, so they hold the same prompt. Where it stays in its row, that is `source`, too, and
    keeps its block table; else `block_ids` is the whole table.
    """

    row: int
    source: int
    num_tokens: int
    token_id: int
    block_ids: BlockIds


class StepPlan(Struct, frozen=True):
    """One step: who runs, how many tokens each, on which blocks.

    Order of effects: `row_forks`, `new_rows`, table entries, `swap_outs`, `swap_ins`, `copies`, then one forward pass
    over the entries. So a block that is swapped out may be overwritten in the same step, and one that is swapped in may
    be copied. A new row replaces whatever stood there: a row whose sequence has ended is not computed until it has a
    new owner.
    Entry i advances row `rows[i]` over positions [starts[i], starts[i] + counts[i]). Sample j is drawn from the
    logits of entry `sample_entries[j]`'s last token and becomes the next token of row `sample_rows[j]`: the same
    row in most cases, the rows of all branches when a prompt of n > 1 has just been computed. Entries in
    `stored_entries` are of one token whose keys and values are in the cache: its logits are wanted, nothing is written.
    """

    row_forks: list[RowFork] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)      # block table entry [table_rows[i], table_columns[i]]
    table_columns: list[int] = field(default_factory=list)
    table_blocks: list[int] = field(default_factory=list)    # becomes table_blocks[i]
    swap_outs: list[BlockCopy] = field(default_factory=list)  # src in the cache, dst in the swap space
    swap_ins: list[BlockCopy] = field(default_factory=list)   # the other way
    copies: list[BlockCopy] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    sample_entries: list[int] = field(default_factory=list)
    stored_entries: list[int] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Nothing to compute."""
        return not self.rows


@dataclass(frozen=True, slots=True)
class PromptLogprobsChunk:
    """Logprobs of the prompt tokens at positions [start, start + len(tokens)) of the sequence in `row`."""

    row: int
    start: int                                         # at least 1: the first token has nothing before it
    tokens: list[TokenLogprobs]


class MeasuredRates(NamedTuple):
    """What the worker does per second, of late: the scheduler has no clock. None: not known yet."""

    prefill_tokens_per_s: float | None = None
    swap_out_blocks_per_s: float | None = None
    swap_in_blocks_per_s: float | None = None


UNMEASURED = MeasuredRates()


class StepResult(Struct, frozen=True):
    """What a step gave: one token per sample of the plan, in the plan's order.

    `failures`: rows whose tokens or logprobs could not be had, and why; what stands for them elsewhere means nothing.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None       # None: no sample asked for them
    prompt_logprobs: list[PromptLogprobsChunk] = field(default_factory=list)
    swap_s: float = 0.0                                      # spent on swapping, both ways
    rates: MeasuredRates = UNMEASURED
    failures: dict[int, str] = field(default_factory=dict)
