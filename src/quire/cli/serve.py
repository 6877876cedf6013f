"""`quire serve`: an OpenAI-compatible server over one model."""

from quire.cli.engine_flags import EngineFlags
from quire.cli.flag_groups import with_flag_groups
from quire.cli.server_flags import ServerFlags
from quire.server.limits import Limits
from quire.server.start import start


@with_flag_groups
def serve(engine: EngineFlags, server: ServerFlags, limits: Limits) -> None:
    """Serve a model over HTTP, as OpenAI's API does."""
    start(engine.options(), server.options(limits))
