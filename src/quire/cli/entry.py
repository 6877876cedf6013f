"""Entry point of the `quire` script: load the command line, then run it.

Loading takes half a second. An interrupt in that time ends the process at once, as it ends one that Python does not
run: there is nothing to clean up, and a traceback through half-loaded modules does not help a user.
"""

import signal


def main() -> None:
    """Load and run the command line; always ends in SystemExit."""
    handler = signal.signal(signal.SIGINT, signal.SIG_DFL)
    from quire.cli.main import main as run  # noqa: PLC0415 (after the signal)

    signal.signal(signal.SIGINT, handler)
    run()
