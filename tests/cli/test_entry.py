"""The script's first half second, in which it loads."""

import signal
import subprocess
import sys

import pytest

# Interrupts the process when a module is first looked for, as Ctrl-C in the middle of loading does.
INTERRUPTED = """
import signal, sys
module, sys.argv[1:] = sys.argv[1], ["serve"]
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == module:
            signal.raise_signal(signal.SIGINT)
sys.meta_path.insert(0, Finder())
from quire.cli.entry import main
main()
"""


@pytest.mark.parametrize("module", ["typer", "quire.cli.serve", "quire.server.options"])
def test_interrupt_while_the_command_line_loads_prints_no_traceback(module: str) -> None:
    command = [sys.executable, "-c", INTERRUPTED, module]
    ran = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert (ran.returncode, ran.stderr) == (-signal.SIGINT, "")


def test_command_line_runs_and_takes_interrupts_itself() -> None:
    code = (
        "import signal, quire.cli.main as m; from quire.cli.entry import main\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # a background job of a shell ignores it
        "m.main = lambda app: print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)\n"
        "main()"
    )
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
