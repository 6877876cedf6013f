"""ServerOptions: every setting of the HTTP server under its public name, checked before anything is loaded."""

import ipaddress
from dataclasses import dataclass

from quire.core.errors import ConfigError
from quire.server.limits import Limits

_HIGHEST_PORT = 65535
_LONGEST_SHUTDOWN_S = 86400.0
_MOST_RESTARTS = 1000
_SHORTEST_STALL_S, _LONGEST_STALL_S = 1.0, 86400.0  # the engine gives signs of life four times a second


@dataclass(frozen=True, slots=True)
class ServerOptions(Limits):
    """What a user may set; docs/reference.md tells what each means. `port` 0 takes any free port."""

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: tuple[str, ...] = ()          # empty: the model's path or id
    api_key: tuple[str, ...] = ()
    allow_unauthenticated: bool = False
    stall_limit: float = 10.0                        # seconds
    restart_engine: int = 0                          # times
    shutdown_timeout: float = 30.0                   # seconds
    enable_debug: bool = False

    def __post_init__(self) -> None:
        """Check ranges, and that a server which others can reach has a key or was meant to have none."""
        Limits.__post_init__(self)
        if not self.host:
            raise ConfigError("host must not be empty; 0.0.0.0 is every address of this machine")
        if not 0 <= self.port <= _HIGHEST_PORT:
            raise ConfigError(f"port must be from 0 to {_HIGHEST_PORT}, got {self.port}")
        if not _SHORTEST_STALL_S <= self.stall_limit <= _LONGEST_STALL_S:
            raise ConfigError(
                f"stall_limit must be from {_SHORTEST_STALL_S:g} to {_LONGEST_STALL_S:g} seconds, "
                f"got {self.stall_limit}"
            )
        if not 0 <= self.restart_engine <= _MOST_RESTARTS:
            raise ConfigError(f"restart_engine must be from 0 to {_MOST_RESTARTS}, got {self.restart_engine}")
        if not 0 <= self.shutdown_timeout <= _LONGEST_SHUTDOWN_S:
            raise ConfigError(
                f"shutdown_timeout must be from 0 to {_LONGEST_SHUTDOWN_S:g} seconds, got {self.shutdown_timeout}"
            )
        if any(len(key.split()) != 1 or key != key.strip() for key in self.api_key):  # no client could send it
            raise ConfigError("api_key must not be empty or have spaces")
        if not all(name and name.isprintable() for name in self.served_model_name):
            raise ConfigError("served_model_name must not be empty or have control characters")
        if not (self.api_key or self.allow_unauthenticated or _is_loopback(self.host)):
            raise ConfigError(
                f"host {self.host} can be reached by others: set api_key, or allow_unauthenticated to serve everyone, "
                f"or host to 127.0.0.1"
            )


def _is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`. A name other than localhost may be anything."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
