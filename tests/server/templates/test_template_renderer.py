"""Templates are rendered outside the server; one that is hostile costs its own request and nothing else."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
import termios
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import uvloop

from quire.core.errors import InvalidRequestError
from quire.engine.launcher import start_module
from quire.server.errors import ApiError, as_api_error
from quire.server.limits import sandbox
from quire.server.options import DEFAULT_LIMITS
from quire.server.templates import template_renderer
from quire.server.templates.template_renderer import TemplateRenderer
from quire.server.templates.template_worker import RENDER_LIMIT_S
from quire.text.tokenizer import Tokenizer
from support.small_tokenizers import CHAT_TEMPLATE, byte_level, save
from support.stopping import stopped

HELLO = [{"role": "user", "content": "hi"}]
LOOP = [{"role": "user", "content": "loop"}]
ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LOOPS_IF_ASKED = "{% if messages[0].content == 'loop' %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"
WAIT_LIMIT_S = 120.0

MakeTokenizer = Callable[[str], Tokenizer]


@pytest.fixture(scope="module")
def with_template(tmp_path_factory: pytest.TempPathFactory) -> MakeTokenizer:
    """Return a function that makes a tokenizer with the given chat template."""
    backend = byte_level()

    def make(template: str) -> Tokenizer:
        return Tokenizer.from_folder(save(backend, tmp_path_factory.mktemp("model"), chat_template=template))

    return make


@asynccontextmanager
async def opened(tokenizer: Tokenizer | None, max_waiting: int = 1024) -> AsyncIterator[TemplateRenderer]:
    renderer = TemplateRenderer(tokenizer, max_waiting=max_waiting)
    try:
        yield renderer
    finally:
        await renderer.close()


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_LIMIT_S):
        while not condition():
            await asyncio.sleep(0)


async def refusal(rendered: Awaitable[str]) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        await rendered
    assert (caught.value.param, caught.value.code) == ("messages", None)
    return str(caught.value)


def process_of(renderer: TemplateRenderer) -> subprocess.Popen[bytes]:
    assert renderer._short.process is not None
    return renderer._short.process._process


def num_unread(renderer: TemplateRenderer) -> int:
    """Return the bytes, with the kernel's own beside them, that the process has not read; 0: it has ended."""
    if (process := renderer._short.process) is None:
        return 0
    return int.from_bytes(fcntl.ioctl(process._socket, termios.TIOCOUTQ, bytes(4)), sys.byteorder)


@pytest.fixture(autouse=True)
def _replies_may_be_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the CPU time of a limit may take minutes."""
    monkeypatch.setattr(sandbox, "REPLY_SLACK", WAIT_LIMIT_S)


@pytest.fixture
def unlimited(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let a render take as long as it takes, in both processes: it is amid its work however late a test looks."""
    (tmp_path / "sitecustomize.py").write_text("import signal; signal.setitimer = lambda *_: None")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


async def looping(renderer: TemplateRenderer) -> "asyncio.Task[str]":
    """Return a render that its process has read, and that never ends by itself."""
    assert await renderer.render(HELLO) == "hi"  # the process is there
    with stopped(process_of(renderer).pid):
        task = asyncio.create_task(renderer.render(LOOP))
        await until(lambda: num_unread(renderer) > 0)
    await until(lambda: num_unread(renderer) == 0)
    return task


# --- the probe --------------------------------------------------------------------------------------------------------

ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}"
)


