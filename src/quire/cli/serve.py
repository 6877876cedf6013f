"""`quire serve`: an OpenAI-compatible server over one model."""

import os
import signal
from typing import NoReturn

from quire.cli.flag_groups import with_config_file, with_flag_groups
from quire.core import logs
from quire.engine.options import EngineOptions
from quire.engine.parallel.node import run_node
from quire.server.options import ServerOptions
from quire.server.signals import STOP_SIGNALS, exit_on_signal
from quire.server.start import start


@with_config_file
@with_flag_groups
def serve(engine: EngineOptions, server: ServerOptions) -> None:
    """Serve a model over HTTP, as OpenAI's API does; or, as a node other than 0, compute for such a server."""
    engine = server.with_engine_settings(engine)
    if server.models_dir is not None:
        from quire.server.models.start_models import start_models  # noqa: PLC0415 (aiohttp, for several models)

        start_models(engine, server)
    if engine.node_rank == 0:
        start(engine, server, fetch)
    else:
        fetch(engine)
        logs.share(server.log_level, server.log_format, server.log_file)
        run_other_node(engine, server.restart_engine)


def fetch(engine: EngineOptions) -> None:
    """Fetch the model of a hub that is not on this machine."""
    if engine.model is not None and not os.path.exists(engine.model):
        from quire.cli.models.pull_command import fetch_missing  # noqa: PLC0415 (NumPy, for models of a hub)

        fetch_missing(engine)


def run_other_node(engine: EngineOptions, num_restarts: int) -> NoReturn:
    """Run the ranks of a node other than 0. Raises the reason of their end."""
    for number in STOP_SIGNALS:
        signal.signal(number, exit_on_signal)
    raise run_node(engine, num_restarts)
