"""Sequence: one token list being extended, and Request: one ask that owns 1..n of them.

Both are plain state. The scheduler is their only writer; everyone else reads.
"""

import math
from dataclasses import dataclass, field
from enum import Enum

from quire.core.images import PromptImage
from quire.core.logprob_table import LogprobTable
from quire.core.pooling import GENERATE, NO_SCOPE, Pool, Scope, Task
from quire.core.sampling_params import RepetitionDetector, SamplingParams
from quire.core.token_ids import PackedTokens, TokenIds

NO_ROW = -1

QueueKey = tuple[int, int]  # sort key of the queues: the lower comes first


class SequenceStatus(Enum):
    """State of a sequence. A preempted sequence is waiting again, or swapped; either way it gets a new row."""

    WAITING = "waiting"    # holds no blocks and no row
    RUNNING = "running"    # holds a row; its blocks cover its computed tokens
    SWAPPED = "swapped"    # holds no row; blocks in the swap space cover its computed tokens
    PADDING = "padding"    # ended, but computed on, for nothing, until its static batch ends: holds what it held
    FINISHED = "finished"  # ended; holds nothing


@dataclass(slots=True, eq=False)
class Sequence:
    """One branch of a request: its tokens, and how many of them have keys and values in the cache."""

    seq_id: int                       # unique over the scheduler's life, given in order of arrival
    index: int                        # branch of the request, 0..n-1
    seed: int                         # the branch's own seed
    token_ids: TokenIds               # the prompt, as the prefix cache is told it, then the output
    num_prompt_tokens: int
    num_computed_tokens: int = 0
    drafts: tuple[int, ...] = ()      # behind the known tokens, for the next step to verify; dropped if it has no room
    num_lost_tokens: int = 0          # computed before a preemption, and not yet looked up in the cache again
    row: int = NO_ROW                 # the worker's row while running
    status: SequenceStatus = SequenceStatus.WAITING
    repetitions: RepetitionDetector | None = None  # patterns in the output, if the request asks for them

    @property
    def num_tokens(self) -> int:
        """Tokens known: prompt and output so far."""
        return self.num_prompt_tokens + len(self.token_ids.output)

    @property
    def num_output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.token_ids.output)

    @property
    def is_computed(self) -> bool:
        """Return whether all known tokens are computed: a beam that waits for the other beams of its request."""
        return self.num_computed_tokens == self.num_tokens


@dataclass(frozen=True, slots=True)
class KVTransfer:
    """Keys and values of a prompt that one engine computes for another: see `quire.cache.kv_tickets`."""

    ticket: str      # 64 hexadecimal digits
    owner: str       # digest of the client's API key; empty without keys
    peer: str = ""   # name of the engine that has them; empty: this one keeps them


@dataclass(slots=True, eq=False)
class Request:
    """One client's ask. Its sequences are one group: admitted, preempted and resumed together (the paper's group)."""

    request_id: int                   # given by the engine; never a client's own id
    prompt_token_ids: PackedTokens
    params: SamplingParams
    seed: int                         # branch 0 has it; others derive theirs
    max_tokens: int                   # resolved: params.max_tokens, or the most that fits; 0 with the task Pool
    eos_token_ids: frozenset[int] = frozenset()            # the model's; empty with ignore_eos
    stop_token_ids: frozenset[int] = frozenset()           # ids that end it and are its stop_reason
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # params.bad_words as token ids
    task: Task = GENERATE
    scope: Scope = NO_SCOPE           # requests find only what those of the same scope have computed
    images: tuple[PromptImage, ...] = ()  # ordered as their placeholders are
    adapter_folder: str = ""          # folder of `scope.adapter`
    adapter_name: str = ""            # the client's name for it: for metrics alone
    priority: int = 0                 # lower is served first
    owner: str = ""                   # label of the owner: see quire.core.owner_labels
    client_id: str = ""               # charged to: "key:3", or the connection if there is no key
    weight: float = 1.0               # weight of its client under the policy `fair`
    transfer: KVTransfer | None = None  # moves keys and values to or from another engine
    received_s: float | None = None   # when the server received it, on the monotonic clock, which processes share
    arrived_s: float = 0.0            # the same on the engine's clock; set by the engine
    live: list[Sequence] = field(default_factory=list)     # unfinished branches, in the order of their indices
    prompt_logprobs: LogprobTable | None = None  # positions 1, 2, ... as far as computed; None: none is, as the next
    prompt_scores: bytearray | None = None       # tokens that params name, as far as computed
    queue_key: QueueKey = (0, 0)      # sort key of the queues, set by the scheduler: ids are not in order of arrival
    end_token_ids: frozenset[int] = frozenset()  # eos_token_ids and stop_token_ids; set by the scheduler
    is_plain: bool = False            # whether its sampled tokens need no look but at `end_token_ids` and `max_tokens`
    must_see_tokens: bool = False     # before the next draw, by the scheduler: see quire.scheduling.async_scheduling
    num_preemptions: int = 0
    num_cached_tokens: int = 0        # prompt tokens found in the cache at its first admission
    num_stateless_tokens: int = 0     # prompt tokens behind those with blocks in the cache, and no state of the model
    num_disk_tokens: int = 0          # part of num_cached_tokens, loaded from a disk for it
    num_peer_tokens: int = 0          # part of num_cached_tokens, fetched from another engine for it
    waited: list[int] = field(default_factory=list)        # steps by WAIT_REASONS: see quire.scheduling.queues
    num_recomputed_tokens: int = 0    # lost by the last preemption and computed again
    num_swapped_blocks: int = 0       # moved by the last preemption, out and in

    @property
    def is_kept(self) -> bool:
        """True if the keys and values of its prompt are kept for another engine."""
        return self.transfer is not None and not self.transfer.peer

    @property
    def has_begun(self) -> bool:
        """True if one of its branches has a token, or has ended."""
        live = self.live
        return len(live) < self.params.n or any(branch.num_output_tokens for branch in live)

    @property
    def has_deadline(self) -> bool:
        """True if its client has set one."""
        return self.params.ttft_deadline_ms is not None or self.params.deadline_ms is not None

    @property
    def due_s(self) -> float:
        """Time of its next deadline on the engine's clock: before its first token the earlier of both; or inf.

        Only where its branches are: without them it counts as ended.
        """
        params = self.params
        total_ms = math.inf if params.deadline_ms is None else params.deadline_ms
        if params.ttft_deadline_ms is not None and params.ttft_deadline_ms < total_ms and not self.has_begun:
            total_ms = params.ttft_deadline_ms
        return self.arrived_s + total_ms / 1e3

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens x n: what the request counts for while it waits."""
        return len(self.prompt_token_ids) * self.params.n

    @property
    def reads_cache(self) -> bool:
        """True if its prompt is looked up in the prefix cache: not where each of its hidden states is needed."""
        params = self.params
        return params.prompt_logprobs is None and params.prompt_logprob_token_ids is None and not self.keeps_state

    @property
    def keeps_state(self) -> bool:
        """True if the worker keeps a sum over the prompt, which is lost with the row: a preempted one starts again."""
        return isinstance(self.task, Pool) and self.task.reads_all_states
