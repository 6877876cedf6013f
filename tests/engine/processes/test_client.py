"""Requests over the process boundary: the same outputs as without it, and nothing left behind, whoever ends first."""

import asyncio
import random
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
import uvloop

from quire import LLM, SamplingParams
from quire.core.deltas import SequenceDelta
from quire.core.errors import InvalidRequestError, RequestFailedError, UnknownPrefixError
from quire.core.outputs import CompletionOutput, PinnedPrefix, RequestOutput
from quire.core.step_times import chunk_work
from quire.engine.options import EngineOptions
from quire.engine.processes import forecast
from quire.engine.processes.client import EngineClient
from quire.engine.processes.forecast import LEAST_MEASURED, MOST_OFF, Asked
from quire.engine.requests.input_processor import Prompt
from quire.engine.requests.output_processor import CompletionBuilder, OutputKind
from support.engine_process import (
    TIMEOUT_S,
    Recorder,
    add,
    connect,
    holds_nothing,
    is_at_rest,
    is_quiet,
    read,
    until,
    wait_until,
)
from support.stopping import stopped

MAX_NUM_SEQS = 16
PROMPTS = ["def read(path):\n", "class Stack:\n", "import "]
GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
LONG = SamplingParams(temperature=0.0, max_tokens=1500, ignore_eos=True)
PARAMETERS = {
    "greedy with logprobs": SamplingParams(temperature=0.0, max_tokens=24, logprobs=5, prompt_logprobs=3),
    "seeded branches": SamplingParams(n=3, seed=-7, max_tokens=24, logprobs=0),
    "stop strings": SamplingParams(n=4, seed=1, max_tokens=60, stop=["self", "\n", "e"], logprobs=1),
    "stop string kept": SamplingParams(seed=2, max_tokens=60, stop="re", include_stop_str_in_output=True),
    "shaped": SamplingParams(
        seed=2**64 - 1, max_tokens=24, top_k=40, top_p=0.9, min_p=0.01, temperature=1.3, repetition_penalty=1.2,
        presence_penalty=0.5, frequency_penalty=-0.5, logit_bias={10: 5.0, "11": -100}, bad_words=["self", "return"],
        min_tokens=8, stop_token_ids=[20, 30], skip_special_tokens=False,
    ),
    "no text": SamplingParams(seed=3, max_tokens=24, detokenize=False, allowed_token_ids=list(range(5, 900))),
}  # fmt: skip


@pytest.fixture(scope="module")
def llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), max_num_seqs=MAX_NUM_SEQS) as llm:
        yield llm


