"""Messages between the server and the process that checks grammars."""

from collections.abc import Callable
from typing import Any

import msgspec

from quire.core.schema_limits import SchemaLimits

CHECK_LIMIT_S = 2.0                 # a schema of 100 properties takes 10 ms
MAX_REPLY_BYTES = 8 << 20


class GrammarLimits(msgspec.Struct, array_like=True, frozen=True):
    """Bounds of one constraint, each a flag of the server."""

    schema: SchemaLimits
    max_grammar_bytes: int
    max_regex_bytes: int
    max_regex_length: int
    max_choice_texts: int


class LoadLimits(msgspec.Struct, tag="load", array_like=True, frozen=True):
    """The first message."""

    limits: GrammarLimits


class CheckGrammar(msgspec.Struct, tag="check", array_like=True, frozen=True):
    """Fields of StructuredOutputsParams as a client sent them, and the names under which it sent them.

    `is_own`: the one field is a grammar that the server made, without the bounds of a client's.
    """

    fields: dict[str, Any]
    names: dict[str, str]
    is_own: bool = False


class LimitsLoaded(msgspec.Struct, tag="loaded", array_like=True, frozen=True):
    """The answer to LoadLimits."""


class Checked(msgspec.Struct, tag="checked", array_like=True, frozen=True):
    """The grammar of a constraint."""

    grammar: str


class ConstraintRefused(msgspec.Struct, tag="refused", array_like=True, frozen=True):
    """An InvalidRequestError."""

    message: str
    param: str | None


Command = LoadLimits | CheckGrammar
Reply = LimitsLoaded | Checked | ConstraintRefused

decode_command: Callable[[bytes], Command] = msgspec.msgpack.Decoder(Command).decode
decode_reply: Callable[[bytes], Reply] = msgspec.msgpack.Decoder(Reply).decode
