"""The flags of `quire serve` beside the engine's: `quire.server.options.ServerOptions` as typer sees it."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated

from quire.cli.flag_groups import flag
from quire.engine.options import parse_bytes
from quire.server.options import ServerOptions

_flag = partial(flag, panel="Server")


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Where the server listens, whom it lets in, and how much of it one client may ask for."""

    host: Annotated[str, _flag("address to listen on")] = "127.0.0.1"
    port: Annotated[int, _flag("port to listen on; 0 takes any free one")] = 8000
    served_model_name: Annotated[
        list[str],
        _flag("the model's name for clients (repeatable)", show_default="the model's path or id", metavar="NAME"),
    ] = field(default_factory=list)
    api_key: Annotated[
        list[str], _flag("a key that lets clients in (repeatable); better as QUIRE_API_KEY", metavar="KEY")
    ] = field(default_factory=list)
    allow_unauthenticated: Annotated[
        bool, _flag("serve everyone who reaches a host that is not of this machine alone", "--allow-unauthenticated")
    ] = False
    max_queued_requests: Annotated[int, _flag("requests that may wait; more are answered with 429")] = 1024
    max_n: Annotated[int, _flag("highest n and beam width of a request")] = 64
    max_body_bytes: Annotated[str, _flag("longest body of a request; 512KiB, 4MiB", metavar="SIZE")] = "4MiB"
    stall_limit: Annotated[
        float, _flag("seconds without progress while work is pending, after which /health is 503")
    ] = 10.0
    shutdown_timeout: Annotated[float, _flag("seconds that open requests get after SIGTERM")] = 30.0
    enable_debug: Annotated[
        bool, _flag("serve /debug/kv and /debug/blocks: the KV cache, block by block", "--enable-debug")
    ] = False

    def options(self) -> ServerOptions:
        """Return the options. ConfigError for a value that cannot work."""
        values = asdict(self)
        max_body_bytes = parse_bytes(values.pop("max_body_bytes"), "max_body_bytes")
        names, keys = tuple(values.pop("served_model_name")), tuple(values.pop("api_key"))
        return ServerOptions(served_model_name=names, api_key=keys, max_body_bytes=max_body_bytes, **values)
