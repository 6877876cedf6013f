"""Record of a run: what went into a scheduler, and the plans that came out, in a file that is read chunk by chunk.

A scheduler is a function of its calls: it has no clock and no random numbers. A record has each call with all that
changes later plans, and each plan but for its tokens. It begins with MAGIC and FORMAT, and goes on in chunks: a
length, the BLAKE2b digest of what follows, and that many compressed bytes with a list of events.
"""

import zlib
from array import array
from collections.abc import Collection, Iterable, Iterator
from hashlib import blake2b
from pathlib import Path
from struct import Struct as Layout
from typing import Any, NamedTuple
from zlib import crc32

import msgspec
from msgspec import Struct

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.deltas import WaitReason
from quire.core.errors import EngineError
from quire.core.plan import MeasuredRates, NewRow, StepPlan
from quire.core.version import __version__
from quire.engine.options import EngineOptions

MAGIC, FORMAT = b"QUIRELOG", 1
MAX_CHUNK_BYTES = 256 << 20      # uncompressed events: a snapshot of a million blocks
_HEAD, _CHUNK = Layout(">8sH"), Layout(">I16s")


class RecordError(EngineError):
    """A file that is no record of this version, or is damaged from an offset on."""


# --- events -----------------------------------------------------------------------------------------------------------


class RecordStart(Struct, tag="start", array_like=True, frozen=True):
    """The first event: the scheduler's configuration.

    `options`: digest of all of the engine's settings. `settings`: all of them, in a record with tokens.
    """

    version: str
    scheduler: SchedulerConfig
    cache: CacheConfig
    has_tokens: bool
    options: str = ""
    settings: EngineOptions | None = None


def record_start(options: EngineOptions, config: SchedulerConfig, cache: CacheConfig) -> RecordStart:
    """Return the first event of an engine's record."""
    digest = blake2b(msgspec.json.encode(options), digest_size=8).hexdigest()
    settings = options if options.record_tokens else None
    return RecordStart(__version__, config, cache, options.record_tokens, digest, settings)


class Recording(Struct, array_like=True, frozen=True):
    """First message to a recorder's process: the path of its file, and the most bytes that it may have."""

    start: RecordStart
    folder: str
    max_bytes: int


class Added(Struct, tag="add", array_like=True, frozen=True):
    """A request was queued. `request`: as `quire.engine.messages.add_message` has it."""

    arrived_s: float
    request: msgspec.Raw


class RequestEnded(Struct, tag="end", array_like=True, frozen=True):
    """A request was ended, or one of its branches."""

    request_id: int
    index: int | None = None


class Planned(Struct, tag="plan", array_like=True, frozen=True):
    """A step was planned. `now_s` None: by `schedule_next`. `plan` None: none was made, or the planning failed.

    `lacks`: waiting requests that lacked something, each with the reason and `Lack.is_for_all`.
    """

    now_s: float | None
    plan: bytes | None
    lacks: list[tuple[int, WaitReason, bool]] = []


class Updated(Struct, tag="result", array_like=True, frozen=True):
    """A step was over, with this StepResult."""

    result: msgspec.Raw


class PlanChecked(Struct, tag="checked", array_like=True, frozen=True):
    """A step was planned: `Planned` on its way to a recorder, which makes the plan itself and compares `check`.

    `check`: of a whole plan by `whole_check`, or its new blocks; None: there is none.
    """

    now_s: float | None
    check: int | list[int] | None
    lacks: list[tuple[int, WaitReason, bool]] = []


class Returned(Struct, tag="returned", array_like=True, frozen=True):
    """Steps were planned and are over: a `PlanChecked` and an `Updated` of each, on their way to a recorder.

    `times`: `now_s` of each. `blocks`, `token_ids`: new blocks and tokens, step after step; the recorder's own plans
    have their numbers. `measured`: MeasuredRates, step_s and step_ratio, from the step of a place up to the next place.
    """

    times: list[float]
    blocks: list[int]
    token_ids: list[int]
    measured: list[tuple[int, MeasuredRates, float | None, float | None]]