def test_template_is_probed_once_whatever_becomes_of_its_processes(
    with_template: MakeTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    late = [*HELLO, {"role": "system", "content": "late"}]

    async def check() -> None:
        async with opened(with_template(ONE_SYSTEM)) as renderer:
            assert not renderer.tells_format
            renderer.warm_up()
            for _ in range(2):
                assert await renderer.render(late) == "<system>late<user>hi"
                assert renderer.tells_format
                os.kill(process_of(renderer).pid, signal.SIGKILL)
                process_of(renderer).wait()
            long = [{"role": "user", "content": "x" * template_renderer.SHORT_BYTES}, late[1]]
            assert (await renderer.render(long)).startswith("<system>late<user>xxx")

    with caplog.at_level("INFO", template_renderer.__name__.rpartition(".")[0]), caplog.at_level("INFO", "quire.text"):
        uvloop.run(check())
    assert len([message for message in caplog.messages if message.startswith("chat template: ")]) == 1


def test_template_that_cannot_be_probed_gets_messages_as_they_are(
    with_template: MakeTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    endless = "{% if 'quire' in messages[0].content %}" + ENDLESS + "{% endif %}{{ messages[0].content }}"

    async def check() -> None:
        async with opened(with_template(endless)) as renderer:
            assert await renderer.render(HELLO) == "hi"

    uvloop.run(check())
    told = "the chat template cannot be probed within 2 seconds of CPU time; it gets messages as they are"
    assert told in caplog.messages


def test_calls_are_written_in_the_format_of_the_model(with_template: MakeTokenizer) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": [call]}]

    async def check() -> None:
        async with opened(with_template("{{ messages[-1].content }}")) as renderer:
            lfm2 = await renderer.render(messages, call_format="lfm2")
            assert lfm2 == '<|tool_call_start|>[f(city="Ulm")]<|tool_call_end|>'
            assert (await renderer.render(messages)).startswith('<tool_call>\n{"name": "f"')

    uvloop.run(check())


# --- what it renders --------------------------------------------------------------------------------------------------


def test_texts_are_those_of_the_tokenizer(with_template: MakeTokenizer) -> None:
    tokenizer = with_template(CHAT_TEMPLATE)
    answer = [*HELLO, {"role": "assistant", "content": [{"type": "text", "text": "Well, "}]}]

    async def check() -> None:
        async with opened(tokenizer) as renderer:
            assert await renderer.render(HELLO) == tokenizer.apply_chat_template(HELLO) == "<s>user: hi\nassistant:"
            assert await renderer.render(HELLO, add_generation_prompt=False) == "<s>user: hi\n"
            assert await renderer.render(HELLO, variables={"bos_token": "^"}) == "^user: hi\nassistant:"
            continued = await renderer.render(answer, add_generation_prompt=False, continue_final_message=True)
            assert continued == "<s>user: hi\nassistant: Well, "

    uvloop.run(check())


def test_errors_are_those_of_the_tokenizer(with_template: MakeTokenizer) -> None:
    tokenizer = with_template("{{ messages[0].content }}{{ raise_exception('roles must alternate') }}")

    async def check() -> None:
        async with opened(tokenizer) as renderer:
            for messages in (HELLO, [], "hi", [{"role": "user", "content": 5}]):
                with pytest.raises(InvalidRequestError) as expected:
                    tokenizer.apply_chat_template(messages)  # type: ignore[arg-type]
                assert await refusal(renderer.render(messages)) == str(expected.value)  # type: ignore[arg-type]
            with pytest.raises(InvalidRequestError) as both:
                await renderer.render(HELLO, continue_final_message=True)
            assert both.value.param == "continue_final_message"

    uvloop.run(check())


def test_without_a_template_nothing_is_started(tmp_path: Path) -> None:
    async def check() -> None:
        for tokenizer, reason in (
            (None, "no tokenizer"),
            (Tokenizer.from_folder(save(byte_level(), tmp_path)), "no chat template"),
        ):
            async with opened(tokenizer) as renderer:
                renderer.warm_up()
                assert reason in await refusal(renderer.render(HELLO))
                assert renderer._short.process is None

    uvloop.run(check())


@pytest.mark.parametrize("value", [2**70, "\ud800", object()], ids=["huge integer", "half a character", "object"])
def test_messages_that_cannot_be_sent_are_refused(with_template: MakeTokenizer, value: object) -> None:
    messages = [{"role": "user", "content": value}]

    async def check() -> None:
        async with opened(with_template("{{ messages }}")) as renderer:
            assert "cannot render the messages: " in await refusal(renderer.render(messages))

    uvloop.run(check())


def test_a_template_that_cannot_be_sent_is_refused(with_template: MakeTokenizer) -> None:
    async def check() -> None:
        async with opened(with_template("\ud800")) as renderer:
            assert "surrogates" in await refusal(renderer.render(HELLO))

    uvloop.run(check())


# --- what hostile templates get ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'a' * 10 ** 10 }}",
        "{{ [0] * 10 ** 9 }}",
        "{{ '%99999999999s' % 1 }}",
        "{{ '{:>99999999999}'.format(1) }}",
        "{{ 'a' | center(10 ** 10) }}",
        "{{ 'a\nb' | indent(10 ** 10) }}",
        "{{ messages | tojson(indent=10 ** 10) }}",
        "{{ messages | batch(10 ** 10, 'a') | list }}",
    ],
)
def test_memory_is_bounded(with_template: MakeTokenizer, source: str) -> None:
    async def check() -> None:
        async with opened(with_template(source)) as renderer:
            assert "within 1024 MiB of memory" in await refusal(renderer.render(HELLO))

    uvloop.run(check())


