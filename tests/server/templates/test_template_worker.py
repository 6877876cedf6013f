"""The template process answers in order, keeps its limits by itself, and never outlives its stream by long."""

import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

from quire.core.frames import frame, read_frame
from quire.server.limits.sandbox_worker import OUT_OF_MEMORY
from quire.server.templates.template_worker import (
    RENDER_LIMIT_S,
    LoadTemplate,
    Render,
    Rendered,
    RenderRefused,
    TemplateLoaded,
    TemplateReply,
    decode_reply,
)
from support.server import wait_until
from support.stopping import stopped

TEMPLATE = (
    "{% set word = messages[0].content %}{{ bos_token }}{{ word }}"
    "{% if word == 'loop' %}{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}{% endif %}"
    "{% if word == 'eat' %}{{ 'a' * 10 ** 10 }}{% endif %}"
    "{% if word == 'half' %}{{ '\\ud800' }}{% endif %}"
    "{% if word == 'refuse' %}{{ raise_exception('no \\ud800') }}{% endif %}"
)
END_LIMIT_S = 120.0


class Child:
    """A template process as the server has one, without an event loop."""

    def __init__(self) -> None:
        self.connection, theirs = socket.socketpair()
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "quire.server.templates.template_worker", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
            )
        self._stream = self.connection.makefile("rb")

    def send(self, command: LoadTemplate | Render) -> None:
        self.connection.sendall(frame(command))

    def receive(self) -> TemplateReply | None:
        body = read_frame(self._stream)
        return None if body is None else decode_reply(body)

    def close(self) -> None:
        self._stream.close()
        self.connection.close()


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child()
    try:
        child.send(LoadTemplate({"default": TEMPLATE}))
        assert child.receive() == TemplateLoaded()
        yield child
    finally:
        child.close()
        child.process.kill()
        child.process.wait()


def conversation(content: object, **variables: Any) -> Render:  # noqa: ANN401
    return Render([{"role": "user", "content": content}], True, False, {"bos_token": "<s>"} | variables)


def test_conversations_are_answered_in_order(child: Child) -> None:
    for word in ("a", "b", "c"):
        child.send(conversation(word))
    assert [child.receive() for _ in range(3)] == [Rendered("<s>a"), Rendered("<s>b"), Rendered("<s>c")]


def test_final_message_is_continued(child: Child) -> None:
    child.send(Render([{"role": "assistant", "content": "half"}], False, True, {"bos_token": "<s>"}))
    assert child.receive() == Rendered("<s>half")


def test_refusals_leave_the_process_alive(child: Child) -> None:
    for render, reason in (
        (conversation(5), "messages[0].content must be"),
        (conversation("refuse"), "no ?"),
        (conversation("half"), "half a surrogate pair"),
    ):
        child.send(render)
        reply = child.receive()
        assert isinstance(reply, RenderRefused)
        assert reason in reply.message
        assert (reply.param, reply.code) == ("messages", None)
    child.send(conversation("a"))
    assert child.receive() == Rendered("<s>a")


def test_signals_of_the_terminal_are_the_servers_business(child: Child) -> None:
    child.process.send_signal(signal.SIGINT)
    child.process.send_signal(signal.SIGTERM)
    child.send(conversation("a"))
    assert child.receive() == Rendered("<s>a")


# --- how it ends ------------------------------------------------------------------------------------------------------


def test_end_of_the_stream_ends_an_idle_process(child: Child) -> None:
    child.close()
    assert child.process.wait(END_LIMIT_S) == 0


def test_a_reply_that_nobody_reads_ends_the_process(child: Child) -> None:
    child.send(conversation("a" * 1_000_000))
    child.close()
    assert child.process.wait(END_LIMIT_S) == 0


def test_an_endless_loop_is_ended_by_the_kernel_also_when_nobody_is_left(child: Child) -> None:
    child.send(conversation("loop"))
    child.close()
    assert child.process.wait(END_LIMIT_S) == -signal.SIGPROF


def test_time_in_which_the_process_is_stopped_does_not_count(child: Child) -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    child.send(conversation("loop"))
    with stopped(child.process.pid):
        until_s = time.monotonic() + RENDER_LIMIT_S
        wait_until(lambda: time.monotonic() > until_s)
    assert child.process.wait(END_LIMIT_S) == -signal.SIGPROF
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert used_s > RENDER_LIMIT_S / 2      # the kernel counts in ticks


def test_the_time_limit_is_for_one_render(child: Child) -> None:
    child.send(conversation("a"))
    child.send(conversation("loop"))
    assert child.receive() == Rendered("<s>a")
    assert child.receive() is None
    assert child.process.wait(END_LIMIT_S) == -signal.SIGPROF


def test_the_end_of_memory_ends_the_process(child: Child) -> None:
    child.send(conversation("eat"))
    assert child.receive() is None
    assert child.process.wait(END_LIMIT_S) == OUT_OF_MEMORY


def test_it_loads_only_what_it_needs() -> None:
    script = (
        "import sys, quire.server.templates.template_worker\n"
        "print({'torch', 'numpy', 'tokenizers', 'asyncio', 'quire.text.tokenizer'} & sys.modules.keys())"
    )
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout == "set()\n"
