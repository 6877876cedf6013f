"""The flags of `quire serve` beside the engine's: `quire.server.options.ServerOptions` as typer sees it."""

from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Annotated

from quire.cli.flag_groups import flag
from quire.server.limits import Limits
from quire.server.options import ServerOptions

_flag = partial(flag, panel="Server")


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Where the server listens, and whom it lets in."""

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
    stall_limit: Annotated[
        float, _flag("seconds without progress while work is pending, after which /health is 503")
    ] = 10.0
    restart_engine: Annotated[int, _flag("how often a new engine takes the place of one that has died")] = 0
    shutdown_timeout: Annotated[float, _flag("seconds that open requests get after SIGTERM")] = 30.0
    enable_debug: Annotated[
        bool, _flag("serve /debug/kv and /debug/blocks: the KV cache, block by block", "--enable-debug")
    ] = False

    def options(self, limits: Limits) -> ServerOptions:
        """Return the options. ConfigError for a value that cannot work."""
        values = asdict(self) | asdict(limits)
        names, keys = tuple(values.pop("served_model_name")), tuple(values.pop("api_key"))
        return ServerOptions(served_model_name=names, api_key=keys, **values)