def test_growth_is_bounded(with_template: MakeTokenizer) -> None:
    source = "{% set n = namespace(a='aa') %}{% for i in range(99) %}{% set n.a = n.a ~ n.a %}{% endfor %}"

    async def check() -> None:
        async with opened(with_template(source)) as renderer:
            assert "cannot render the messages within" in await refusal(renderer.render(HELLO))  # memory, or time

    uvloop.run(check())


@pytest.mark.parametrize(
    "source",
    [
        "{{ 9 ** (9 ** 9) }}",  # one operation, of hours, when the template is compiled; below there are loops
        pytest.param(
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            marks=pytest.mark.matrix,
        ),
    ],
    ids=["a power", "a macro"],
)
def test_time_is_bounded(with_template: MakeTokenizer, source: str) -> None:
    async def check() -> None:
        async with opened(with_template(source)) as renderer:
            assert "within 2 seconds" in await refusal(renderer.render(HELLO))

    uvloop.run(check())


@pytest.mark.parametrize(
    "source",
    ["{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "{{ " + "-" * 99999 + "1 }}", "{{ (10 ** 5000) | string }}"],
    ids=["nested", "negated", "a long number"],
)
def test_what_the_interpreter_refuses_is_refused(with_template: MakeTokenizer, source: str) -> None:
    async def check() -> None:
        async with opened(with_template(source)) as renderer:
            assert "cannot render the messages: " in await refusal(renderer.render(HELLO))

    uvloop.run(check())


def test_an_error_is_told_in_short(with_template: MakeTokenizer) -> None:
    async def check() -> None:
        async with opened(with_template("{{ raise_exception('a' * 10 ** 6) }}")) as renderer:
            assert len(await refusal(renderer.render(HELLO))) < 2000

    uvloop.run(check())


# --- the life of the process ------------------------------------------------------------------------------------------


def test_one_process_serves_all_and_a_killed_one_is_replaced(with_template: MakeTokenizer) -> None:
    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED)) as renderer:
            renderer.warm_up()
            first = process_of(renderer)
            assert await asyncio.gather(*(renderer.render(HELLO) for _ in range(50))) == ["hi"] * 50
            assert process_of(renderer) is first
            first.kill()
            await until(lambda: first.poll() is not None)
            assert await renderer.render(HELLO) == "hi"

    uvloop.run(check())


