"""Deltas: what one step gives each sequence, and the reasons for which requests wait for a step."""

from typing import Literal, NamedTuple, get_args

import msgspec

from quire.core.logprob_table import LogprobTable

FinishReason = Literal["stop", "length", "abort", "repetition"]
# What keeps a request waiting: no seats, no blocks, a step that is full, its own prefix being computed, swapped ones,
# the blocks that other requests of its client hold, its grammar being compiled, its adapter being loaded or one too
# many beside those of running requests, its prefix being loaded from a disk, no slots for their states.
WaitReason = Literal[
    "max_num_seqs", "kv_blocks", "token_budget", "pending_prefix", "swapped_first", "kv_share", "grammar", "adapter",
    "kv_load", "state_slots",
]
WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
PREPARATION: tuple[WaitReason, ...] = ("grammar", "adapter", "kv_load")  # done for a request beside the steps of others


class BlockLife(NamedTuple):
    """A cached KV block that was evicted: seconds since its allocation, since its last use, and between its uses."""

    lifetime_s: float
    idle_s: float
    reuse_gaps_s: list[float]


class TokenLogprobs(NamedTuple):
    """Log-probabilities at one position: the token that stands there first, then the most likely ones.

    log-softmax of the raw float32 logits, before penalties, temperature and filters. Ranks count from 1; equal
    logits rank by token id.
    """

    token_ids: list[int]
    logprobs: list[float]
    ranks: list[int]


class SequenceDelta(msgspec.Struct, array_like=True):
    """The result of one step for one sequence: the engine's message to the output processor.

    `finish_reason` is set in a sequence's last delta. `stop_reason` is the stop token id that ended it,
    "repetition_detected", "deadline", or None for an end-of-sequence token. Prompt logprobs ride on branch 0, once,
    when the whole prompt has been computed. A beam search gives one delta for each answer, when it ends.
    """

    request_id: int
    index: int
    token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: LogprobTable | None = None         # positions 1..P-1
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    cumulative_logprob: float | None = None             # a whole answer's, where no logprobs were requested
    error: str | None = None                            # why the whole request has failed: its last delta
    pooled: bytes | None = None                         # float32 vector of the request's hidden states
    ends_with_text: bool = False                        # "stop" without a stop token: the last token is text, too
    param: str | None = None                            # the field of the request that is at fault for `error`
    num_draft_tokens: int = 0                           # drafts that the step has verified
    num_accepted_tokens: int = 0                        # drafts that were kept
    is_late: bool = False                               # its deadline has passed: the reason for its end, or `error`
    prompt_scores: bytes | None = None                  # for params.prompt_logprob_token_ids, beside prompt_logprobs


class Admission(NamedTuple):
    """The admission of a request to a step: how often it was preempted before, and its cached prompt tokens.

    The rest counts since it was queued, or preempted: steps that it waited, by reason, tokens to compute again, blocks
    that were swapped out and in.
    """

    request_id: int
    num_preemptions: int
    num_cached_tokens: int = 0  # prompt tokens found at its first admission
    waited: tuple[int, ...] = ()  # steps, one count per entry of WAIT_REASONS
    num_recomputed_tokens: int = 0
    num_swapped_blocks: int = 0
    num_disk_tokens: int = 0    # part of num_cached_tokens, loaded from a disk for it
    num_peer_tokens: int = 0    # part of num_cached_tokens, fetched from another engine for it
    num_stateless_tokens: int = 0  # prompt tokens behind num_cached_tokens with blocks, and no state of the model
