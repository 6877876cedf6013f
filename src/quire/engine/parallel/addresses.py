"""Addresses of a run over several machines: where rank 0 listens, its secret, and the book of the ranks' addresses.

Loads no torch.
"""

import ipaddress
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from quire.engine.parallel.rank_messages import Published

MIN_SECRET_BYTES = 16
MAX_SECRET_BYTES = 4096
FIND_TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True)
class RunAddress:
    """Address that rank 0 listens at, and the key of the run. Port 0: a free one."""

    address: str
    port: int
    key: bytes


def run_address(options: EngineOptions) -> RunAddress:
    """Return the address of a run that is started by hand. ConfigError as in the functions below."""
    return RunAddress(master_address(options), options.master_port, secret_key(options))


def master_address(options: EngineOptions) -> str:
    """Return the IP address of `master_addr`. ConfigError if it is unknown, or needs a flag or a secret."""
    text = checked_address(options.master_addr, options)
    if not ipaddress.ip_address(text).is_loopback and options.node_secret_file is None:
        raise ConfigError(
            f"master_addr {options.master_addr} can be reached by others: set node_secret_file, the same on all nodes"
        )
    return text


def checked_address(name: str, options: EngineOptions) -> str:
    """Return the IP address of a host name. ConfigError if it is unknown, or public without a flag."""
    text = ip_address_of(name, "master_addr")
    address = ipaddress.ip_address(text)
    if address.is_unspecified or address.is_multicast:
        raise ConfigError(f"master_addr must be an address of node 0 that the other nodes reach, got {name}")
    if address.is_global and not options.allow_public_master_addr:
        raise ConfigError(
            f"master_addr {name} is a public address, and activations are not encrypted: use an address of a private "
            "network, or set allow_public_master_addr"
        )
    return text


def listening_address(options: EngineOptions) -> str:
    """Return the IP address of `kv_host`. ConfigError if it is unknown, or public without a flag."""
    text = ip_address_of(options.kv_host, "kv_host")
    address = ipaddress.ip_address(text)
    if address.is_multicast or (address.is_global and not options.allow_public_master_addr):
        raise ConfigError(
            f"kv_host {options.kv_host} must be an address of a private network: KV blocks are not encrypted on their "
            "way (allow_public_master_addr)"
        )
    return text


def ip_address_of(name: str, option: str) -> str:
    """Return the IP address of a host name, which an option has. ConfigError if it is unknown."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{option} {name} is not an address that is known here: {error}") from error
    return str(found[0][4][0])


def secret_key(options: EngineOptions) -> bytes:
    """Return the key of the run, of 32 bytes. ConfigError if the file of the secret cannot be used."""
    if options.node_secret_file is None:
        return key_of(b"")
    return key_of(read_secret(options.node_secret_file, "node_secret_file"))


def read_secret(path: str, name: str) -> bytes:
    """Return the secret in a file, which the option `name` has. ConfigError if it cannot be used."""
    try:
        with Path(path).expanduser().open("rb") as file:
            secret = file.read(MAX_SECRET_BYTES + 1).strip()
    except OSError as error:
        raise ConfigError(f"{name} {path} cannot be read: {error.strerror}") from error
    if not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES:
        raise ConfigError(
            f"{name} {path} must have {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes, such as those of `openssl rand "
            f"-hex 32`, got {len(secret)}"
        )
    return secret


def key_of(secret: bytes, purpose: bytes = b"quire nodes") -> bytes:
    """Return the key of a secret, another one for each purpose."""
    return sha256(purpose + b"\0" + secret).digest()


class AddressBook:
    """Entries that each rank publishes when the ranks connect, by the number of that time and by key.

    `publish` sends one to the other ranks.
    """

    def __init__(self, publish: Callable[[Published], None]) -> None:
        self._publish = publish
        self._entries = dict[tuple[int, str], bytes]()
        self._changed = threading.Condition()
        self._is_interrupted = False

    def add(self, entry: Published) -> None:
        """Add what another rank has published."""
        with self._changed:
            self._entries[entry.number, entry.key] = entry.value
            self._changed.notify_all()

    def publish(self, number: int, key: str, value: bytes) -> None:
        """Add an entry, on all ranks."""
        entry = Published(number, key, value)
        self.add(entry)
        self._publish(entry)

    def find(self, number: int, key: str) -> bytes | None:
        """Wait for an entry. None if it does not come, or finding is interrupted."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_interrupted or (number, key) in self._entries, FIND_TIMEOUT_S)
            return self._entries.get((number, key))

    def interrupt(self) -> None:
        """Let `find` return, now and until `begin` is called."""
        with self._changed:
            self._is_interrupted = True
            self._changed.notify_all()

    def begin(self, number: int) -> None:
        """Let `find` wait again, and forget the entries of earlier times."""
        with self._changed:
            self._is_interrupted = False
            self._entries = {place: value for place, value in self._entries.items() if place[0] >= number}
