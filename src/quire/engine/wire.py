"""The messages that cross the process boundary, and the frames that carry them.

A frame is a length, four bytes with the highest first, and that many bytes of msgpack. Both ends are ours, started
together and joined by one socket pair, so there are no versions and nothing is negotiated. The end of the stream means
that the other side is dead.
"""

from collections.abc import Callable

import msgspec

from quire.core.errors import ConfigError, EngineError, ModelError
from quire.core.outputs import Admission, KVStats, SequenceDelta
from quire.core.sequence import Request
from quire.engine.options import EngineOptions
from quire.scheduling.limits import AdmissionLimits

LENGTH_BYTES = 4
FAULT = "fault"  # the kind of a Failed that is nobody's mistake but ours


# --- to the engine ----------------------------------------------------------------------------------------------------


class Start(msgspec.Struct, tag="start", array_like=True, frozen=True):
    """The first message: what to load."""

    options: EngineOptions


class Add(msgspec.Struct, tag="add", array_like=True, frozen=True):
    """Queue a request, which has been checked against the engine's limits."""

    request: Request


class Abort(msgspec.Struct, tag="abort", array_like=True, frozen=True):
    """End a request, if it is still there."""

    request_id: int


class Finish(msgspec.Struct, tag="finish", array_like=True, frozen=True):
    """End one branch, whose text is complete, if it is still there."""

    request_id: int
    index: int


Command = Start | Add | Abort | Finish


# --- from the engine --------------------------------------------------------------------------------------------------


class Located(msgspec.Struct, tag="located", array_like=True, frozen=True):
    """The model's folder is there; its weights are about to be read."""

    folder: str


class Ready(msgspec.Struct, tag="ready", array_like=True, frozen=True):
    """The engine takes requests. Sizes in bytes, lengths in tokens."""

    limits: AdmissionLimits
    max_num_batched_tokens: int
    vocab_size: int
    eos_token_ids: frozenset[int]
    dtype: str
    device: str
    num_parameters: int
    weights_bytes: int
    kv_bytes_per_token: int


class Failed(msgspec.Struct, tag="failed", array_like=True, frozen=True):
    """The engine could not start, or has met a fault and ends. `kind` names an error that the user can mend."""

    kind: str
    message: str


class EngineState(msgspec.Struct, array_like=True, frozen=True):
    """Counters and gauges after a step. `kv` only now and then, since it walks the pool; always when all is done."""

    num_running: int
    num_waiting: int
    num_preemptions: int                # since start, as the next
    num_recomputed_tokens: int
    kv: KVStats | None = None


class Stepped(msgspec.Struct, tag="stepped", array_like=True, frozen=True):
    """What one step did. Times are of the monotonic clock, which all processes of a machine share."""

    started_s: float
    num_computed_tokens: int
    admissions: list[Admission]
    deltas: list[SequenceDelta]
    state: EngineState


class Idle(msgspec.Struct, tag="idle", array_like=True, frozen=True):
    """Nothing waits and nothing runs: the engine sleeps until the next command."""

    state: EngineState


Report = Located | Ready | Failed | Stepped | Idle


# --- frames -----------------------------------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_report: Callable[[bytes], Report] = msgspec.msgpack.Decoder(Report).decode


def frame(message: Command | Report) -> bytes:
    """Return a message ready to be sent."""
    body = bytearray(LENGTH_BYTES)
    _encoder.encode_into(message, body, LENGTH_BYTES)
    body[:LENGTH_BYTES] = (len(body) - LENGTH_BYTES).to_bytes(LENGTH_BYTES, "big")
    return bytes(body)


# --- errors -----------------------------------------------------------------------------------------------------------

_MENDABLE: dict[str, type[EngineError]] = {error.__name__: error for error in (ConfigError, ModelError)}


class EngineDeadError(EngineError):
    """The engine process has ended, or could not start, for no fault of the request."""


def failed(error: BaseException) -> Failed:
    """Return the message for an error: a user's mistake by its name, everything else as a fault."""
    kind = next((name for name, mendable in _MENDABLE.items() if isinstance(error, mendable)), FAULT)
    return Failed(kind, str(error) if kind != FAULT else f"{type(error).__name__}: {error}")


def as_error(message: Failed) -> EngineError:
    """Return the error that a message stands for."""
    return _MENDABLE.get(message.kind, EngineDeadError)(message.message)
