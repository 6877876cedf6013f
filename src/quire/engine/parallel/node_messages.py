"""Messages between the command of a node and the processes of its ranks, each in a frame (`quire.core.frames`)."""

import msgspec

from quire.engine.options import EngineOptions


class Join(msgspec.Struct, tag="join", array_like=True, frozen=True):
    """To a rank: join the run at this address."""

    options: EngineOptions
    rank: int
    address: str
    port: int
    key: bytes


class Joined(msgspec.Struct, tag="joined", array_like=True, frozen=True):
    """From a rank: it has joined the run, and sends heartbeats."""


class Ended(msgspec.Struct, tag="ended", array_like=True, frozen=True):
    """From a rank, which ends. `kind` as of `quire.engine.messages.Failed`."""

    kind: str
    message: str


Report = Joined | Ended


decode_join = msgspec.msgpack.Decoder(Join).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
