"""Servers, in processes of their own, with engines that stop themselves as soon as they are started.

However late a test looks, such an engine has not come any further; SIGCONT lets it load.
"""

from support.server import ENTRY, ServerProcess, engine_pids, is_stopped, wait_until

_HELD = """
import subprocess
from quire.engine import launcher

start_module, num_engines = launcher.start_module, 0

def start_engine(command, **settings):
    global num_engines
    num_engines += 1
    stop = "kill -STOP $$; " if num_engines >= {first} else ""
    return subprocess.Popen(["sh", "-c", stop + 'exec "$@"', "sh", *command], **settings)

def start(module, **settings):
    is_engine = module == "quire.engine.processes.engine_process"
    return start_module(module, start=start_engine if is_engine else subprocess.Popen, **settings)

launcher.start_module = start
"""
EACH, EACH_BUT_THE_FIRST = (_HELD.format(first=number) + ENTRY for number in (1, 2))  # entries of ServerProcess


def held_engine(server: ServerProcess) -> int:
    """Return the process of the only engine once it has stopped itself."""
    found = list[int]()

    def is_held() -> bool:
        found[:] = engine_pids(server)
        return len(found) == 1 and is_stopped(found[0])

    wait_until(is_held)
    return found[0]
