"""Servers, in processes of their own, with engines that stop themselves: at their start, or amid answers.

However late a test looks, such an engine has not come any further; SIGCONT lets it go on.
"""

from support.server import ENTRY, ServerProcess, engine_pids, is_stopped, wait_until

_STARTS = """
import subprocess
from quire.engine import launcher

start_module = launcher.start_module

def start(module, **settings):
    is_engine = module == "quire.engine.processes.engine_process"
    return start_module(module, start=start_engine if is_engine else subprocess.Popen, **settings)

launcher.start_module = start
"""
_HELD = """
num_engines = 0

def start_engine(command, **settings):
    global num_engines
    num_engines += 1
    stop = "kill -STOP $$; " if num_engines >= {first} else ""
    return subprocess.Popen(["sh", "-c", stop + 'exec "$@"', "sh", *command], **settings)
"""
_AMID_ANSWERS = """
ENGINE = '''
import os, signal
import quire.engine.processes.engine_process as engine_process

step, num_steps = engine_process.EngineLoop._step, 0

def step_or_stop(loop):
    global num_steps
    step(loop)
    num_steps += len(loop._engine.scheduler.queues.running) == {num_requests}
    if num_steps == 5:      # each request has a token by now
        num_steps += 1
        os.kill(os.getpid(), signal.SIGSTOP)

engine_process.EngineLoop._step = step_or_stop
engine_process.main()
'''
def start_engine(command, **settings):
    module = command.index("-m")
    return subprocess.Popen([*command[:module], "-c", ENGINE, *command[module + 2 :]], **settings)
"""
# Entries of ServerProcess.
EACH, EACH_BUT_THE_FIRST = (_STARTS + _HELD.format(first=number) + ENTRY for number in (1, 2))


def amid_answers(num_requests: int) -> str:
    """Return code in front of an entry: the engine stops itself, once, when so many requests have some tokens."""
    return _STARTS + _AMID_ANSWERS.format(num_requests=num_requests)


def held_engine(server: ServerProcess) -> int:
    """Return the process of the only engine once it has stopped itself."""
    found = list[int]()

    def is_held() -> bool:
        found[:] = engine_pids(server)
        return len(found) == 1 and is_stopped(found[0])

    wait_until(is_held)
    return found[0]
