"""Outputs for users: `RequestOutput` and its parts, vectors and scores, pinned prefixes, statistics of the KV cache."""

from array import array
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quire.core.deltas import FinishReason
from quire.core.displays import html_of_cache, html_of_request
from quire.core.logprob_table import Logprobs

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MAX_CHUNKS_KEPT = 64        # first ones of one request
MAX_PREEMPTIONS_KEPT = 64  # records of one request, the newest; RequestMetrics.num_preemptions counts all


@dataclass(frozen=True, slots=True)
class Logprob:
    """One candidate token at one position."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One answer of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    packed_logprobs: Logprobs | None = field(default=None, repr=False)  # the server's form of `logprobs`


@dataclass(slots=True)
class Preemption:
    """One preemption of a request, from then to its next token, and its cost. Times as in `RequestMetrics`."""

    preempted_s: float
    returned_s: float | None = None
    recovered_s: float | None = None  # at its next token, or its next preemption
    waited_steps: dict[str, int] = field(default_factory=dict)
    num_recomputed_tokens: int = 0
    num_swapped_blocks: int = 0    # out and in

    @property
    def cost_s(self) -> float | None:
        """Seconds from the preemption to the next token, swaps and recomputation included. None: not over yet."""
        return None if self.recovered_s is None else self.recovered_s - self.preempted_s


class PromptChunk(NamedTuple):
    """The end of a step that computed a part of a prompt and not its end. Times as in `RequestMetrics`."""

    ended_s: float
    num_computed_tokens: int


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request's events, in seconds on one monotonic clock, and the reasons of its waits.

    `waited_steps`: how many steps it was kept out of before it first ran, by WaitReason. One that was passed over for
    its prefix may count for what held back the requests behind it, too.
    """

    arrival_s: float
    first_scheduled_s: float | None = None
    first_token_s: float | None = None
    finished_s: float | None = None
    num_preemptions: int = 0
    num_cached_tokens: int = 0
    num_disk_tokens: int = 0            # part of num_cached_tokens, loaded from a disk for it
    num_peer_tokens: int = 0            # part of num_cached_tokens, fetched from another engine for it
    num_stateless_tokens: int = 0       # prompt tokens behind num_cached_tokens with blocks, and no state of the model
    waited_steps: dict[str, int] = field(default_factory=dict)
    preemptions: list[Preemption] = field(default_factory=list)  # the last MAX_PREEMPTIONS_KEPT
    chunks: list[PromptChunk] = field(default_factory=list)  # the first MAX_CHUNKS_KEPT of a prompt in several steps
    num_draft_tokens: int = 0           # verified by steps, all branches together
    num_accepted_tokens: int = 0        # drafts that were kept
    engine: int = 0                     # the engine that computes the request, of several behind one server

    @property
    def queue_s(self) -> float | None:
        """Seconds between arrival and the first step that computed one of its tokens."""
        return None if self.first_scheduled_s is None else self.first_scheduled_s - self.arrival_s


@dataclass(slots=True)
class RequestOutput:
    """Everything that a request gave so far; all of it once `finished`."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]       # empty in a server, which holds the prompt packed
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    prompt_token_id_logprobs: "NDArray[np.float32] | None" = None  # for prompt_logprob_token_ids; -inf pads
    num_cached_tokens: int = 0
    metrics: RequestMetrics | None = None
    packed_prompt_logprobs: Logprobs | None = field(default=None, repr=False)  # one entry per token after the first
    pooled: "array[float] | None" = None  # float32 vector of a request for one

    def _repr_html_(self) -> str:
        """Return the prompt and the answers as HTML, as a notebook shows them."""
        return html_of_request(self)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The embedding of a prompt."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """The dimensions of the embedding."""
        return len(self.embedding)


@dataclass(frozen=True, slots=True)
class EmbeddingRequestOutput:
    """Output of `LLM.embed` for one prompt."""

    request_id: str
    outputs: EmbeddingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
    metrics: RequestMetrics | None = None


@dataclass(frozen=True, slots=True)
class ScoringOutput:
    """The score of a pair of texts."""

    score: float


@dataclass(frozen=True, slots=True)
class ScoringRequestOutput:
    """The output of a request for a score. `prompt_token_ids`: of the pair as the model reads it, or of both texts."""

    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(frozen=True, slots=True)
class PinnedPrefix:
    """A prefix that was computed once and is kept until it is unpinned."""

    id: str            # "prefix-" and 32 random digits
    num_tokens: int
    num_blocks: int    # prefixes that begin alike share some
    created: int       # seconds since 1970
    expires: int | None = None  # likewise, when it is unpinned by itself; None: never


@dataclass(frozen=True, slots=True)
class KVStats:
    """The KV cache at one moment. Blocks are counted once however many sequences share them.

    `cached_blocks`: without an owner, but their content can be found; they are given up when blocks are needed.
    `pinned_blocks`: in use, as parts of pinned prefixes, whether or not sequences use them too.
    `tail_waste_ratio`: slots of blocks in use that hold no computed token, over all slots of blocks in use.
    `ref_counts`: how many blocks in use have 1, 2, 3-4, 5-8, 9+ owners. `blocks_by_owner`: blocks in use by the label
    of the owner (`quire.core.owner_labels`), where there is one; a block that two labels hold counts for both. None
    if they were not counted: an engine process does so from time to time.
    """

    block_size: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    free_blocks: int
    shared_blocks: int
    num_sequences: int
    tail_waste_slots: int
    ref_counts: dict[str, int] = field(default_factory=dict)
    pinned_blocks: int = 0
    swap_total_blocks: int = 0
    swap_used_blocks: int = 0
    copied_blocks: int = 0            # since start
    evicted_blocks: int = 0           # cached ones given up since start
    swapped_out_blocks: int = 0       # since start
    swapped_in_blocks: int = 0        # since start
    preemptions: dict[str, int] = field(default_factory=dict)  # since start, by the way back: "recompute", "swap"
    recomputed_tokens: int = 0        # since start: computed once, lost to a preemption, and not found in the cache
    swap_s: float = 0.0               # seconds since start that blocks were moved
    recompute_s: float = 0.0          # seconds since start that recomputed tokens took, by the rate of prefills
    recovery_saved_s: float = 0.0     # seconds since start that `auto` has saved, by the rates when it chose
    prefix_queries_tokens: int = 0    # since start
    prefix_hits_tokens: int = 0       # since start
    blocks_by_owner: dict[str, int] | None = None
    transfer: dict[str, float] = field(default_factory=dict)  # to and from other engines: `KVPeers.stats`
    disk: dict[str, float] = field(default_factory=dict)  # disk tier, as `quire.engine.kv_disk` counts; {}: none
    images: dict[str, int] = field(default_factory=dict)  # as `ImageEncodings.stats`; {}: text alone
    states: dict[str, int] = field(default_factory=dict)  # as `States.stats`; {}: the model keeps none

    @property
    def usage(self) -> float:
        """Share of all blocks that are in use; 0 without a KV cache."""
        return self.used_blocks / max(self.total_blocks, 1)

    @property
    def tail_waste_ratio(self) -> float:
        """Share of the slots in use that hold no token."""
        slots = self.used_blocks * self.block_size
        return self.tail_waste_slots / slots if slots else 0.0

    def _repr_html_(self) -> str:
        """Return a bar of the blocks and a table as HTML, as a notebook shows them."""
        return html_of_cache(self)
