"""StepPlan and StepResult: the control message of a step, and its answer (Kwon et al. 2023, section 4.6).

A plan carries changes, not the whole state. The worker keeps one row per running sequence: its tokens, its block table
and its sampling parameters. A plan fills rows, sets block table entries, and says which rows advance by how many
tokens, and behind which of these a token is sampled. Both are plain data and can be sent: see quire.core.plan.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct, field

from quire.core.deltas import TokenLogprobs
from quire.core.images import ImageSpan, PromptImage
from quire.core.pooling import NO_SCOPE, Pool, Scope
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.core.step_times import StepKind, StepTimes
from quire.core.token_ids import TokenIds

BlockIds = Sequence[int]  # a whole table, thousands of blocks: an array


class BlockCopy(NamedTuple):
    """A copy of one physical block over another, in every layer, before the step's forward pass.

    Within the cache (copy-on-write), from it to the swap space, or back, by the list of the plan that has it.
    """

    src: int
    dst: int


@dataclass(frozen=True, slots=True)
class NewRow:
    """A sequence that starts, or resumes after a preemption, in a row of the worker."""

    row: int
    token_ids: Sequence[int]                           # all known tokens: TokenIds, to share the prompt
    num_prompt_tokens: int
    block_ids: BlockIds                                # its block table when the plan was made
    params: SamplingParams
    seed: int                                          # seed of this branch
    eos_token_ids: frozenset[int] = frozenset()        # tokens that min_tokens forbids, besides params.stop_token_ids
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    beam: BeamSearchParams | None = None               # its samples return the likeliest tokens, as logprobs
    pool: Pool | None = None                           # it has no samples: its last entry returns a vector
    scope: Scope = NO_SCOPE                            # rows of other scopes may not profit from what it computes
    images: tuple[ImageSpan, ...] = ()                 # the prompt's, in order


class RowFork(NamedTuple):
    """A beam that continues in `row`: the first `num_tokens` tokens of row `source`, then `token_id`.

    Both rows belong to one request and hold the same prompt. If `row` is `source`, its block table stays; else
    `block_ids` is the whole table.
    """

    row: int
    source: int
    num_tokens: int
    token_id: int
    block_ids: BlockIds


class RowDrafts(NamedTuple):
    """Draft tokens that a row computes at positions [start, start + len(token_ids)), the last ones of its entry.

    They are not known tokens: the step samples behind the last known token and behind each draft, and keeps the drafts
    that equal what was sampled (`quire.execution.row_results`).
    """

    row: int
    start: int
    token_ids: list[int]


MAX_SNAPSHOTS = 2  # states that a sequence leaves behind in one step (csrc/state_piece.hpp)


class EntryState(NamedTuple):
    """Reads and writes of an entry's state in a step: see quire.cache.states.

    Slot `read` has the state after `committed` tokens, and the inputs of those up to the entry's start; read -1: the
    sequence begins. Slot `write`, which may be `read`, gets the state after `commit_to` tokens, and the inputs of those
    up to the entry's end. `snapshots`: at most MAX_SNAPSHOTS of (position, slot): the state after so many tokens.
    """

    read: int
    committed: int
    write: int
    commit_to: int
    snapshots: tuple[tuple[int, int], ...] = ()


class StepPlan(Struct, frozen=True, array_like=True):
    """One step: the rows that advance, by how many tokens, on which blocks.

    Order of effects: `row_forks`, `new_rows`, table entries, `drafts`, `dropped_images`, `encodings`, `swap_outs`,
    `swap_ins`, those of states, `copies`, then one forward pass over the entries. So a block that is swapped out may be
    overwritten in the same step, and one that is swapped in may be copied. A new row replaces the content of its row: a
    row of an ended sequence is not computed until it has a new owner.
    Entry i advances row `rows[i]` over positions [starts[i], starts[i] + counts[i]). The flat batch holds the tokens of
    all entries in order. Sample j is drawn behind token `sample_tokens[j]` of the flat batch and becomes the token at
    the position after it in row `sample_rows[j]`: the same row in most cases, the rows of all branches when the prompt
    of a request with n > 1 has just been computed. A row has no sample, one, or, with drafts, several at consecutive
    positions. A row with a `pool` has none: the entry that ends with its last token returns a vector, as
    `RowResult.pooled`. Entries in `stored_entries` are of one token with keys and values in the cache: only its
    logits are computed, nothing is written.
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
    sample_tokens: list[int] = field(default_factory=list)
    stored_entries: list[int] = field(default_factory=list)
    drafts: list[RowDrafts] = field(default_factory=list)
    dropped_images: list[int] = field(default_factory=list)  # serials of encodings to forget, before the next are made
    encodings: list[PromptImage] = field(default_factory=list)
    states: list[EntryState] = field(default_factory=list)      # one for each entry; none for a model without states
    state_outs: list[BlockCopy] = field(default_factory=list)  # as `swap_outs`, of slots of states
    state_ins: list[BlockCopy] = field(default_factory=list)

    @property
    def is_empty(self) -> bool:
        """Return whether there is nothing to compute."""
        return not self.rows

    @property
    def kind(self) -> StepKind:
        """Kind of the work: decodes, chunks of prompts, or both. A prompt's last token alone counts as a decode."""
        counts = self.counts
        if max(counts) == 1:
            return "decode"
        num_decodes = counts.count(1) + len(self.drafts)
        if not num_decodes:
            return "prefill"
        return "decode" if num_decodes >= len(counts) else "mixed"