class RolledBack(Struct, tag="rolled_back", array_like=True, frozen=True):
    """A step had failed, and was rolled back."""


class Requeued(Struct, tag="requeued", array_like=True, frozen=True):
    """All running requests were queued again, to find one that makes steps fail."""


class Held(Struct, tag="held", array_like=True, frozen=True):
    """All requests but these were kept out of steps, for the same reason. None: all take part again."""

    request_ids: list[int] | None


class Resumed(Struct, tag="resumed", array_like=True, frozen=True):
    """The second event of a file that follows another one: the state at its beginning, as a snapshot."""

    state: bytes


class FaultRequest(Struct, array_like=True, frozen=True):
    """A request of an engine at a fault. `branches`: computed tokens, output tokens and row of each unfinished one.

    `is_at`: it was being planned or recorded.
    """

    request_id: int
    state: str
    num_prompt_tokens: int
    branches: list[tuple[int, int, int]]
    num_preemptions: int
    is_at: bool


class Fault(Struct, tag="fault", array_like=True, frozen=True):
    """The second event of the file of a fault. Those behind it are the plans before, which can only be shown.

    `error`: its type, and the functions that it went through, without its text.
    """

    error: str
    first_step: int
    requests: list[FaultRequest]


class Repeated(Struct, tag="repeated", array_like=True, frozen=True):
    """A plan, in the file of a fault, that computes for the rows of the one before, with these new table entries."""

    now_s: float
    table_rows: list[int]
    table_columns: list[int]
    table_blocks: list[int]


class Closed(Struct, tag="closed", array_like=True, frozen=True):
    """The last event: the engine had ended, or the record had for this reason."""

    reason: str = ""


_Call = Added | RequestEnded | RolledBack | Requeued | Held
Event = RecordStart | Planned | Updated | Resumed | Fault | Repeated | Closed | _Call
Sent = PlanChecked | Returned | Updated | _Call     # what an engine sends to its recorder


# --- plans ------------------------------------------------------------------------------------------------------------


class RecordedPlan(NamedTuple):
    """A StepPlan without tokens and sampling parameters."""

    row_forks: list[tuple[int, int, int, bytes]]            # row, source, tokens, block table
    new_rows: list[tuple[int, int, int, int, bytes]]        # row, prompt tokens, tokens, seed, block table
    table_rows: list[int]
    table_columns: list[int]
    table_blocks: list[int]
    swap_outs: list[tuple[int, int]]
    swap_ins: list[tuple[int, int]]
    copies: list[tuple[int, int]]
    rows: list[int]
    starts: list[int]
    counts: list[int]
    sample_rows: list[int]
    sample_tokens: list[int]
    stored_entries: list[int]
    drafts: list[tuple[int, int, int]]                      # row, start, tokens


def _as_bytes(value: object) -> bytes:
    if isinstance(value, array):
        return value.tobytes()
    raise TypeError(f"an event with {type(value).__name__}")


_encoder = msgspec.msgpack.Encoder(enc_hook=_as_bytes)
_decode_plan = msgspec.msgpack.Decoder(RecordedPlan).decode
encode_event, encode_into = _encoder.encode, _encoder.encode_into
decode_sent = msgspec.msgpack.Decoder(list[Sent]).decode
_decode_events = msgspec.msgpack.Decoder(list[Event]).decode


def encode_plan(plan: StepPlan) -> bytes:
    """Return what a record has of a plan."""
    return _encoder.encode((
        [(each.row, each.source, each.num_tokens, _table(each.block_ids)) for each in plan.row_forks],
        [_new_row(each) for each in plan.new_rows],
        plan.table_rows, plan.table_columns, plan.table_blocks, plan.swap_outs, plan.swap_ins, plan.copies, plan.rows,
        plan.starts, plan.counts, plan.sample_rows, plan.sample_tokens, plan.stored_entries,
        [(each.row, each.start, len(each.token_ids)) for each in plan.drafts],
    ))  # fmt: skip


