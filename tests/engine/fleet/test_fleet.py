"""Several real engines behind one client: the answers of one engine, and an engine that dies takes only its own."""

import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, DeadlineExceededError, ModelError, UnknownPrefixError
from quire.core.outputs import RequestOutput
from quire.core.step_times import chunk_work
from quire.engine.fleet.fleet import Fleet, FleetSettings, connect_fleet
from quire.engine.launcher import EngineProcess, num_threads_of, spawn_engines
from quire.engine.messages import EngineDeadError
from quire.engine.metrics.engine_metrics import EngineMetrics
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineClient
from quire.engine.processes.forecast import Asked
from quire.engine.processes.streams import RequestStream
from quire.engine.requests.input_processor import Prompt
from support.engine_process import TIMEOUT_S, is_running, until
from support.stopping import stopped

pytestmark = pytest.mark.usefixtures("forked_processes")

NUM_ENGINES = 2
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
SEEDLESS = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True)


@asynccontextmanager
async def running_fleet(model: Path, stall_limit: float = 600.0, **settings: float | str) -> AsyncIterator[Fleet]:
    settings = {"max_num_seqs": 8, "num_kv_blocks": 256, "max_model_len": 1024} | settings
    options = EngineOptions(str(model), data_parallel_size=NUM_ENGINES, stall_limit=stall_limit, **settings)  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        processes = spawn_engines(options)
    metrics = Metrics("tiny", num_engines=NUM_ENGINES)
    fleet = await connect_fleet(processes, FleetSettings(options, metrics))
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield fleet
        await until(lambda: all(engine.num_queued == 0 for engine in fleet.engines))
        fleet.router.check()
    finally:
        await fleet.close()
        assert not any(is_running(process.process.pid) for process in processes)


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def shared(runner: asyncio.Runner, demo_model: Path) -> Iterator[Fleet]:
    """Return a fleet for all tests that kill nothing and leave nothing behind."""
    opened = running_fleet(demo_model, max_model_len=1500)
    yield runner.run(opened.__aenter__())
    runner.run(opened.__aexit__(None, None, None))


def with_fleet(
    model: Path, work: Callable[[Fleet], Awaitable[None]], stall_limit: float = 600.0, **settings: float | str
) -> None:
    async def run() -> None:
        async with running_fleet(model, stall_limit, **settings) as fleet:
            await work(fleet)

    asyncio.run(run())


async def ask(fleet: Fleet, prompt: Prompt, params: SamplingParams = GREEDY) -> RequestStream:
    prepared = fleet.prepare(fleet.inputs.tokenize(prompt), fleet.inputs.check_params(params))
    return await fleet.add(prepared, external_id="mine", arrival_s=0.0)


async def answer(fleet: Fleet, prompt: Prompt, params: SamplingParams = GREEDY) -> RequestOutput:
    return [output async for output in await ask(fleet, prompt, params)][-1]


def pid_of(fleet: Fleet, number: int) -> int:
    return fleet.engines[number]._connection.engine.process.pid


@contextmanager
def stopped_engines(fleet: Fleet) -> Iterator[list[ExitStack]]:
    """Stop all engines. Closing one of what is yielded continues the engine with that number."""
    with ExitStack() as stack:
        held = [stack.enter_context(ExitStack()) for _ in fleet.engines]
        for number, each in enumerate(held):
            each.enter_context(stopped(pid_of(fleet, number)))
        yield held


def shorten_stall_limit(engine: EngineClient, limit_s: float) -> None:
    """Change the stall limit of one engine: a busy machine may stop another one for longer."""
    engine._stall_limit_s = limit_s
    engine._tasks.pop().cancel()
    engine._tasks.append(asyncio.create_task(engine._watch_progress()))


