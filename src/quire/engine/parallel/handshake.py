"""Handshake of two ranks over TCP, and the seals of what they send then.

Both prove that they have the run's key without sending it: each answers the other's random number with a code
(HMAC-SHA-256, RFC 2104) of both numbers. Each frame then carries a code of its number in its direction and its content,
by keys of this connection alone: nothing can be changed, inserted, repeated or left out. Nothing is encrypted.
"""

import hmac
import secrets
import socket
import time

from quire.core.errors import ConfigError
from quire.core.version import __version__

GREETING = b"quire-nodes\n"
VERSION = __version__.encode().ljust(32)[:32]
NUMBER_BYTES = 32
RANK_BYTES = 4
CODE_BYTES = 32
HANDSHAKE_TIMEOUT_S = 5.0   # for all of it
REFUSAL = b"refused".ljust(CODE_BYTES)  # replaces rank 0's proof: the rank's own is wrong


class FrameSeal:
    """The codes of one direction of a connection."""

    def __init__(self, key: bytes) -> None:
        self._key, self._number = key, 0

    def close(self, content: bytes) -> bytes:
        """Return the next content with its code before it."""
        return self._code(content) + content

    def open(self, sealed: bytes) -> bytes:
        """Return the next content. ConnectionError if its code is wrong."""
        content = sealed[CODE_BYTES:]
        if not hmac.compare_digest(sealed[:CODE_BYTES], self._code(content)):
            raise ConnectionError("a frame with a wrong code")
        return content

    def _code(self, content: bytes) -> bytes:
        self._number += 1
        return hmac.digest(self._key, self._number.to_bytes(8, "big") + content, "sha256")


def greet(connection: socket.socket, key: bytes) -> tuple[int, tuple[FrameSeal, FrameSeal]]:
    """Let the other end prove its key, as rank 0; return its rank, and the seals of what is sent and read.

    OSError if it has no proof within HANDSHAKE_TIMEOUT_S, ConfigError if it has one and runs another version.
    """
    number = secrets.token_bytes(NUMBER_BYTES)
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    connection.settimeout(HANDSHAKE_TIMEOUT_S)
    connection.sendall(GREETING + VERSION + number)
    claim = _read(connection, len(VERSION) + RANK_BYTES + NUMBER_BYTES, deadline_s)
    both = number + claim
    if not hmac.compare_digest(_read(connection, CODE_BYTES, deadline_s), _code(key, b"rank", both)):
        connection.sendall(REFUSAL)
        raise ConnectionError("another secret")
    connection.sendall(_code(key, b"leader", both))
    connection.settimeout(None)
    version, rank = claim[: len(VERSION)], int.from_bytes(claim[len(VERSION) :][:RANK_BYTES], "big")
    if version != VERSION:
        raise ConfigError(f"rank {rank} runs Quire {_text(version)}, rank 0 runs {__version__}")
    return rank, (FrameSeal(_code(key, b"to rank", both)), FrameSeal(_code(key, b"to leader", both)))


def answer(
    connection: socket.socket, key: bytes, rank: int, limit_s: float = HANDSHAKE_TIMEOUT_S
) -> tuple[FrameSeal, FrameSeal]:
    """Prove the key to rank 0, and let it do so; return the seals of what is sent and read.

    OSError if the connection ends, or `limit_s` seconds are over: rank 0 may have closed it for others that wait.
    ConfigError for another secret or version, or what is no rank 0.
    """
    deadline_s = time.monotonic() + limit_s
    greeting = _read(connection, len(GREETING) + len(VERSION) + NUMBER_BYTES, deadline_s)
    if not greeting.startswith(GREETING):
        raise ConfigError("what listens at master_addr and master_port is not node 0 of Quire")
    version, number = greeting[len(GREETING) : -NUMBER_BYTES], greeting[-NUMBER_BYTES:]
    claim = VERSION + rank.to_bytes(RANK_BYTES, "big") + secrets.token_bytes(NUMBER_BYTES)
    both = number + claim
    connection.sendall(claim + _code(key, b"rank", both))
    proof = _read(connection, CODE_BYTES, deadline_s)
    if proof == REFUSAL:
        raise ConfigError("node 0 refuses the secret: node_secret_file must be the same on all nodes")
    if not hmac.compare_digest(proof, _code(key, b"leader", both)):
        raise ConfigError("node 0 has another secret: node_secret_file must be the same on all nodes")
    connection.settimeout(None)
    if version != VERSION:
        raise ConfigError(f"rank {rank} runs Quire {__version__}, rank 0 runs {_text(version)}")
    return FrameSeal(_code(key, b"to leader", both)), FrameSeal(_code(key, b"to rank", both))


def _text(version: bytes) -> str:
    return version.decode(errors="replace").strip()


def _code(key: bytes, purpose: bytes, numbers: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + numbers, "sha256")


def _read(connection: socket.socket, num_bytes: int, deadline_s: float) -> bytes:
    """Read so many bytes. ConnectionError if the stream ends before, TimeoutError at the deadline."""
    found = bytearray()
    while len(found) < num_bytes:
        left_s = deadline_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake took too long")
        connection.settimeout(left_s)
        part = connection.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("the connection has ended in the handshake")
        found += part
    return bytes(found)