@dataclass(frozen=True, slots=True)
class PromptLogprobsChunk:
    """Logprobs of the prompt tokens at positions [start, start + len(tokens)) of the sequence in `row`.

    `scores`: float32 [num_rows, width], those of the token ids that the request names at its positions from there on.
    """

    row: int
    start: int                                         # at least 1: the first token has no logprob
    tokens: list[TokenLogprobs]
    scores: bytes = b""


class MeasuredRates(NamedTuple):
    """Averages of what the worker has measured: the scheduler has no clock. None: not measured yet."""

    prefill_tokens_per_s: float | None = None
    swap_out_blocks_per_s: float | None = None
    swap_in_blocks_per_s: float | None = None
    step_times: StepTimes | None = None


UNMEASURED = MeasuredRates()


class RowResult(Struct, frozen=True, array_like=True, omit_defaults=True):
    """The result of one row, where it is more or less than one token sampled and everything planned computed.

    `token_ids`, any number, become the next tokens of the row, then `forced`. The scheduler checks them one by one for
    the end of the sequence and drops those behind it. All known tokens must have been computed before a token is
    returned, and a row that does not end must have a token left to compute. A row that is late computes its last known
    token again in a later step, for its logits alone, and is sampled there.
    """

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] | None = None    # one per token, if the row asks for them
    num_computed: int | None = None                # planned tokens that were computed; None: all
    has_ended: bool = False                        # the sequence finishes with reason "stop" behind these tokens
    forced: list[int] = []                         # appended without a draw, computed later; none with logprobs
    drafts: list[int] = []                         # to be verified by the next step of the row, if it has room
    pooled: bytes | None = None                    # float32 vector of a row with a `pool`, which has ended with it
    is_late: bool = False                          # nothing was sampled: its mask was not filled in time


class StepResult(Struct, frozen=True, array_like=True):
    """The answer to a plan: one token per sample, in the plan's order.

    `rows`: the results of rows that differ from one token per sample; their entries in `token_ids` and `logprobs` are
    undefined. Each row with drafts has one. `failures`: rows without tokens or logprobs, with
    the reason; all else of them is undefined. `at_fault`: those of them that a field of the request has made fail.
    """

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None] | None = None       # None: no sample asked for them
    prompt_logprobs: list[PromptLogprobsChunk] = field(default_factory=list)
    swap_s: float = 0.0                                      # spent on swapping, both ways
    rates: MeasuredRates = UNMEASURED
    failures: dict[int, str] = field(default_factory=dict)
    rows: dict[int, RowResult] = field(default_factory=dict)
    at_fault: dict[int, str] = field(default_factory=dict)   # the field of each row
    step_s: float | None = None                              # how long the step took; None: it was not measured
    step_ratio: float | None = None                          # measured to predicted, short steps in lots


class GraphCounts(NamedTuple):
    """CUDA graphs of an engine: those that were captured, and the captures that failed."""

    num_captured: int = 0
    num_failed: int = 0


_plan_decoder = msgspec.msgpack.Decoder(StepPlan)
_result_decoder = msgspec.msgpack.Decoder(StepResult)


def _builtin(value: object) -> Any:  # noqa: ANN401
    """Return what stands for an array or for `TokenIds` in msgpack."""
    if isinstance(value, array):
        return value.tolist()
    if isinstance(value, TokenIds):
        return value.prompt.tolist() + value.output
    raise NotImplementedError(f"a message with {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_builtin)


def encode(message: StepPlan | StepResult) -> bytes:
    """Return a plan or a result as msgpack."""
    return _encoder.encode(message)


def decode_plan(message: bytes) -> StepPlan:
    """Return the plan that was encoded. Raises msgspec.ValidationError for anything else."""
    return _plan_decoder.decode(message)


def decode_result(message: bytes) -> StepResult:
    """Return the result that was encoded. Raises msgspec.ValidationError for anything else."""
    return _result_decoder.decode(message)
