"""Every setting of the HTTP server under its public name, checked before anything is loaded.

`Limits` are the bounds on whatever a client multiplies: one table, from which flags and schema are made. What is past a
bound is refused before anything is done for it, by the status in docs/reference.md.
"""

import ipaddress
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from quire.core.errors import ConfigError
from quire.core.owner_labels import MAX_LABELS
from quire.engine.options import parse_bytes
from quire.engine.start_timeout import START_TIMEOUT_S
from quire.scheduling.limits import MAX_PINNED_PREFIXES

_LONGEST_S = 86400.0
_RANGES = {                            # of ServerOptions, with the unit
    "port": (0, 65535, ""),
    "stream_keepalive": (0, _LONGEST_S, " seconds"),
    "stall_limit": (1, _LONGEST_S, " seconds"),  # the engine gives signs of life four times a second
    "start_timeout": (1, _LONGEST_S, " seconds"),
    "restart_engine": (0, 1000, ""),
    "shutdown_timeout": (0, _LONGEST_S, " seconds"),
}


_MAX_KEYS = 1 << 16     # with a weight
_MAY_BE_OFF = frozenset({"max_requests_per_key", "max_pinned_prefixes", "pin_ttl"})  # by 0


def _bound(default: float, text: str) -> Any:  # noqa: ANN401 (stands for the field)
    """Return a field whose flag is explained by `text`."""
    return field(default=default, metadata={"flag": text})


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes, counts, and times in seconds. Sizes (`_bytes`) may be given as text such as "4MiB"."""

    max_queued_requests: int = _bound(1024, "prompts that may wait; more are answered with 429")
    max_queued_tokens: int = _bound(8 << 20, "prompt tokens x n of requests and pins that wait; more: 429")
    max_connections: int = _bound(16384, "open connections; less where the system grants fewer files")
    max_pipelined_requests: int = _bound(16, "requests that wait on one connection for the answer before theirs")
    max_url_bytes: int = _bound(8 << 10, "longest URL")
    max_headers: int = _bound(100, "headers of a request")
    max_header_bytes: int = _bound(32 << 10, "names and values of all headers of a request")
    max_body_bytes: int = _bound(4 << 20, "longest body of a request")
    max_total_body_bytes: int = _bound(64 << 20, "bodies of all requests until their prompts are tokenized")
    max_json_depth: int = _bound(64, "lists and objects inside of each other in a body")
    max_json_values: int = _bound(32768, "strings, lists and objects in a body")
    max_buffered_bytes: int = _bound(64 << 10, "of an answer that a connection holds for a slow reader")
    receive_timeout: float = _bound(30.0, "seconds for the head of a request, and for its body")
    send_timeout: float = _bound(30.0, "seconds in which a reader takes something of what waits for it")
    idle_timeout: float = _bound(75.0, "seconds that a connection is kept without a request")
    max_n: int = _bound(64, "highest n and beam width of a request")
    max_choices: int = _bound(2048, "answers of one call: prompts times n")
    max_call_tokens: int = _bound(1 << 20, "tokens of all prompts of a call")
    max_prompt_candidates: int = _bound(1 << 18, "prompt logprobs of a call, over all positions and answers")
    max_output_candidates: int = _bound(1 << 22, "logprobs of a call's answers: n x max_tokens x (logprobs + 1)")
    max_logprob_bytes: int = _bound(512 << 20, "reserved for logprobs of all calls under way, 16 bytes each")
    max_history_bytes: int = _bound(64 << 20, "of the calls that /v1/requests/{id}/explain knows")
    max_messages: int = _bound(4096, "messages of a conversation")
    max_conversation_bytes: int = _bound(4 << 20, "messages of a conversation and the variables of its template")
    max_template_variable_bytes: int = _bound(64 << 10, "variables of a chat template (chat_template_kwargs)")
    max_stop_strings: int = _bound(64, "stop strings of a request")
    max_stop_chars: int = _bound(1024, "longest stop string or bad word, in characters")
    max_bad_words: int = _bound(64, "bad words of a request")
    max_stop_token_ids: int = _bound(1024, "stop tokens of a request")
    max_allowed_token_ids: int = _bound(4096, "allowed tokens of a request")
    max_logit_bias: int = _bound(4096, "entries of logit_bias")
    max_salt_chars: int = _bound(1024, "longest cache_salt, in characters")
    max_requests_per_key: int = _bound(0, "requests of a key (or connection) that wait or run; 0 is no limit")
    max_kv_share_per_key: float = _bound(1.0, "share of the KV blocks that the requests of a key may hold")
    max_pinned_prefixes: int = _bound(MAX_PINNED_PREFIXES, "prefixes that may be pinned at a time; 0 is none")
    max_pinned_share: float = _bound(0.25, "share of the KV blocks that may be pinned")
    max_pinned_share_per_key: float = _bound(0.125, "share of the KV blocks that one key may pin")
    pin_ttl: float = _bound(3600.0, "seconds until a prefix is unpinned; 0 is never")
    max_metric_labels: int = _bound(MAX_LABELS, "API keys with a metric label of their own, and as many cache_salts")

    def __post_init__(self) -> None:
        """Check that each lets something through."""
        for one in fields(Limits):
            value = getattr(self, one.name)
            if one.name.endswith("_bytes"):
                object.__setattr__(self, one.name, parse_bytes(value, one.name))
            elif one.name.endswith("_timeout") and not 0 < value <= _LONGEST_S:
                raise ConfigError(f"{one.name} must be above 0 and at most {_LONGEST_S:g} seconds, got {value}")
            elif "_share" in one.name:
                if not 0 < value <= 1:
                    raise ConfigError(f"{one.name} must be above 0 and at most 1, got {value}")
            elif one.name in _MAY_BE_OFF:
                if not 0 <= value < math.inf:
                    raise ConfigError(f"{one.name} must be at least 0, got {value}")
            elif one.name.startswith("max_") and value < 1:
                raise ConfigError(f"{one.name} must be at least 1, got {value}")
        if self.max_pinned_prefixes > MAX_PINNED_PREFIXES:
            raise ConfigError(
                f"max_pinned_prefixes must be at most {MAX_PINNED_PREFIXES}, got {self.max_pinned_prefixes}"
            )
        if self.max_total_body_bytes < 4 * self.max_body_bytes:
            raise ConfigError(
                f"max_total_body_bytes must be at least 4 times max_body_bytes ({self.max_body_bytes}), "
                f"got {self.max_total_body_bytes}"
            )


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


@dataclass(frozen=True, slots=True)
class ServerOptions(Limits):
    """What a user may set; docs/reference.md tells what each means. `port` 0 takes any free port."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()          # empty: the model's path or id
    api_key: tuple[str, ...] = field(default=(), repr=False)
    operator_api_key: str | None = field(default=None, repr=False)
    key_weights: tuple[float, ...] = ()              # of api_key, in its order; 1 for those without
    allow_client_priority: bool = False
    allow_unauthenticated: bool = False
    stall_limit: float = 10.0                        # seconds
    start_timeout: float = START_TIMEOUT_S           # seconds
    stream_keepalive: float = 15.0                   # seconds; 0: off
    restart_engine: int = 0                          # times
    shutdown_timeout: float = 30.0                   # seconds
    enable_debug: bool = False

    def __post_init__(self) -> None:
        """Check ranges, and that a server which others can reach has a key or was meant to have none."""
        Limits.__post_init__(self)
        if not self.host:
            raise ConfigError("host must not be empty; 0.0.0.0 is every address of this machine")
        for name, (low, high, unit) in _RANGES.items():
            if not low <= getattr(self, name) <= high:
                raise ConfigError(f"{name} must be from {low} to {high:g}{unit}, got {getattr(self, name)}")
        if any(len(key.split()) != 1 or key != key.strip() for key in self.api_key):  # no client could send it
            raise ConfigError("api_key must not be empty or have spaces")
        self._check_operator_key()
        self._check_key_weights()
        if not all(name and name.isprintable() for name in self.served_model_name):
            raise ConfigError("served_model_name must not be empty or have control characters")
        if not (self.api_key or self.allow_unauthenticated or _is_loopback(self.host)):
            raise ConfigError(
                f"host {self.host} can be reached by others: set api_key, or allow_unauthenticated to serve everyone, "
                f"or host to 127.0.0.1"
            )

    def weight_of(self, key_number: int) -> float:
        """Return the weight of a key, from 1; that of all others is 1."""
        return self.key_weights[key_number - 1] if 0 < key_number <= len(self.key_weights) else 1.0

    def _check_operator_key(self) -> None:
        key = self.operator_api_key
        if key is not None and (len(key.split()) != 1 or key != key.strip()):
            raise ConfigError("operator_api_key must not be empty or have spaces")
        if key is not None and key in self.api_key:
            raise ConfigError("operator_api_key must not be one of api_key")

    def _check_key_weights(self) -> None:
        if len(self.key_weights) > len(self.api_key):
            raise ConfigError(
                f"key_weights must be for the {len(self.api_key)} keys of api_key, got {len(self.key_weights)} weights"
            )
        for weight in self.key_weights:
            if not 0 < weight < math.inf:
                raise ConfigError(f"key_weights must be above 0 and finite, got {weight}")


def parse_key_weights(texts: Sequence[str]) -> tuple[float, ...]:
    """Return the weights of keys from texts such as "2,1" (of the first keys) or "3=0.5" (of the third key)."""
    weights: dict[int, float] = {}
    for number, text in enumerate((part for each in texts for part in each.split(",")), 1):
        key, _, weight = text.rpartition("=")
        try:
            place = int(key) if key else number
            weights[place] = float(weight)
        except ValueError:
            place = 0
        if not 1 <= place <= _MAX_KEYS:
            raise ConfigError(f"key_weights must be weights such as 2,1 or KEY=WEIGHT such as 1=2, got {text!r}")
    return tuple(weights.get(place, 1.0) for place in range(1, max(weights, default=0) + 1))


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than localhost may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