def _new_row(new: NewRow) -> tuple[int, int, int, int, object]:
    return new.row, new.num_prompt_tokens, len(new.token_ids), new.seed, _table(new.block_ids)


def _table(block_ids: Iterable[int]) -> "array[int]":
    return block_ids if isinstance(block_ids, array) else array("q", block_ids)


def decode_plan(plan: bytes) -> RecordedPlan:
    """Return the plan that was encoded."""
    return _decode_plan(plan)


def whole_check(plan: StepPlan) -> int:
    """Return the CRC of what a record has of a plan."""
    return crc32(encode_plan(plan))


# --- the file ---------------------------------------------------------------------------------------------------------


def head() -> bytes:
    """Return the beginning of a file."""
    return _HEAD.pack(MAGIC, FORMAT)


def chunk(events: Collection[bytes], num_events: int | None = None) -> bytes:
    """Return a chunk of encoded events, some of which may be many: then `num_events` is their number."""
    count = len(events) if num_events is None else num_events
    packed = zlib.compress(b"\xdd" + count.to_bytes(4, "big") + b"".join(events), 1)   # a list of msgpack
    return _CHUNK.pack(len(packed), _digest(packed)) + packed


def _digest(content: bytes) -> bytes:
    return blake2b(content, digest_size=16).digest()


def read_record(path: Path) -> Iterator[tuple[int, Event]]:
    """Yield the events of a file with the offsets of their chunks. RecordError from the first damage on."""
    with path.open("rb") as file:
        start = file.read(_HEAD.size)
        if len(start) < _HEAD.size or not start.startswith(MAGIC):
            raise RecordError(f"{path}: no record of Quire: it begins with other bytes (offset 0)")
        if (written := _HEAD.unpack(start)[1]) != FORMAT:
            raise RecordError(f"{path}: a record of format {written}; this Quire reads format {FORMAT} (offset 8)")
        offset, is_first, event = _HEAD.size, True, None
        while frame := file.read(_CHUNK.size):
            length, digest = _CHUNK.unpack(frame) if len(frame) == _CHUNK.size else (0, b"")
            packed = file.read(length)
            if not digest or len(packed) < length:
                raise RecordError(f"{path}: cut off in the chunk at offset {offset}")
            for event in _events(path, offset, packed, digest):
                if is_first:
                    _check_start(path, offset, event)
                yield offset, event
                is_first = False
            offset += _CHUNK.size + length
        if not isinstance(event, Closed):
            raise RecordError(f"{path}: cut off at offset {offset}: its last event is not the end of a record")


def _events(path: Path, offset: int, packed: bytes, digest: bytes) -> list[Event]:
    try:
        if _digest(packed) != digest:
            raise ValueError("its digest differs")
        unpacking = zlib.decompressobj()
        content = unpacking.decompress(packed, MAX_CHUNK_BYTES)
        if unpacking.unconsumed_tail:
            raise ValueError("it is too long")
        return _decode_events(content)
    except (ValueError, zlib.error, EngineError) as error:
        raise RecordError(f"{path}: damaged in the chunk at offset {offset}: {error}") from error


def _check_start(path: Path, offset: int, event: Event) -> None:
    if not isinstance(event, RecordStart):
        raise RecordError(f"{path}: damaged in the chunk at offset {offset}: it has no start")
    if event.version != __version__:
        message = f"{path}: written by Quire {event.version}, and this is Quire {__version__} (offset {offset})"
        raise RecordError(message)


def shown(plan: bytes | None) -> dict[str, Any]:
    """Return a recorded plan for people: its lists that are not empty, block tables as lists."""
    if plan is None:
        return {}
    fields = decode_plan(plan)._asdict()
    for name in ("row_forks", "new_rows"):
        fields[name] = [(*each[:-1], array("q", each[-1]).tolist()) for each in fields[name]]
    return {name: value for name, value in fields.items() if value}