def test_engine_gets_no_request_while_its_process_ends(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of a large one takes seconds to free; requests that were sent to it would fail after that."""

    async def work(fleet: Fleet) -> None:
        dying, ends, may_end = fleet.engines[0], threading.Event(), threading.Event()
        stop = EngineProcess.stop

        def stop_later(process: EngineProcess) -> int:
            if process is dying._connection.engine:
                ends.set()
                may_end.wait()
            return stop(process)

        monkeypatch.setattr(EngineProcess, "stop", stop_later)
        os.kill(pid_of(fleet, 0), signal.SIGKILL)
        await until(ends.is_set)
        outputs = [await answer(fleet, [number] * 20) for number in range(5, 9)]
        assert {output.metrics.engine for output in outputs if output.metrics} == {1}
        with pytest.raises(EngineDeadError, match="the engine process ended"):
            await dying.add(fleet.prepare(fleet.inputs.tokenize([5]), fleet.inputs.check_params(GREEDY)),
                            external_id="", arrival_s=0.0)  # fmt: skip
        may_end.set()
        assert "killed by signal 9" in str(await dying.wait_dead())

    with_fleet(demo_model, work)


async def pin(fleet: Fleet, prompt: list[int]) -> tuple[str, int]:
    """Pin a prompt; return the pin's id and its engine."""
    prepared = fleet.prepare_pin(fleet.inputs.tokenize(prompt))
    stream = await fleet.add(prepared, external_id="pin", arrival_s=0.0)
    await anext(stream)
    return fleet.pinned.add(prepared.request).id, stream.metrics.engine


def test_answers_are_those_of_one_engine_whichever_computes_them(demo_model: Path) -> None:
    """Seeds come from the numbers of requests, which all engines share."""
    prompts: list[Prompt] = [[5 + number, 6, 7, 8] for number in range(12)]
    with LLM(str(demo_model)) as llm:
        expected = llm.generate(prompts, [GREEDY, SEEDLESS] * 6, use_tqdm=False)

    async def work(fleet: Fleet) -> None:
        asked = zip(prompts, [GREEDY, SEEDLESS] * 6, strict=True)
        streams = [await ask(fleet, prompt, params) for prompt, params in asked]
        outputs = [[output async for output in stream][-1] for stream in streams]
        assert {stream.metrics.engine for stream in streams} == {0, 1}
        assert [output.outputs[0].token_ids for output in outputs] == [one.outputs[0].token_ids for one in expected]

    with_fleet(demo_model, work)


def test_hot_prefix_stays_with_its_engine_and_is_found_there(shared: Fleet, runner: asyncio.Runner) -> None:
    async def work(fleet: Fleet) -> None:
        prefix = list(range(5, 69))
        first = await answer(fleet, [*prefix, 100])
        assert first.metrics is not None
        again = [await answer(fleet, [*prefix, 101 + number]) for number in range(4)]
        assert {output.metrics.engine for output in again if output.metrics} == {first.metrics.engine}
        assert all(output.num_cached_tokens == len(prefix) for output in again)

    runner.run(work(shared))


def test_first_token_is_predicted_for_the_engine_that_gets_the_request(shared: Fleet, runner: asyncio.Runner) -> None:
    async def work(fleet: Fleet) -> None:
        hot, cold = list(range(5, 405)), list(range(405, 5, -1))
        first = await answer(fleet, hot, LONG)
        assert first.metrics is not None
        await answer(fleet, hot)
        assert fleet.engines[first.metrics.engine].state.step_times is not None
        checked, asked = fleet.inputs.check_params(GREEDY), Asked(chunk_work(0, len(hot)))
        requests = [fleet.prepare(fleet.inputs.tokenize(prompt), checked).request for prompt in (hot, cold)]
        with stopped(pid_of(fleet, 0)), stopped(pid_of(fleet, 1)):
            found_s = fleet.first_token_s(asked, requests[0])
            streams = [await ask(fleet, [number] * 500, GREEDY) for number in range(405, 409)]
            behind_s = fleet.first_token_s(asked, requests[0])
            for stream in streams:
                stream.abort()
        assert 0 < found_s < behind_s
        own_s = fleet.engines[first.metrics.engine].first_token_s(asked._replace(knows_cached=True))
        assert found_s < own_s

    runner.run(work(shared))


def test_aborted_request_is_no_work_any_more(shared: Fleet, runner: asyncio.Runner) -> None:
    async def work(fleet: Fleet) -> None:
        with stopped(pid_of(fleet, 0)), stopped(pid_of(fleet, 1)):
            streams = [await ask(fleet, [number] * 20, LONG) for number in range(905, 909)]
            assert sum(fleet.router.num_pending) == 80
            for stream in streams:
                stream.abort()
            assert list(fleet.router.num_pending) == [0, 0]
        await until(lambda: all(engine.state.num_running == 0 for engine in fleet.engines))

    runner.run(work(shared))


def test_engine_without_progress_gets_no_requests_while_another_has_some(shared: Fleet, runner: asyncio.Runner) -> None:
    async def work(fleet: Fleet) -> None:
        await until(lambda: all(engine._is_idle for engine in fleet.engines))   # no report is under way
        with stopped_engines(fleet) as held:
            hanging = await ask(fleet, [5] * 20, LONG)
            number = hanging.metrics.engine
            held[1 - number].close()
            fleet.engines[number]._last_progress_s = -10_000.0
            assert fleet.engines[number].stalled_s > 1000
            assert fleet.stalled_s < 1000
            assert {(await ask_engine(fleet, [5] * 20)) for _ in range(4)} == {1 - number}
            hanging.abort()

    async def ask_engine(fleet: Fleet, prompt: list[int]) -> int:
        output = await answer(fleet, prompt)
        assert output.metrics is not None
        return output.metrics.engine

    runner.run(work(shared))


def test_pins_live_in_their_engine_and_bound_what_any_engine_can_take(demo_model: Path) -> None:
    async def work(fleet: Fleet) -> None:
        first_id, first = await pin(fleet, list(range(5, 45)))
        assert fleet.inputs.limits.num_pinned_blocks == 0      # the other engine has all of its blocks
        second_id, second = await pin(fleet, list(range(300, 340)))
        assert {first, second} == {0, 1}
        await until(lambda: fleet.inputs.limits.num_pinned_blocks > 0)
        await fleet.unpin_prefix(first_id)
        assert fleet.engines[first].state.pins == ()
        assert len(fleet.engines[second].state.pins) == 1
        with pytest.raises(UnknownPrefixError):
            await fleet.unpin_prefix(first_id)
        await fleet.unpin_prefix(second_id)

    with_fleet(demo_model, work)


def test_request_goes_where_pins_leave_room(shared: Fleet, runner: asyncio.Runner) -> None:
    async def work(fleet: Fleet) -> None:
        pin_id, pinned_in = await pin(fleet, [5] * 400)
        stream = await ask(fleet, [5] * 700, SamplingParams(n=2, max_tokens=600, ignore_eos=True))
        assert stream.metrics.engine != pinned_in       # although that has cached the most
        stream.abort()
        await fleet.unpin_prefix(pin_id)

    runner.run(work(shared))


def test_dead_engine_loses_its_own_requests_alone_and_comes_back(demo_model: Path) -> None:
    async def work(fleet: Fleet) -> None:
        spawned: list[tuple[int, EngineProcess]] = []
        supervising = asyncio.create_task(fleet.supervise(lambda *found: spawned.append(found), pause=no_pause))
        pin_id, pinned_in = await pin(fleet, list(range(5, 45)))
        expected = await answer(fleet, [5, 6, 7])
        with stopped_engines(fleet):    # no answer ends before the kill
            streams = [await ask(fleet, [50 + number] * 30, LONG) for number in range(6)]
            os.kill(pid_of(fleet, pinned_in), signal.SIGKILL)
        lost = [stream for stream in streams if stream.metrics.engine == pinned_in]
        kept = [stream for stream in streams if stream.metrics.engine != pinned_in]
        assert lost
        assert kept
        for stream in lost:
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                [output async for output in stream]
        for stream in kept:
            assert len([output async for output in stream][-1].outputs[0].token_ids) == 900
        await until(lambda: all(engine.is_alive for engine in fleet.engines))
        assert [number for number, _ in spawned] == [pinned_in]
        assert fleet.engines[pinned_in].ready.limits == fleet.engines[1 - pinned_in].ready.limits
        with pytest.raises(UnknownPrefixError):
            await fleet.unpin_prefix(pin_id)
        await until(lambda: fleet.engines[1 - pinned_in]._is_idle)     # no report is under way
        with stopped(pid_of(fleet, 1 - pinned_in)):     # so that the new one must answer
            fleet.engines[1 - pinned_in]._is_idle, fleet.engines[1 - pinned_in]._last_progress_s = False, -10_000.0
            again = await answer(fleet, [5, 6, 7])
        assert again.outputs[0].token_ids == expected.outputs[0].token_ids
        assert again.metrics is not None
        assert again.metrics.engine == pinned_in
        supervising.cancel()
        with suppress(asyncio.CancelledError):
            await supervising

    with_fleet(demo_model, work)


@pytest.mark.parametrize("has_work", [True, False], ids=["with work", "idle"])
def test_stopped_engine_is_ended_like_a_dead_one_and_comes_back(demo_model: Path, *, has_work: bool) -> None:
    async def work(fleet: Fleet) -> None:
        supervising = asyncio.create_task(fleet.supervise(lambda *found: None, pause=no_pause))
        expected = await answer(fleet, [5, 6, 7])
        with stopped_engines(fleet) as held:
            streams = [await ask(fleet, [50 + number] * 30, LONG) for number in range(6 * has_work)]
            number = streams[0].metrics.engine if has_work else 1
            pid, engine = pid_of(fleet, number), fleet.engines[number]
            shorten_stall_limit(engine, 3.0)
            held[1 - number].close()
            for stream in streams:
                if stream.metrics.engine == number:
                    with pytest.raises(EngineDeadError, match=r"made no progress for 3 s \(stall_limit\)"):
                        [output async for output in stream]
                else:
                    assert len([output async for output in stream][-1].outputs[0].token_ids) == 900
            assert "no progress" in str(await engine.wait_dead())
        await until(lambda: not is_running(pid) and all(each.is_alive for each in fleet.engines))
        assert fleet.engines[number] is not engine
        await until(lambda: fleet.stalled_s == 0)
        assert (await answer(fleet, [5, 6, 7])).outputs[0].token_ids == expected.outputs[0].token_ids
        supervising.cancel()
        with suppress(asyncio.CancelledError):
            await supervising

    with_fleet(demo_model, work)


async def no_pause(_: float) -> None:
    """Start at once."""


def test_supervision_ends_when_no_engine_can_be_started(demo_model: Path) -> None:
    async def work(fleet: Fleet) -> None:
        def spawn(options: EngineOptions, number: int, secret: bytes) -> EngineProcess:
            raise ConfigError(f"engine {number} cannot start")

        pauses: list[float] = []

        async def pause(seconds: float) -> None:
            pauses.append(seconds)
            await asyncio.sleep(0)

        supervising = asyncio.create_task(fleet.supervise(lambda *found: None, pause=pause, spawn=spawn))
        for number in range(NUM_ENGINES):
            os.kill(pid_of(fleet, number), signal.SIGKILL)
        assert "cannot start" in str(await supervising)
        assert sorted(set(pauses))[:4] == [0.5, 1, 2, 4]
        with pytest.raises(EngineDeadError, match=r"all engines are dead; engine 0: .*; engine 1: "):
            await ask(fleet, [5, 6, 7])

    with_fleet(demo_model, work)


def test_engine_that_cannot_start_leaves_no_other_behind(tmp_path: Path) -> None:
    options = EngineOptions(str(tmp_path), data_parallel_size=2)
    processes = spawn_engines(options)
    settings = FleetSettings(options, Metrics("tiny", num_engines=2))
    with pytest.raises(ModelError):
        asyncio.run(connect_fleet(processes, settings))
    assert not any(is_running(process.process.pid) for process in processes)


def test_threads_of_the_machine_are_divided() -> None:
    assert [num_threads_of(number, 3, {"OMP_NUM_THREADS": "8"}) for number in range(3)] == [3, 3, 2]
    assert [num_threads_of(number, 3, {"OMP_NUM_THREADS": "1,2"}) for number in range(3)] == [1, 1, 1]
    assert sum(num_threads_of(number, 2, {}) for number in range(2)) == max(2, len(os.sched_getaffinity(0)))


def test_metrics_have_the_engines_by_label() -> None:
    metrics = Metrics("tiny", num_engines=2)
    page = metrics.exposition([3, 0])[0].decode()
    assert 'vllm:num_requests_waiting{engine="0",model_name="tiny"} 3.0' in page
    assert 'vllm:num_requests_waiting{engine="1",model_name="tiny"} 0.0' in page
    assert page.count("# TYPE vllm:num_requests_waiting gauge") == 1
    assert all(isinstance(engine, EngineMetrics) for engine in metrics.engines)


# --- engines for prompts: number 0 computes them, number 1 decodes ----------------------------------------------------

# An address of its own for each process of tests: all of 127.0.0.0/8 is this machine.
HOST = f"127.{1 + os.getpid() // 65536 % 250}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
APART: dict[str, float | str] = {"prefill_engines": 1, "prefill_least_tokens": 64, "kv_host": HOST, "kv_port": 15100,
                         "max_model_len": 1500}  # fmt: skip
SHORT_LEASE: dict[str, float | str] = {"kv_lease_duration": 1.0}    # over before a fetch where an engine is stopped


def apart_prompt(number: int) -> list[int]:
    """Return a prompt of 500 tokens."""
    return [5 + (number + 7 * place) % 280 for place in range(500)]


def moved(fleet: Fleet, number: int, name: str) -> float:
    """Return a count of an engine's last report, 0 without one."""
    kv = fleet.engines[number].state.kv
    return 0 if kv is None else kv.transfer.get(name, 0)


async def connected(fleet: Fleet) -> None:
    await until(lambda: fleet.engines[0].is_alive and moved(fleet, 1, "peers_connected") == 1)


async def answered(stream: RequestStream) -> tuple[list[int], float, int]:
    """Return an answer's tokens, the engine that has made it, and the tokens that it has fetched."""
    output = [output async for output in stream][-1]
    return output.outputs[0].token_ids, stream.metrics.engine, stream.metrics.num_peer_tokens


def is_settled(fleet: Fleet) -> bool:
    """Return whether the engines that live hold no block, by their last reports."""
    states = [engine.state.kv for engine in fleet.engines if engine.is_alive]
    return all(kv is not None and kv.used_blocks == 0 and not kv.transfer.get("held_blocks") for kv in states)


def test_prompt_is_computed_apart_where_much_of_it_is_new(demo_model: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await connected(fleet)
        prompt = apart_prompt(0)
        tokens, engine, num_fetched = await answered(await ask(fleet, prompt))
        assert (engine, num_fetched) == (1, 496)        # all but the last block
        again = await answered(await ask(fleet, prompt))
        assert again == (tokens, 1, 0), "it is cached where it is decoded"
        assert (await answered(await ask(fleet, prompt[:63])))[1:] == (1, 0)
        asked = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=0)
        assert (await answered(await ask(fleet, apart_prompt(1), asked)))[1:] == (1, 0), "all states are needed"
        await until(lambda: is_settled(fleet))
        assert moved(fleet, 0, "tickets_made") == moved(fleet, 0, "tickets_redeemed") == 1

    with_fleet(demo_model, work, **APART)


def test_request_that_is_aborted_in_either_engine_holds_nothing(demo_model: Path) -> None:
    async def work(fleet: Fleet) -> None:
        await connected(fleet)
        with stopped(pid_of(fleet, 0)):
            stream = await ask(fleet, apart_prompt(0))
            assert fleet.num_open == 1
            stream.abort()
            assert [output async for output in stream] == []
            await until(lambda: fleet.num_open == 0)
        with stopped(pid_of(fleet, 1)):
            stream = await ask(fleet, apart_prompt(1), LONG)
            await until(lambda: stream.metrics.engine == 1)
            assert fleet.num_open == 1
            stream.abort()
            assert fleet.num_open == 0
        assert [output async for output in stream] == []
        await until(lambda: is_settled(fleet))      # the lease of a prompt that was not fetched is over
        assert (await answered(await ask(fleet, apart_prompt(2))))[1] == 1

    with_fleet(demo_model, work, **APART | SHORT_LEASE)


def test_deadline_counts_on_while_the_prompt_is_computed_apart(demo_model: Path) -> None:
    params = replace(GREEDY, ttft_deadline_ms=100)

    async def work(fleet: Fleet) -> None:
        await connected(fleet)
        with stopped(pid_of(fleet, 0)):
            stream = await ask(fleet, apart_prompt(0), params)
            await asyncio.sleep(0.11)                   # no sooner than the deadline
        with pytest.raises(DeadlineExceededError, match="within 100 ms"):
            await answered(stream)
        await until(lambda: is_settled(fleet))

    with_fleet(demo_model, work, **APART | {"kv_port": 15103})


@pytest.fixture(params=["demo", "states"])
def model_apart(request: pytest.FixtureRequest, demo_model: Path, tmp_path: Path) -> Path:
    """Return the folder of the demo model, or of one with states."""
    if request.param == "demo":
        return demo_model
    from support.random_folder import HYBRID, write_random_folder  # needs torch

    return write_random_folder(tmp_path / "states", HYBRID | {"max_position_embeddings": 2048})


def test_engines_killed_in_each_phase_cost_no_token_and_no_block(model_apart: Path) -> None:
    async def work(fleet: Fleet) -> None:
        supervising = asyncio.create_task(fleet.supervise(lambda *found: None, pause=no_pause))
        await connected(fleet)
        expected = [(await answer(fleet, apart_prompt(number)[::-1])).outputs[0].token_ids for number in range(5)]
        assert moved(fleet, 0, "tickets_made") == 5

        async def settled() -> None:
            await until(lambda: all(engine.is_alive for engine in fleet.engines) and is_settled(fleet))
            await connected(fleet)
            fleet.router.check()

        def salted(number: int) -> Prompt:
            return {"prompt_token_ids": apart_prompt(number)[::-1], "cache_salt": "another"}

        # The engine for prompts, while it computes.
        with stopped(pid_of(fleet, 0)):
            stream = await ask(fleet, salted(0))
            os.kill(pid_of(fleet, 0), signal.SIGKILL)
            assert await answered(stream) == (expected[0], 1, 0)
        await settled()
        # The same, when the blocks have not been fetched.
        with stopped(pid_of(fleet, 1)):
            stream = await ask(fleet, salted(1))
            await until(lambda: stream.metrics.engine == 1)
            os.kill(pid_of(fleet, 0), signal.SIGKILL)
            await fleet.engines[0].wait_dead()
        assert await answered(stream) == (expected[1], 1, 0)
        await settled()
        # The same is stopped there: the other one gives it up.
        with ExitStack() as held:
            with stopped(pid_of(fleet, 1)):
                stream = await ask(fleet, salted(2))
                await until(lambda: stream.metrics.engine == 1)
                held.enter_context(stopped(pid_of(fleet, 0)))
            assert await answered(stream) == (expected[2], 1, 0)
        await settled()
        # The engine that decodes, before it has the request: the only one that is left does all of it.
        with stopped(pid_of(fleet, 0)):
            stream = await ask(fleet, salted(3))
            dead = fleet.engines[1]
            os.kill(pid_of(fleet, 1), signal.SIGKILL)
            await dead.wait_dead()
        tokens, *_ = await answered(stream)
        assert tokens == expected[3]
        await settled()
        # The same, with the ticket: the lease ends by its time.
        with stopped(pid_of(fleet, 1)):
            stream = await ask(fleet, salted(4))
            await until(lambda: stream.metrics.engine == 1)
            os.kill(pid_of(fleet, 1), signal.SIGKILL)
            with pytest.raises(EngineDeadError):
                await answered(stream)
        await settled()
        # The same, while it decodes. An answer that was whole before the kill is asked for again.
        is_lost = False
        while not is_lost:
            stream = await ask(fleet, salted(4), LONG)
            await until(lambda stream=stream: stream.metrics.first_token_s is not None)
            os.kill(pid_of(fleet, 1), signal.SIGKILL)
            try:
                assert len((await answered(stream))[0]) == LONG.max_tokens
            except EngineDeadError:
                is_lost = True
            await settled()
        tokens, engine, _ = await answered(await ask(fleet, apart_prompt(4)[::-1]))    # the lease may be over
        assert (tokens, engine) == (expected[4], 1)
        supervising.cancel()
        with suppress(asyncio.CancelledError):
            await supervising

    with_fleet(model_apart, work, **APART | SHORT_LEASE | {"kv_port": 15101})
