"""A batch whose engine stops making progress ends with the reason; of several engines the others go on."""

import asyncio
import io
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.cli.run_batch import run_batch_command
from quire.cli.run_batch.run_batch_command import BatchLine
from quire.engine.launcher import EngineProcess
from quire.engine.messages import EngineDeadError
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions

pytestmark = pytest.mark.usefixtures("forked_processes")

BODY = {"prompt": "def f(", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
STALL_LIMIT_S = 15.0     # longer than a busy machine stops the living engine


def run_with_a_stopped_engine(model: Path, num_engines: int, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Run lines, of which all but the first come after an engine was stopped; return which of them have failed."""
    children: list[EngineProcess] = []
    spawn, output = run_batch_command.spawn_engines, io.StringIO()
    monkeypatch.setattr(run_batch_command, "spawn_engines", lambda options: children.extend(spawn(options)) or children)

    def lines() -> Iterator[BatchLine]:
        for number in range(1 + 2 * num_engines):
            if number == 1:
                os.kill(children[0].process.pid, signal.SIGSTOP)
            body = json.dumps(BODY | {"prompt": [5 + number] * 20}).encode()
            yield BatchLine(number + 1, str(number), "/v1/completions", body)

    engine = EngineOptions(
        str(model), data_parallel_size=num_engines, num_kv_blocks=256, max_model_len=512, stall_limit=STALL_LIMIT_S
    )
    asyncio.run(run_batch_command.run(engine, ServerOptions(stall_limit=STALL_LIMIT_S), lines(), output, 8))
    return [json.loads(line)["error"] is not None for line in output.getvalue().splitlines()]


def test_batch_of_a_stopped_engine_ends_with_the_reason(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EngineDeadError, match="made no progress for 15 s"):
        run_with_a_stopped_engine(demo_model, 1, monkeypatch)


def test_batch_goes_on_with_the_engines_that_live(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    failed = run_with_a_stopped_engine(demo_model, 2, monkeypatch)
    assert len(failed) == 5
    assert any(failed)
    assert not all(failed)
