"""`quire serve` in a forked process (support/forked_engines.py); its engines and ranks are forks of it in turn.

With a descriptor in the place of a command it is the process of one model of several.
"""

import signal
import sys

from quire.cli import serve  # noqa: F401 (which the command line loads when it is asked for)
from quire.cli.main import main as run
from quire.engine import launcher
from quire.engine.parallel import starters
from quire.server import lifecycle  # noqa: F401 (which `serve` loads while the engine starts)
from quire.server.models import model_process
from support.forked_engines import fork_child


def main() -> None:
    """Run the command line, without the mask of signals that an engine has."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, launcher.STOP_SIGNALS)
    launcher.start_module = starters.start_module = fork_child  # type: ignore[assignment]  # what is used of `Popen`
    if sys.argv[1].isdigit():
        model_process.main()
    else:
        run(sys.argv[1:])
