"""`quire serve`: an OpenAI-compatible server over one model."""

from dataclasses import asdict, dataclass, replace
from functools import partial

from quire.cli.flag_groups import flag_field, with_flag_groups
from quire.cli.model_flags import EngineFlags
from quire.server.options import Limits, ServerOptions, parse_key_weights
from quire.server.start import start

_flag = partial(flag_field, panel="Server")


@dataclass(frozen=True, slots=True)
class ServerFlags:
    """Where the server listens, and whom it lets in: `ServerOptions` as typer sees it, beside the `Limits`."""

    host: str = _flag("127.0.0.1", "address to listen on")
    port: int = _flag(8000, "port to listen on; 0 takes any free one")
    served_model_name: list[str] = _flag(
        [], "the model's name for clients (repeatable)", show_default="the model's path or id", metavar="NAME"
    )
    api_key: list[str] = _flag([], "a key that lets clients in (repeatable); better as QUIRE_API_KEY", metavar="KEY")
    operator_api_key: str | None = _flag(
        None, "the operator's key: priorities, pins of all keys; better as QUIRE_OPERATOR_API_KEY", metavar="KEY"
    )
    key_weights: list[str] = _flag(
        [], "shares of the keys under the policy fair, as 2,1 or KEY=WEIGHT (repeatable)", metavar="WEIGHTS"
    )
    allow_client_priority: bool = _flag(
        False, "grant all clients a priority below 0", "--allow-client-priority"
    )
    allow_unauthenticated: bool = _flag(
        False, "serve everyone who reaches a host that is not of this machine alone", "--allow-unauthenticated"
    )
    stall_limit: float = _flag(10.0, "seconds without progress while work is pending, after which /health is 503")
    start_timeout: float = _flag(
        120.0, "seconds without a sign of life (CPU time, reads) after which an engine that starts is given up"
    )
    stream_keepalive: float = _flag(15.0, "seconds without news after which a stream gets a comment; 0: never")
    restart_engine: int = _flag(0, "how often a new engine takes the place of one that has died")
    shutdown_timeout: float = _flag(30.0, "seconds that open requests get after SIGTERM")
    enable_debug: bool = _flag(
        False, "serve /debug/kv and /debug/blocks: the KV cache, block by block", "--enable-debug"
    )

    def options(self, limits: Limits) -> ServerOptions:
        """Return the options. ConfigError for a value that cannot work."""
        values = asdict(self) | asdict(limits)
        names, keys = tuple(values.pop("served_model_name")), tuple(values.pop("api_key"))
        weights = parse_key_weights(values.pop("key_weights"))
        return ServerOptions(served_model_name=names, api_key=keys, key_weights=weights, **values)


@with_flag_groups
def serve(engine: EngineFlags, server: ServerFlags, limits: Limits) -> None:
    """Serve a model over HTTP, as OpenAI's API does."""
    options = server.options(limits)
    start(replace(engine.options(), max_kv_share_per_key=options.max_kv_share_per_key), options)
