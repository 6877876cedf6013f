"""Listening socket, bound before anything is loaded, its TLS, the bound on connections, and their lingering close.

A port in use is reported at once. Connections are bounded by an option, or by the file limit of the process.

Closing at once would reset the connection and discard the response. Lingering connections do not count towards
max_connections; they have a bound of their own, past which the oldest is closed.
"""

import asyncio
import contextlib
import errno
import os
import resource
import socket
import ssl
import stat

from quire.core.errors import ConfigError
from quire.server.options import ServerOptions

LINGER_S = 2.0       # between a refusal and the close
MAX_LINGERING = 64   # files are reserved for them (`quire.server.http.sockets`)


class LingeringConnections:
    """The lingering connections of one server. Lives on its event loop."""

    def __init__(self) -> None:
        self._closing: dict[asyncio.Transport, asyncio.TimerHandle] = {}  # oldest first

    def __len__(self) -> int:
        return len(self._closing)

    def add(self, transport: asyncio.Transport) -> None:
        """Close a connection in LINGER_S seconds, or earlier if MAX_LINGERING are refused after it."""
        while len(self._closing) >= MAX_LINGERING:
            self.discard(oldest := next(iter(self._closing)))
            oldest.close()
        self._closing[transport] = asyncio.get_running_loop().call_later(LINGER_S, transport.close)

    def discard(self, transport: asyncio.Transport) -> None:
        """Remove a connection, which was closed or never lingered."""
        timer = self._closing.pop(transport, None)
        if timer is not None:
            timer.cancel()


NUM_NEIGHBOURS = 100       # ports above one in use that are tried for the error's advice
LOWEST_FREE_FOR_ALL = 1024
BACKLOG = 2048             # connections that the kernel queues until they are accepted
RESERVED_FILES = 64 + MAX_LINGERING  # for files other than counted connections


def bind(host: str, port: int) -> socket.socket:
    """Return a bound socket, which refuses connections until `listen`. The ConfigError names a setting that works."""
    family, address = _resolve(host, port)
    try:
        return _bound(family, address)
    except OSError as error:
        raise _explained(error, host, port) from error


def bind_path(path: str) -> socket.socket:
    """Return a bound Unix domain socket. A socket without a server is replaced; ConfigError for any other file."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_left_over(path):
            os.unlink(path)
        listener.bind(path)
    except OSError as error:
        listener.close()
        reason = "it is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
        raise ConfigError(f"cannot listen on uds {path}: {reason}") from error
    return listener


def remove_path(path: str | None) -> None:
    """Remove the file of a Unix domain socket, if there is one."""
    if path is not None:
        with contextlib.suppress(OSError):
            os.unlink(path)


def _is_left_over(path: str) -> bool:
    """Return whether a path is a socket on which nothing listens any more."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return True
    return False


def listen(listener: socket.socket, host: str) -> None:
    """Start listening. ConfigError if another server listens on the port since `bind`."""
    try:
        listener.listen(BACKLOG)
    except OSError as error:
        raise _explained(error, host, 0 if listener.family == socket.AF_UNIX else port_of(listener)) from error


def port_of(listener: socket.socket) -> int:
    """Return the port; the system chooses it if the option is 0."""
    return int(listener.getsockname()[1])


def url_of(listener: socket.socket, host: str, *, is_encrypted: bool = False) -> str:
    """Return the server's URL, or unix:PATH."""
    if listener.family == socket.AF_UNIX:
        return f"unix:{listener.getsockname()}"
    return f"http{'s' * is_encrypted}://{f'[{host}]' if ':' in host else host}:{port_of(listener)}"


def raise_file_limit(wanted: int) -> None:
    """Raise the file limit for `wanted` connections, as far as the system allows, if it is lower."""
    if max_connections(wanted) == wanted:
        return
    _, most_granted = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_files = wanted + RESERVED_FILES
    if most_granted != resource.RLIM_INFINITY:
        num_files = min(num_files, most_granted)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, most_granted))


def max_connections(wanted: int) -> int:
    """Return how many connections may be open at once: `wanted`, or fewer by the file limit."""
    most_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most_files == resource.RLIM_INFINITY:
        return wanted
    return max(1, min(wanted, most_files - RESERVED_FILES))


def _resolve(host: str, port: int) -> tuple[int, tuple[object, ...]]:
    """Return the family and the address of a host; an IPv4 address if it has one, since every client tries that."""
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:
        message = f"host {host!r} cannot be resolved: {error}; set host to an address of this machine"
        raise ConfigError(message) from error
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, address


def _bound(family: int, address: tuple[object, ...]) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # the port is free as soon as the process ends
        listener.bind(address)
    except BaseException:
        listener.close()
        raise
    return listener


def _explained(error: OSError, host: str, port: int) -> ConfigError:
    """Return the error with the nearest setting that would work."""
    match error.errno:
        case errno.EADDRINUSE:
            free = _nearest_free(host, port)
            nearest = f"--port {free} is free, and " if free else ""
            return ConfigError(f"port {port} of host {host} is in use: {nearest}--port 0 takes any free port")
        case errno.EACCES:
            return ConfigError(
                f"port {port} needs rights that this process lacks: set --port to {LOWEST_FREE_FOR_ALL} or more"
            )
        case errno.EADDRNOTAVAIL:
            return ConfigError(f"host {host} is no address of this machine: set --host to 127.0.0.1 or 0.0.0.0")
        case _:
            return ConfigError(f"cannot listen on port {port} of host {host}: {error.strerror}")


def _nearest_free(host: str, port: int) -> int | None:
    for other in range(port + 1, min(port + NUM_NEIGHBOURS, 0xFFFF) + 1):
        try:
            _bound(*_resolve(host, other)).close()
        except OSError:
            continue
        return other
    return None


def tls_context(options: ServerOptions) -> ssl.SSLContext | None:
    """Return the context that connections are encrypted with, or None. ConfigError for files that are none of it."""
    if options.ssl_certfile is None:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(options.ssl_certfile, options.ssl_keyfile, password=_refuse_password)
    except OSError as error:  # ssl.SSLError is one
        key = "" if options.ssl_keyfile is None else f" with ssl_keyfile {options.ssl_keyfile!r}"
        raise ConfigError(f"ssl_certfile {options.ssl_certfile!r}{key} cannot be used: {error}") from error
    if options.ssl_ca_certs is not None:
        try:
            context.load_verify_locations(options.ssl_ca_certs)
        except OSError as error:
            raise ConfigError(f"ssl_ca_certs {options.ssl_ca_certs!r} cannot be used: {error}") from error
    context.verify_mode = ssl.VerifyMode(options.ssl_cert_reqs)
    if options.ssl_ciphers is not None:
        try:
            context.set_ciphers(options.ssl_ciphers)
        except ssl.SSLError as error:
            raise ConfigError(f"ssl_ciphers {options.ssl_ciphers!r} names no cipher that there is") from error
    return context


def _refuse_password() -> str:
    """Raise ConfigError: OpenSSL would ask on the terminal."""
    raise ConfigError("ssl_keyfile must not be encrypted: a server cannot ask for the password")
