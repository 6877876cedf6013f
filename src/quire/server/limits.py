"""Bounds on whatever a client multiplies, each with its flag: one table, from which flags and schema are made.

What is past a bound is refused before anything is done for it, by the status in docs/reference.md.
"""

from dataclasses import dataclass, field, fields
from typing import Any

from quire.core.errors import ConfigError
from quire.engine.options import parse_bytes

_LONGEST_S = 86400.0


def _bound(default: float, text: str) -> Any:  # noqa: ANN401 (stands for the field)
    """Return a field whose flag is explained by `text`."""
    return field(default=default, metadata={"flag": text})


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes, counts, and times in seconds. Sizes (`_bytes`) may be given as text such as "4MiB"."""

    max_queued_requests: int = _bound(1024, "prompts that may wait; more are answered with 429")
    max_connections: int = _bound(16384, "open connections; less where the system grants fewer files")
    max_pipelined_requests: int = _bound(16, "requests that wait on one connection for the answer before theirs")
    max_url_bytes: int = _bound(8 << 10, "longest URL")
    max_headers: int = _bound(100, "headers of a request")
    max_header_bytes: int = _bound(32 << 10, "names and values of all headers of a request")
    max_body_bytes: int = _bound(4 << 20, "longest body of a request")
    max_json_depth: int = _bound(64, "lists and objects inside of each other in a body")
    max_buffered_bytes: int = _bound(64 << 10, "of an answer that a connection holds for a slow reader")
    receive_timeout: float = _bound(30.0, "seconds for the head of a request, and for its body")
    send_timeout: float = _bound(30.0, "seconds in which a reader takes something of what waits for it")
    idle_timeout: float = _bound(75.0, "seconds that a connection is kept without a request")
    max_n: int = _bound(64, "highest n and beam width of a request")
    max_choices: int = _bound(2048, "answers of one call: prompts times n")
    max_call_tokens: int = _bound(1 << 20, "tokens of all prompts of a call")
    max_prompt_candidates: int = _bound(1 << 18, "prompt logprobs of a call, over all positions and answers")
    max_messages: int = _bound(4096, "messages of a conversation")
    max_stop_strings: int = _bound(64, "stop strings of a request")
    max_stop_chars: int = _bound(1024, "longest stop string or bad word, in characters")
    max_bad_words: int = _bound(64, "bad words of a request")
    max_stop_token_ids: int = _bound(1024, "stop tokens of a request")
    max_allowed_token_ids: int = _bound(4096, "allowed tokens of a request")
    max_logit_bias: int = _bound(4096, "entries of logit_bias")
    max_salt_chars: int = _bound(1024, "longest cache_salt, in characters")

    def __post_init__(self) -> None:
        """Check that each lets something through."""
        for one in fields(Limits):
            value = getattr(self, one.name)
            if one.name.endswith("_bytes"):
                object.__setattr__(self, one.name, parse_bytes(value, one.name))
            elif one.name.endswith("_timeout") and not 0 < value <= _LONGEST_S:
                raise ConfigError(f"{one.name} must be above 0 and at most {_LONGEST_S:g} seconds, got {value}")
            elif one.name.startswith("max_") and value < 1:
                raise ConfigError(f"{one.name} must be at least 1, got {value}")


DEFAULT_LIMITS = Limits()

# Fields of bodies with a bound on their elements.
MAX_ELEMENTS = {
    "messages": "max_messages",
    "stop": "max_stop_strings",
    "bad_words": "max_bad_words",
    "stop_token_ids": "max_stop_token_ids",
    "allowed_token_ids": "max_allowed_token_ids",
    "logit_bias": "max_logit_bias",
}