@pytest.fixture(scope="module", params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def runner(request: pytest.FixtureRequest) -> Iterator[asyncio.Runner]:
    """Return one event loop for all tests: a client lives on one."""
    with asyncio.Runner(loop_factory=request.param) as runner:
        yield runner


@pytest.fixture(scope="module")
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture(scope="module")
def shared_client(runner: asyncio.Runner, demo_model: Path, recorder: Recorder) -> Iterator[EngineClient]:
    client = runner.run(connect(EngineOptions(str(demo_model), max_num_seqs=MAX_NUM_SEQS), recorder))
    yield client
    runner.run(client.close())


@pytest.fixture
def client(shared_client: EngineClient, runner: asyncio.Runner) -> Iterator[EngineClient]:
    """The module's engine; whatever a test did, the next request must be served and nothing left behind."""
    yield shared_client
    assert len(runner.run(answer(shared_client, "def f(", GREEDY)).outputs[0].token_ids) == 6
    assert holds_nothing(shared_client)
    runner.run(until(lambda: is_at_rest(shared_client)))


async def answer(client: EngineClient, prompt: Prompt, params: SamplingParams) -> RequestOutput:
    return (await read(await add(client, prompt, params)))[-1]


def without_history(output: RequestOutput) -> RequestOutput:
    return replace(output, request_id="", num_cached_tokens=0, metrics=None)


def joined(outputs: list[RequestOutput]) -> RequestOutput:
    """Return what the outputs of a stream of kind "delta" add up to."""
    branches: dict[int, CompletionOutput] = {}
    for output in outputs:
        for new in output.outputs:
            old = branches.get(new.index)
            branches[new.index] = new if old is None else replace(
                new,
                text=old.text + new.text,
                token_ids=old.token_ids + new.token_ids,
                logprobs=None if old.logprobs is None or new.logprobs is None else old.logprobs + new.logprobs,
            )
    prompt_logprobs = [output.prompt_logprobs for output in outputs if output.prompt_logprobs is not None]
    return replace(
        outputs[-1],
        outputs=[branches[index] for index in sorted(branches)],
        prompt_logprobs=prompt_logprobs[0] if prompt_logprobs else None,
    )


# --- outputs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", PARAMETERS)
def test_outputs_equal_those_of_llm_in_every_kind(
    llm: LLM, client: EngineClient, runner: asyncio.Runner, name: str
) -> None:
    params = PARAMETERS[name]
    expected = [without_history(output) for output in llm.generate(PROMPTS, params, use_tqdm=False)]

    async def run(kind: OutputKind) -> list[list[RequestOutput]]:
        streams = [await add(client, prompt, params, kind) for prompt in PROMPTS]
        return await asyncio.gather(*map(read, streams))

    whole, growing, new = (runner.run(run(kind)) for kind in ("final", "cumulative", "delta"))  # type: ignore[arg-type]
    assert [without_history(outputs[0]) for outputs in whole] == expected
    assert [without_history(outputs[-1]) for outputs in growing] == expected
    assert [without_history(joined(outputs)) for outputs in new] == expected
    assert {len(outputs) for outputs in whole} == {1}
    assert all([output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True] for outputs in growing)


def test_output_carries_the_callers_id_and_the_times_of_the_request(
    client: EngineClient, runner: asyncio.Runner, recorder: Recorder
) -> None:
    before_s = time.monotonic()

    async def run() -> RequestOutput:
        return (await read(await add(client, "x", GREEDY, name="cmpl-1")))[0]

    output = runner.run(run())
    assert output.request_id == "cmpl-1"
    metrics = output.metrics
    assert metrics is not None
    assert metrics.first_scheduled_s is not None
    assert metrics.first_token_s is not None
    assert metrics.finished_s is not None
    moments = [before_s, metrics.arrival_s, metrics.first_scheduled_s, metrics.first_token_s, metrics.finished_s]
    assert moments == sorted(moments) <= [time.monotonic()] * 5
    assert recorder.processed[-1].finished[0].metrics.finished_s == metrics.finished_s


def test_stop_string_ends_the_branch_in_the_engine_too(
    client: EngineClient, runner: asyncio.Runner, recorder: Recorder
) -> None:
    recorder.steps.clear()
    output = runner.run(answer(client, "x", replace(LONG, stop=[""" """, "\n"])))
    runner.run(until(lambda: is_at_rest(client)))
    assert output.outputs[0].finish_reason == "stop"
    assert len(recorder.steps) < LONG.max_tokens  # type: ignore[operator]


@pytest.mark.parametrize(
    ("params", "told"),
    [
        (SamplingParams(max_tokens=3000), "max_model_len"),
        (SamplingParams(n=17), "max_num_seqs"),
        (SamplingParams(logprobs=21), "max_logprobs"),
        (SamplingParams(stop_token_ids=[4096]), "vocabulary"),
    ],
    ids=str,
)
def test_request_that_cannot_run_is_refused_before_it_is_sent(
    client: EngineClient, params: SamplingParams, told: str
) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        client.prepare(client.inputs.tokenize("x"), client.inputs.check_params(params))


# --- pins -------------------------------------------------------------------------------------------------------------


async def pin(client: EngineClient, prefix: Prompt) -> PinnedPrefix:
    prepared = client.prepare_pin(client.inputs.tokenize(prefix))
    await read(await client.add(prepared, external_id="x", arrival_s=0.0))
    return client.pinned.add(prepared.request)


def test_limits_follow_what_the_engine_has_pinned(client: EngineClient, runner: asyncio.Runner) -> None:
    async def run() -> None:
        before = client.inputs.limits
        pinned = await pin(client, [5] * 40)
        assert client.inputs.limits == replace(before, num_pinned_blocks=3)
        assert (await answer(client, [*[5] * 40, 6], GREEDY)).num_cached_tokens == 40
        await client.unpin_prefix(pinned.id)
        assert client.inputs.limits == before
        assert client.state.pins == ()
        with pytest.raises(UnknownPrefixError):
            await client.unpin_prefix(pinned.id)

    runner.run(run())


def test_requests_that_cross_a_pin_are_refused_by_the_engine(
    client: EngineClient, runner: asyncio.Runner, recorder: Recorder
) -> None:
    """Both were checked before either was sent."""
    limits = client.inputs.limits
    longest = limits.max_model_len // limits.block_size
    params = replace(LONG, n=MAX_NUM_SEQS, max_tokens=limits.max_model_len - 1)
    assert limits.num_blocks == longest * MAX_NUM_SEQS, "the sequence group takes everything"

    async def run() -> None:
        for pin_first in (True, False):
            prepared = [
                client.prepare_pin(client.inputs.tokenize([5] * 40)),
                client.prepare(client.inputs.tokenize([6]), client.inputs.check_params(params)),
            ]
            kept, refused = prepared if pin_first else reversed(prepared)
            stream = await client.add(kept, external_id="x", arrival_s=0.0)
            with pytest.raises(InvalidRequestError, match="pinned") as told:
                await read(await client.add(refused, external_id="x", arrival_s=0.0))
            assert told.value.param == "prompt"
            if pin_first:
                await read(stream)
                await client.unpin_prefix(client.pinned.add(kept.request).id)
            stream.abort()
        stream = await client.add(prepared[1], external_id="x", arrival_s=0.0)
        unread = await client.add(prepared[0], external_id="x", arrival_s=0.0)
        await until(lambda: unread._error is not None)
        unread.abort()
        stream.abort()

    runner.run(run())


def test_unpinning_that_is_cancelled_goes_on(client: EngineClient, runner: asyncio.Runner) -> None:
    async def run() -> None:
        pinned = await pin(client, [5] * 40)
        unpinning = asyncio.create_task(client.unpin_prefix(pinned.id))
        await asyncio.sleep(0)
        unpinning.cancel()
        await asyncio.wait((unpinning,))
        assert unpinning.cancelled()
        await until(lambda: client.state.pins == ())
        assert not client._pending

    runner.run(run())


# --- slow readers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["cumulative", "delta"])
def test_reader_that_comes_late_finds_everything_in_one_output(
    client: EngineClient, runner: asyncio.Runner, kind: OutputKind
) -> None:
    async def run() -> list[RequestOutput]:
        stream = await add(client, "x = ", replace(GREEDY, max_tokens=40), kind)
        await until(lambda: is_at_rest(client) and client.num_queued == 0)
        return await read(stream)

    outputs = runner.run(run())
    assert len(outputs) == 1
    assert len(outputs[0].outputs[0].token_ids) == 40


def test_engine_waits_for_a_server_that_stands_still_and_nothing_is_lost(
    llm: LLM, client: EngineClient, runner: asyncio.Runner
) -> None:
    """A report with the logprobs of these prompts is larger than a socket's buffer: the engine stops within it."""
    params = SamplingParams(temperature=0.0, max_tokens=10, prompt_logprobs=20, ignore_eos=True)
    prompts = [[i] * 600 for i in range(5, 13)]
    expected = [without_history(output) for output in llm.generate(prompts, params, use_tqdm=False)]

    async def run() -> list[RequestOutput]:
        streams = [await add(client, prompt, params) for prompt in prompts]
        await until(lambda: client.num_queued < len(prompts))
        assert client.num_queued_tokens == 600 * client.num_queued
        wait_until(lambda: is_quiet(client._connection.engine.process.pid))  # the event loop stands still meanwhile
        assert len(client._streams) == len(prompts)
        return [(await read(stream))[-1] for stream in streams]

    assert [without_history(output) for output in runner.run(run())] == expected


@pytest.mark.parametrize("deadline", [{"ttft_deadline_ms": 3_600_000}, {"deadline_ms": 3_600_000}], ids=str)
def test_first_tokens_of_requests_with_deadlines_correct_what_is_predicted(
    client: EngineClient, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, deadline: dict[str, int]
) -> None:
    asked = Asked(chunk_work(0, 100))
    monkeypatch.setattr(forecast, "FRESH_S", 3600.0)

    async def run() -> None:
        await answer(client, [7] * 100, GREEDY)
        late_s = time.monotonic() + 8 * MOST_OFF * client.first_token_s(asked)
        with stopped(client._connection.engine.process.pid):
            streams = [await add(client, [7] * 100, replace(GREEDY, **deadline)) for _ in range(LEAST_MEASURED)]
            await until(lambda: time.monotonic() > late_s)
        for stream in streams:
            await read(stream)
        await until(lambda: is_at_rest(client))
        uncorrected_s = client._forecast.first_token_s(client.state, client._streams.queued, asked, time.monotonic())
        assert client.first_token_s(asked) == pytest.approx(MOST_OFF * uncorrected_s)

    runner.run(run())


def test_requests_wait_for_an_engine_that_stands_still(client: EngineClient, runner: asyncio.Runner) -> None:
    """What is sent beyond the socket's buffer waits in `add`, and can be taken back."""
    pid = client._connection.engine.process.pid

    async def run() -> None:
        with stopped(pid):
            tasks = [asyncio.create_task(add(client, [7] * 2000, GREEDY)) for _ in range(300)]
            await until(lambda: sum(task.done() for task in tasks) > 10 and len(client._streams) == 300)
            waiting = [task for task in tasks if not task.done()]
            for task in waiting:
                task.cancel()
            await asyncio.wait(waiting)
            assert len(client._streams) == 300 - len(waiting)
        for task in tasks:
            with suppress(asyncio.CancelledError):
                task.result().abort()

    runner.run(run())


# --- the block map ----------------------------------------------------------------------------------------------------


def test_block_map_shows_who_runs_and_disturbs_nobody(client: EngineClient, runner: asyncio.Runner) -> None:
    async def run() -> None:
        params, num_tokens = replace(LONG, n=4, seed=1, temperature=1.0), 200
        alone = await answer(client, "def area(shape):", replace(params, max_tokens=num_tokens))
        stream = await add(client, "def area(shape):", params, "cumulative")
        await until(lambda: client.state.num_running == 1)
        num_blocks = client.inputs.limits.num_blocks  # any may be in use: it depends on what is cached
        maps = await asyncio.gather(*(client.block_map(0, num_blocks, TIMEOUT_S) for _ in range(20)))
        assert [len(shown.blocks) for shown in maps] == [num_blocks] * 20
        branches = [holder.branch for shown in maps for holder in shown.holders if len(shown.holders) == 4]
        assert branches[:4] == [0, 1, 2, 3]
        watched = await anext(stream)
        while min(len(branch.token_ids) for branch in watched.outputs) < num_tokens:
            watched = await anext(stream)
        stream.abort()
        beginnings = [branch.token_ids[:num_tokens] for branch in watched.outputs]
        assert beginnings == [branch.token_ids for branch in alone.outputs]

    runner.run(run())


def test_block_map_that_takes_too_long_is_given_up_and_the_next_one_is_right(
    client: EngineClient, runner: asyncio.Runner
) -> None:
    async def run() -> None:
        with stopped(client._connection.engine.process.pid):
            waiting = [asyncio.create_task(client.block_map(first, 1, timeout_s=0.05)) for first in range(3)]
            await asyncio.wait(waiting)
        assert [type(task.exception()) for task in waiting] == [TimeoutError] * 3
        shown = await client.block_map(7, 2, TIMEOUT_S)
        assert [entry.block for entry in shown.blocks] == [7, 8]
        assert not client._pending

    runner.run(run())


# --- aborts -----------------------------------------------------------------------------------------------------------


def test_requests_cut_at_random_moments_leave_nothing_behind(
    client: EngineClient, runner: asyncio.Runner, recorder: Recorder
) -> None:
    recorder.processed.clear()
    recorder.aborted_requests.clear()
    rng = random.Random(8)
    moments = ["prepared", "sending", "queued", "waiting", "running", "running", "ended", "read"]
    num_added = 0

    async def cut(moment: str, num_outputs: int, params: SamplingParams) -> None:
        nonlocal num_added
        prompt = client.inputs.tokenize([rng.randrange(5, 900)] * rng.randint(1, 300))
        prepared = client.prepare(prompt, client.inputs.check_params(params))
        if moment == "prepared":
            return
        adding = asyncio.create_task(client.add(prepared, external_id="x", arrival_s=0.0, kind="delta"))
        if moment == "sending":
            adding.cancel()  # before its first line
            return
        stream = await adding
        num_added += 1
        if moment == "waiting":
            reader = asyncio.create_task(read(stream))
            await asyncio.sleep(0)
            stream.abort()
            await reader
        if moment == "running":
            for _ in range(num_outputs):
                await anext(stream, None)
        if moment == "ended":
            await until(lambda: client.state.num_running + client.state.num_waiting == 0)
        if moment == "read":
            await read(stream)
        stream.abort()
        stream.abort()
        assert [output async for output in stream] == []

    async def run() -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(200):
                params = SamplingParams(n=rng.choice([1, 1, 3]), seed=1, max_tokens=rng.randint(1, 30), stop=["\n"])
                group.create_task(cut(rng.choice(moments), rng.randint(1, 10), params))
                if rng.random() < 0.5:
                    await asyncio.sleep(rng.random() * 0.005)
        assert holds_nothing(client)
        await until(lambda: is_at_rest(client))

    runner.run(run())
    num_ended = sum(len(step.finished) for step in recorder.processed)
    assert num_ended + len(recorder.aborted_requests) == num_added, "each request ends once"


def test_abort_ends_the_request_in_the_engine(
    client: EngineClient, runner: asyncio.Runner, recorder: Recorder
) -> None:
    async def run() -> None:
        stream = await add(client, "x", LONG, "delta")
        for _ in range(5):
            await anext(stream)
        recorder.steps.clear()
        stream.abort()
        await until(lambda: is_at_rest(client))

    runner.run(run())
    assert len(recorder.steps) < LONG.max_tokens  # type: ignore[operator]
    assert recorder.aborted_requests[-1].finish_reasons == ["abort"]


def test_abort_wakes_who_waits(client: EngineClient, runner: asyncio.Runner) -> None:
    async def run() -> list[RequestOutput]:
        stream = await add(client, "x", LONG)
        reader = asyncio.create_task(read(stream))
        await until(lambda: client.state.num_running == 1)
        stream.abort()
        async with asyncio.timeout(TIMEOUT_S):
            return await reader

    assert runner.run(run()) == []


# --- faults of one request --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reads", [True, False], ids=["read", "aborted"])
def test_fault_in_the_output_of_one_request_fails_that_request_alone(
    client: EngineClient, runner: asyncio.Runner, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    extend, num_extended = CompletionBuilder.extend, 0

    def failing(branch: CompletionBuilder, delta: SequenceDelta) -> None:
        nonlocal num_extended
        num_extended += delta.request_id == victim
        if delta.request_id == victim and num_extended == 3:
            raise RuntimeError("no such byte")
        extend(branch, delta)

    async def run() -> RequestOutput:
        nonlocal victim
        bystander = await add(client, "x", replace(LONG, max_tokens=40))
        stream = await add(client, "y", LONG, "delta")
        victim = stream._request_id
        await until(lambda: num_extended >= 3)
        if reads:
            with pytest.raises(RequestFailedError, match="no such byte"):
                await read(stream)
        stream.abort()
        return (await read(bystander))[-1]

    victim = -1
    monkeypatch.setattr(CompletionBuilder, "extend", failing)
    assert len(runner.run(run()).outputs[0].token_ids) == 40
    assert client.is_alive


def test_request_that_cannot_be_sent_leaves_nothing_behind(client: EngineClient, runner: asyncio.Runner) -> None:
    prepared = client.prepare(client.inputs.tokenize("x"), client.inputs.check_params(GREEDY))
    prepared.request.seed = 2**64
    with pytest.raises(OverflowError):
        runner.run(client.add(prepared, external_id="x", arrival_s=0.0))
    assert holds_nothing(client)


# --- an engine at rest ------------------------------------------------------------------------------------------------


def test_engine_at_rest_uses_no_processor(client: EngineClient, runner: asyncio.Runner) -> None:
    runner.run(answer(client, "x", GREEDY))
    runner.run(until(lambda: is_at_rest(client)))
    wait_until(lambda: is_quiet(client._connection.engine.process.pid))
    assert client.is_alive
