"""Messages of a rank of tensor parallelism with rank 0, and with the command of its node, in `quire.core.frames`.

A rank says hello, loads, measures, allocates, and then runs the plans that it gets; within a step, ranks exchange
activations.
"""

from typing import NamedTuple

import msgspec

from quire.engine.options import EngineOptions
from quire.model.sharding import Shard
from quire.model.spec import DecoderSpec

MAX_REASON_CHARS = 2000
REGION_BYTES = 4 << 20  # each of two regions, unless a row is longer; more rows are exchanged in parts
MIN_LOGIT_ROWS = 256    # rows of logits at once: as many as prompt logprobs ask for


class MemoryLayout(NamedTuple):
    """Sizes of the memory that ranks of one machine share.

    A header, two regions of `region_bytes`, and logits float32 [max_rows, vocab_size].
    """

    region_bytes: int
    max_rows: int
    vocab_size: int

    @classmethod
    def of(cls, spec: DecoderSpec, max_num_seqs: int, num_ranks: int) -> "MemoryLayout":
        """Return the layout for a model: a row of any activation, in float32, and of all sums fits into a region."""
        inner = max((each.active_size for each in spec.feed_forwards), default=0)
        widest = max(inner, num_ranks * spec.hidden_size, spec.mixed_width)
        return cls(max(REGION_BYTES, 4 * widest), max(max_num_seqs, MIN_LOGIT_ROWS), spec.vocab_size)


class Load(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """To a rank: load a part of the model. Its exchanges go through shared memory, over a network, or by NCCL."""

    options: EngineOptions          # with the device that rank 0 has
    rank: int
    num_ranks: int
    num_threads: int                # 0: as many as the rank has by itself
    num_positions: int              # length of rotary tables
    layout: MemoryLayout
    digest: str                     # digest of the model's files
    place: str = ""                 # for exchanges over a network: the rank's address; of GPUs "ADDRESS PORT" of rank 0

    @property
    def shard(self) -> Shard:
        """The rank's part of the model."""
        return Shard(self.rank, self.num_ranks, self.options.tensor_parallel_mode_on(self.options.device))


class Measure(msgspec.Struct, tag="measure", array_like=True, frozen=True):
    """To a rank: return the memory for a KV cache beside the largest step, a `StepLimits`. GPUs run it, all at once."""

    limits: tuple[int, int, int, int]


class Allocate(msgspec.Struct, tag="allocate", array_like=True, frozen=True):
    """To a rank: allocate a KV cache, a swap space and a batch of these sizes. `num_slots`: for states."""

    num_blocks: int
    num_slots: int
    num_swap_blocks: int
    num_swap_slots: int
    max_num_seqs: int
    max_model_len: int


class Step(msgspec.Struct, tag="step", array_like=True, frozen=True):
    """To a rank: run a plan, encoded by `quire.core.plan`."""

    plan: bytes


class Compute(msgspec.Struct, tag="compute", array_like=True, frozen=True):
    """To the rank of a GPU, in a step: a command of `quire.engine.parallel.link`; its rows follow on the device."""

    kind: int
    num_rows: int


class Capture(msgspec.Struct, tag="capture", array_like=True, frozen=True):
    """To the rank of a GPU, between steps: capture the graph of this size, as all ranks do."""

    num_rows: int
    num_tokens: int
    has_adapters: bool


class DropGraph(msgspec.Struct, tag="drop graph", array_like=True, frozen=True):
    """To the rank of a GPU: a rank could not capture this graph; its steps run without one."""

    num_rows: int
    num_tokens: int
    has_adapters: bool


class Resume(msgspec.Struct, tag="resume", array_like=True, frozen=True):
    """To a rank: the exchange has been reset on every rank; the next step follows."""


class LoadAdapter(msgspec.Struct, tag="load adapter", array_like=True, frozen=True):
    """To a rank, between steps: read its part of an adapter, which a later step uses."""

    digest: str
    folder: str


class DropAdapter(msgspec.Struct, tag="drop adapter", array_like=True, frozen=True):
    """To a rank, between steps: forget an adapter."""

    digest: str


class End(msgspec.Struct, tag="end", array_like=True, frozen=True):
    """To a rank on another machine: the run ends for this reason."""

    reason: str


class Published(msgspec.Struct, tag="published", array_like=True, frozen=True):
    """To a rank and from it: an entry of the address book of ranks that connect for the time with this number."""

    number: int
    key: str
    value: bytes


Command = (
    Load | Measure | Allocate | Step | Compute | Capture | DropGraph | Resume | LoadAdapter | DropAdapter | End
    | Published
)


class Hello(msgspec.Struct, tag="hello", array_like=True, frozen=True):
    """Message of a rank: it has started."""

    version: str
    isas: tuple[str, ...]           # instruction sets of its CPU, the best first
    options: EngineOptions | None = None  # as its command names them; None: rank 0 has started it


class Loaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """Message of a rank: its part of the model is in memory."""

    weight_bytes: int


class Measured(msgspec.Struct, tag="measured", array_like=True, frozen=True):
    """Message of a rank: the bytes that its weights and the largest step leave for the KV cache."""

    kv_bytes: int


class Captured(msgspec.Struct, tag="captured", array_like=True, frozen=True):
    """Message of a rank with a GPU: it has the graph, or not."""

    is_captured: bool


class Allocated(msgspec.Struct, tag="allocated", array_like=True, frozen=True):
    """Message of a rank: it is ready for steps."""


class Refused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """Message of a rank that ends: it cannot start. `kind` as in `quire.engine.messages.Failed`."""

    kind: str
    message: str


class Stopped(msgspec.Struct, tag="stopped", array_like=True, frozen=True):
    """Message of a rank: it has left an interrupted step; with a reason, if the step failed on it."""

    reason: str | None


class AdapterRead(msgspec.Struct, tag="adapter read", array_like=True, frozen=True):
    """Message of a rank, the answer to LoadAdapter: the adapter is in memory, or cannot be read, for a reason."""

    digest: str
    reason: str | None


Report = Hello | Loaded | Measured | Allocated | Captured | Refused | Stopped | AdapterRead | Published


class Join(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """Message from the command of a node to the process of a rank: join the run at this address."""

    options: EngineOptions
    rank: int
    address: str
    port: int
    key: bytes


class HasJoined(msgspec.Struct, tag="joined", array_like=True, frozen=True):
    """To the command of a node: the rank has joined the run, and sends heartbeats."""


class Ended(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """To the command of a node: the rank ends. `kind` as in `quire.engine.messages.Failed`."""

    kind: str
    message: str


NodeReport = HasJoined | Ended

decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
decode_join = msgspec.msgpack.Decoder(Join).decode
decode_node_report = msgspec.msgpack.Decoder(NodeReport).decode
