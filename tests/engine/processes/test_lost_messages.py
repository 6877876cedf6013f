"""Messages between server and engine that are lost: each hit of each point of sending and receiving fails in turn.

A request that cannot be sent fails alone: nobody has heard of it. Any other message that is lost breaks the accounts of
one side, so the engine is declared dead: every open request is told, nothing hangs, and nothing is left behind.
"""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from quire import SamplingParams
from quire.core.outputs import RequestOutput
from quire.engine import messages
from quire.engine.launcher import EngineProcess
from quire.engine.messages import EngineDeadError
from quire.engine.options import EngineOptions
from quire.engine.processes import client as client_module
from quire.engine.processes.client import EngineClient
from quire.engine.processes.streams import RequestStream
from support.engine_process import TIMEOUT_S, Recorder, add, holds_nothing, is_at_rest, read, until
from support.fake_executor import expected_tokens
from support.scripted_engine import FAULT, failing, spawn_scripted

PARAMS = SamplingParams(max_tokens=3, seed=7, ignore_eos=True, detokenize=False)
PROMPTS = [5] * 20, [6] * 30
EXPECTED = [expected_tokens(prompt, PARAMS, 7, 3, frozenset())[0] for prompt in PROMPTS]


async def outcome(adding: RequestStream | BaseException) -> list[int] | BaseException:
    """Return the tokens of a request, or why there are none."""
    if isinstance(adding, BaseException):
        return adding
    try:
        output: RequestOutput = (await read(adding))[-1]
    except EngineDeadError as error:
        return error
    return output.outputs[0].token_ids


async def ask(client: EngineClient) -> list[list[int] | BaseException]:
    """Return what comes of all PROMPTS at once; afterwards the engine is at rest or dead, and nothing is held."""
    async with asyncio.timeout(TIMEOUT_S):
        added = await asyncio.gather(*(add(client, prompt, PARAMS) for prompt in PROMPTS), return_exceptions=True)
        outcomes = list(await asyncio.gather(*map(outcome, added)))
    await until(lambda: is_at_rest(client) or not client.is_alive)
    assert holds_nothing(client)
    return outcomes


async def run(child: EngineProcess) -> bool:
    """Whether an engine has served all to the end. If it has not, it has died, and each request has ended or knows."""
    try:
        client = await EngineClient.connect(child, EngineOptions(), Recorder())
    except (EngineDeadError, RuntimeError) as error:
        if FAULT not in str(error) or child.process.returncode is None:
            raise
        return False
    outcomes = await ask(client)
    is_alive = client.is_alive
    if not is_alive:
        assert FAULT in str(await client.wait_dead())
    await client.close()
    assert child.process.returncode is not None
    for tokens, expected in zip(outcomes, EXPECTED, strict=True):
        assert tokens == expected or (isinstance(tokens, EngineDeadError) and not is_alive)
    return is_alive


def fail_each_hit(spawn: Callable[[int], EngineProcess]) -> int:
    """Return how many hits there were."""
    nth = 1
    while not asyncio.run(run(spawn(nth))):
        nth += 1
    return nth - 1


def test_report_that_the_engine_cannot_send_is_its_end() -> None:
    assert fail_each_hit(lambda nth: spawn_scripted("send", nth)) >= 5, "two of the start, three of steps"


def test_command_that_the_engine_cannot_take_is_its_end() -> None:
    assert fail_each_hit(lambda nth: spawn_scripted("receive", nth)) == 2


def test_report_that_the_server_cannot_take_is_the_engines_end(monkeypatch: pytest.MonkeyPatch) -> None:
    decode = messages.decode_report

    def spawn(nth: int) -> EngineProcess:
        monkeypatch.setattr(messages, "decode_report", failing(decode, nth))
        return spawn_scripted()

    assert fail_each_hit(spawn) >= 5


def test_request_that_the_server_cannot_send_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        client = await EngineClient.connect(spawn_scripted(), EngineOptions(), Recorder())
        frame = client_module.frame
        for victim, other in ((0, 1), (1, 0)):
            monkeypatch.setattr(client_module, "frame", failing(frame, 1 + victim))
            outcomes = await ask(client)
            assert str(outcomes[victim]) == FAULT
            assert outcomes[other] == EXPECTED[other]
        monkeypatch.setattr(client_module, "frame", frame)
        assert await ask(client) == EXPECTED
        await client.close()

    asyncio.run(run())


@pytest.mark.parametrize("lost", ["abort", "unpin", "question"])
def test_command_that_the_server_cannot_send_is_the_engines_end(monkeypatch: pytest.MonkeyPatch, lost: str) -> None:
    """Else a request would run on without a reader, or a prefix be kept for ever."""

    async def run() -> None:
        child = spawn_scripted()
        client = await EngineClient.connect(child, EngineOptions(), Recorder())
        victim, other = [await add(client, prompt, replace(PARAMS, max_tokens=10**5)) for prompt in PROMPTS]
        monkeypatch.setattr(client_module, "frame", failing(client_module.frame, 1))
        if lost == "abort":
            victim.abort()
        elif lost == "unpin":
            client.unpin(-1)
        else:
            with pytest.raises(EngineDeadError, match=FAULT):
                await client.block_map(0, 1, TIMEOUT_S)
        with pytest.raises(EngineDeadError, match=FAULT):
            await read(other)
        victim.abort()
        async with asyncio.timeout(TIMEOUT_S):
            await client.wait_dead()
        await until(lambda: child.process.returncode is not None)
        assert holds_nothing(client)
        await client.close()

    asyncio.run(run())
