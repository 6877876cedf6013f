"""Settings of KV events: what is told of the prefix cache, how its blocks are named, and where it is published.

Keys, defaults and the rules for addresses are those of vLLM 0.33 (`KVEventsConfig`, `ZmqEventPublisher`), but for the
address where none is given, which is on loopback, and for a bound in bytes on what is kept for replays.
"""

import re
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from quire.core.checks import shown
from quire.core.errors import ConfigError
from quire.core.options import parse_bytes, parse_json_object

HashAlgorithm = Literal["sha256", "sha256_cbor", "xxhash", "xxhash_cbor"]

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5557"
MAX_COUNT = 10_000_000
MAX_TEXT_CHARS = 1024
_ADDRESS = re.compile(r"tcp://[^/\s]+:(\d{1,5})|ipc://\S+")
_MAX_PORT = (1 << 16) - 1


@dataclass(frozen=True, slots=True)
class KVEventsConfig:
    """Address that events are published at, and bounds of what is kept. `replay_endpoint`: None, there are no replays.

    `buffer_steps` and `buffer_bytes` bound the batches that are kept for replays, `max_queue_size` those that wait for
    the publisher, `hwm` those that wait for one subscriber. `use_int_block_hashes`: a block's name is the last 64 bits
    of its hash, else all of its bytes.
    """

    endpoint: str | None = None     # None: DEFAULT_ENDPOINT, which is bound
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    max_queue_size: int = 100_000
    topic: str = ""
    buffer_bytes: int = 64 << 20
    use_int_block_hashes: bool = True
    hash_algorithm: HashAlgorithm = "sha256"


def parse_kv_events(text: str, hash_algorithm: HashAlgorithm = "sha256") -> KVEventsConfig | None:
    """Return the settings in a JSON object; None if events are off. ConfigError names a key that is wrong."""
    keys = parse_json_object(text, "kv_events_config")
    known = ("enable_kv_cache_events", "publisher", *_CHECKS)
    for key in keys:
        if key not in known:
            raise ConfigError(f"kv_events_config can have {', '.join(known)}, got {shown(key)}")
    is_on = keys.pop("enable_kv_cache_events", False)
    if not isinstance(is_on, bool):
        _refuse("enable_kv_cache_events", "true or false", is_on)
    publisher = keys.pop("publisher", None)
    if publisher not in ("zmq", "null", None):
        _refuse("publisher", "zmq or null", publisher)
    checked = {key: _CHECKS[key](key, value) for key, value in keys.items() if value is not None}
    if not is_on or publisher == "null":
        return None
    if hash_algorithm.startswith("xxhash"):
        raise ConfigError(
            f"kv_events_config needs prefix_caching_hash_algo sha256 or sha256_cbor, got {hash_algorithm}: blocks of "
            "other tokens with the same xxHash can be made, and mislead a router"
        )
    return KVEventsConfig(**checked, hash_algorithm=hash_algorithm)


def address_of_engine(address: str, number: int) -> str:
    """Return the address of an engine's socket: the port plus its number; for a path, a suffix. Port 0 is any."""
    base, _, port = address.rpartition(":")
    if address.startswith("ipc://"):
        return f"{address}_dp{number}" if number else address
    if int(port) == 0:
        return address
    if int(port) + number > _MAX_PORT:
        raise ConfigError(f"kv_events_config: {shown(address)} leaves no port for engine {number}")
    return f"{base}:{int(port) + number}"


def is_bound(address: str) -> bool:
    """Return whether the publisher waits for subscribers at an address that was given, else it connects to it.

    The rule of vLLM; a port of 0 can only be bound.
    """
    return "*" in address or "::" in address or address.startswith("ipc://") or address.endswith(":0")


def _address(key: str, value: object) -> object:
    is_text = isinstance(value, str) and len(value) <= MAX_TEXT_CHARS
    found = _ADDRESS.fullmatch(str(value)) if is_text else None
    if found is None or int(found[1] or 0) > _MAX_PORT:
        _refuse(key, "tcp://HOST:PORT or ipc://PATH", value)
    return value


def _count(key: str, value: object) -> object:
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_COUNT:
        _refuse(key, f"an integer from 1 to {MAX_COUNT}", value)
    return value


def _size(key: str, value: object) -> int:
    return parse_bytes(value, f"kv_events_config: {key}")  # type: ignore[arg-type]  # it checks the type


def _switch(key: str, value: object) -> object:
    if not isinstance(value, bool):
        _refuse(key, "true or false", value)
    return value


def _topic(key: str, value: object) -> object:
    if not isinstance(value, str) or len(value) > MAX_TEXT_CHARS:
        _refuse(key, f"a text of at most {MAX_TEXT_CHARS} characters", value)
    return value


def _refuse(key: str, wanted: str, value: object) -> NoReturn:
    raise ConfigError(f"kv_events_config: {key} must be {wanted}, got {shown(value)}")


_CHECKS: dict[str, Any] = {
    "endpoint": _address, "replay_endpoint": _address, "buffer_steps": _count, "hwm": _count, "max_queue_size": _count,
    "topic": _topic, "buffer_bytes": _size, "use_int_block_hashes": _switch,
}
