"""Entry point of the `quire` script: load the command line, then run it.

Loading takes half a second. An interrupt in that time ends the process at once, as it ends one that Python does not
run: there is nothing to clean up, and a traceback through half-loaded modules does not help a user.
"""

import gc
import signal
import sys

from quire.core.garbage import collections_paused


def main() -> None:
    """Load and run the command line; always ends in SystemExit."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    with collections_paused():  # modules are never freed
        from quire.cli.main import main as run  # noqa: PLC0415 (after the signal)
        from quire.cli.main import make_app  # noqa: PLC0415

        app = make_app(sys.argv[1:])
    signal.signal(signal.SIGINT, handler)
    try:
        run(app=app)
    finally:
        gc.freeze()  # else the interpreter's last collection looks at all objects: some 70 ms
