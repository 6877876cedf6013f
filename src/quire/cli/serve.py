"""`quire serve`: an OpenAI-compatible server over one model."""

from quire.cli.flag_groups import with_config_file, with_flag_groups
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions
from quire.server.start import start


@with_config_file
@with_flag_groups
def serve(engine: EngineOptions, server: ServerOptions) -> None:
    """Serve a model over HTTP, as OpenAI's API does."""
    start(server.with_engine_settings(engine), server)