def test_a_process_that_has_just_ended_costs_no_conversation(
    with_template: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parent learns of an end a moment after the socket is closed: until then the process seems alive."""

    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED)) as renderer:
            assert await renderer.render(HELLO) == "hi"
            process_of(renderer).kill()
            process_of(renderer).wait()
            monkeypatch.setattr(sandbox.SandboxProcess, "is_alive", True)
            assert await renderer.render(HELLO) == "hi"

    uvloop.run(check())


def test_a_process_that_ends_before_it_reads_costs_no_conversation(with_template: MakeTokenizer) -> None:
    """A stream that closes with bytes that were not read is reset, and not just at its end."""

    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED)) as renderer:
            assert await renderer.render(HELLO) == "hi"
            process = process_of(renderer)
            with stopped(process.pid):
                rendered = asyncio.create_task(renderer.render(HELLO))
                await until(lambda: num_unread(renderer) > 0)
                process.kill()
            assert await rendered == "hi"

    uvloop.run(check())


def test_waiting_requests_outlive_a_hostile_one(with_template: MakeTokenizer) -> None:
    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED)) as renderer:
            hostile = await looping(renderer)
            waiting = [asyncio.create_task(renderer.render(HELLO)) for _ in range(5)]
            assert "within 2 seconds" in await refusal(hostile)
            assert await asyncio.gather(*waiting) == ["hi"] * 5

    uvloop.run(check())


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGKILL])
def test_a_crash_fails_the_conversation_at_hand_and_no_other(with_template: MakeTokenizer, number: int) -> None:
    """It is unknown whether the conversation is to blame, so the answer is a failure (500), no refusal (400)."""

    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED)) as renderer:
            hostile = await looping(renderer)
            waiting = asyncio.create_task(renderer.render(HELLO))
            process_of(renderer).send_signal(number)
            with pytest.raises(RuntimeError, match=rf"killed by signal {int(number)}\)") as caught:
                await hostile
            assert as_api_error(caught.value).status == 500
            assert await waiting == "hi"

    uvloop.run(check())


def test_a_process_that_does_not_answer_is_killed(
    with_template: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED)) as renderer:
            assert await renderer.render(HELLO) == "hi"
            monkeypatch.setattr(sandbox, "REPLY_SLACK", 0.01 / RENDER_LIMIT_S)
            with pytest.raises(RuntimeError, match="killed by signal 9"):
                await renderer.render(LOOP)

    uvloop.run(check())


@pytest.mark.usefixtures("unlimited")
def test_a_caller_that_goes_away_ends_its_render(with_template: MakeTokenizer) -> None:
    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED)) as renderer:
            hostile = await looping(renderer)
            process = process_of(renderer)
            hostile.cancel()
            with pytest.raises(asyncio.CancelledError):
                await hostile
            assert process.returncode == -signal.SIGKILL
            assert await renderer.render(HELLO) == "hi"

    uvloop.run(check())


def test_callers_that_go_away_before_their_turn_leave_no_trace(with_template: MakeTokenizer) -> None:
    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED), max_waiting=1) as renderer:
            for _ in range(3):  # the first while the process starts
                task = asyncio.create_task(renderer.render([{"role": "user", "content": "a" * 4_000_000}]))
                await until(lambda: renderer._long.semaphore.is_full)
                task.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await task
            assert await renderer.render(HELLO) == "hi"

    uvloop.run(check())


def test_more_than_may_wait_are_turned_away(with_template: MakeTokenizer) -> None:
    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED), max_waiting=3) as renderer:
            waiting = [asyncio.create_task(renderer.render(HELLO)) for _ in range(3)]
            await until(lambda: renderer._short.semaphore.is_full)
            with pytest.raises(ApiError, match="3 requests wait already") as caught:
                await renderer.render(HELLO)
            assert (caught.value.status, caught.value.code) == (429, "server_overloaded")
            assert await asyncio.gather(*waiting) == ["hi"] * 3
            assert await renderer.render(HELLO) == "hi"

    uvloop.run(check())


@pytest.mark.usefixtures("unlimited")
@pytest.mark.parametrize("is_connected", [True, False], ids=["while rendering", "while starting"])
def test_closing_ends_the_process_and_tells_all_who_wait(with_template: MakeTokenizer, is_connected: bool) -> None:
    async def check() -> None:
        renderer = TemplateRenderer(with_template(LOOPS_IF_ASKED))
        first = await looping(renderer) if is_connected else asyncio.create_task(renderer.render(HELLO))
        waiting = asyncio.create_task(renderer.render(HELLO))
        await until(lambda: renderer._short.semaphore.is_full)
        process = process_of(renderer)
        await renderer.close()
        await renderer.close()
        assert process.returncode == -signal.SIGKILL
        for task in (first, waiting, asyncio.create_task(renderer.render(HELLO))):
            with pytest.raises(ApiError) as caught:
                await task
            assert (caught.value.status, caught.value.code) == (503, "shutting_down")
        renderer.warm_up()
        assert renderer._short.process is None

    uvloop.run(check())


def test_a_process_that_cannot_start_is_not_the_requests_fault(
    with_template: MakeTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = with_template(CHAT_TEMPLATE)
    monkeypatch.setattr(sandbox, "start_module", partial(start_module, interpreter="/bin/false"))

    async def check() -> None:
        async with opened(tokenizer) as renderer:
            with pytest.raises(RuntimeError, match="did not start"):
                await renderer.render(HELLO)

    uvloop.run(check())


# --- lanes ------------------------------------------------------------------------------------------------------------


def test_short_conversations_never_wait_for_long_ones(with_template: MakeTokenizer) -> None:
    padded = [{"role": "user", "content": "loop", "padding": "x" * template_renderer.SHORT_BYTES}]

    async def check() -> None:
        async with opened(with_template(LOOPS_IF_ASKED)) as renderer:
            hostile = [asyncio.create_task(renderer.render(padded)) for _ in range(5)]
            await until(lambda: renderer._long.semaphore.is_full)
            assert await renderer.render(HELLO, client_id="honest") == "hi"
            assert not all(task.done() for task in hostile), "each of them takes 2 seconds, one after the other"
            for task in hostile:
                task.cancel()
            await asyncio.gather(*hostile, return_exceptions=True)

    uvloop.run(check())


def test_clients_take_turns(with_template: MakeTokenizer) -> None:
    async def check() -> None:
        async with opened(with_template(CHAT_TEMPLATE)) as renderer:
            order: list[str] = []

            async def render(client_id: str) -> None:
                await renderer.render(HELLO, client_id=client_id)
                order.append(client_id)

            await asyncio.gather(*map(render, ["many"] * 20 + ["few"] * 2))
            assert order.index("few") <= 2
            assert order.index("few", order.index("few") + 1) <= 4

    uvloop.run(check())


@pytest.mark.parametrize(
    ("flag", "param"), [("max_conversation_bytes", "messages"), ("max_template_variable_bytes", "chat_template_kwargs")]
)
def test_bytes_of_a_conversation_and_of_its_variables_are_bounded(
    with_template: MakeTokenizer, flag: str, param: str
) -> None:
    async def check() -> None:
        async with opened(with_template(CHAT_TEMPLATE)) as renderer:

            async def render(limit: int) -> str:
                limits = replace(DEFAULT_LIMITS, **{flag: limit})
                return await renderer.render(HELLO, variables={"x": ["y"] * 100}, limits=limits)

            with pytest.raises(InvalidRequestError, match=rf"at most 10 bytes \({flag}\), got \d+") as caught:
                await render(10)
            assert caught.value.param == param
            num_bytes = int(str(caught.value).rpartition(" ")[2])
            await render(num_bytes)
            with pytest.raises(InvalidRequestError):
                await render(num_bytes - 1)

    uvloop.run(check())


SERVER = """
import asyncio, sys
from pathlib import Path
from quire.server.templates.template_renderer import TemplateRenderer
from quire.server.templates.template_worker import RENDER_LIMIT_S
from quire.text.tokenizer import Tokenizer

async def main():
    renderer = TemplateRenderer(Tokenizer.from_folder(Path(sys.argv[1])))
    await renderer.render([{"role": "user", "content": "hi"}])
    asyncio.create_task(renderer.render([{"role": "user", "content": "loop"}]))
    while not renderer._short.semaphore.is_full:
        await asyncio.sleep(0)
    print("looping", flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_killed_server_leaves_no_process_behind(tmp_path: Path) -> None:
    folder = save(byte_level(), tmp_path, chat_template=LOOPS_IF_ASKED)
    reader, writer = os.pipe()  # the template process inherits the error stream: it ends when both have ended
    with os.fdopen(reader, "rb") as errors, subprocess.Popen(
        [sys.executable, "-c", SERVER, str(folder)], stdout=subprocess.PIPE, stderr=writer
    ) as server:
        os.close(writer)
        assert server.stdout is not None
        assert server.stdout.readline() == b"looping\n"
        server.kill()
        assert errors.read() == b""
