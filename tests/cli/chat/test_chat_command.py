"""`quire chat` as a whole: through pipes, and in a terminal."""

import codecs
import json
import os
import re
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from support.chat_server import ChatServer, Reply, answer, refusal, running, said

SMALL = ("--num-kv-blocks", "64", "--max-num-seqs", "8", "--max-model-len", "256")
QUESTION = "Write a function parse_header."
TIMEOUT_S = 120

Run = Callable[..., Any]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with running(ChatServer()) as server:
        yield server


# --- pipes ------------------------------------------------------------------------------------------------------------


def test_pipe_gives_answers_and_nothing_else(run: Run, demo_model: Path) -> None:
    with LLM(demo_model, num_kv_blocks=64, max_num_seqs=8, max_model_len=256) as llm:
        params = SamplingParams(temperature=0, max_tokens=12)
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
        first = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
        messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "Again."}]
        second = llm.chat(messages, params, use_tqdm=False)[0].outputs[0].text
    flags = ("--system", "Be brief.", "--temperature", 0, "--max-tokens", 12, *SMALL)
    ran = run("chat", *flags, stdin=f"{QUESTION}\n\nAgain.\n")
    assert (ran.code, ran.out, ran.err) == (0, f"{first}\n{second}\n", "")


def test_commands_work_in_a_pipe(run: Run, server: ChatServer, tmp_path: Path) -> None:
    server.replies += [answer("one"), answer("two", usage={"prompt_tokens": 5, "completion_tokens": 1})]
    path = tmp_path / "chat.jsonl"
    ran = run("chat", "--url", server.url, stdin=f"a\n/reset\nb\\\nc\n/stats\n/save {path}\n/exit\nnever\n")
    assert (ran.code, ran.out) == (0, "one\ntwo\n")
    assert ran.err.startswith("1 tokens in ")
    assert [json.loads(line)["content"] for line in path.read_text().splitlines()] == ["b\nc", "two"]


def test_server_gets_what_was_set_and_decides_the_rest(run: Run, server: ChatServer, tmp_path: Path) -> None:
    server.replies += [answer("x")]
    config = tmp_path / "chat.yaml"
    config.write_text("top_k: 5\nstop: [END]\n")
    flags = ("--config", config, "--temperature", "1.0", "--sampling-seed", 7, "--model-name", "mine")
    assert run("chat", "--url", server.url, *flags, stdin="hi\n").code == 0
    rest = {name: value for name, value in server.asked[0].items() if name not in {"messages", "stream_options"}}
    assert rest == {
        "model": "mine", "stream": True, "temperature": 1.0, "top_k": 5, "seed": 7, "stop": ["END"],
    }  # fmt: skip


def test_images_go_with_the_first_question(run: Run, server: ChatServer, tmp_path: Path) -> None:
    server.replies += [answer("x")]
    (tmp_path / "a.png").write_bytes(b"hi")
    assert run("chat", "--url", server.url, "--image", tmp_path / "a.png", stdin="what?\n").code == 0
    (message,) = server.asked[0]["messages"]
    picture = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    assert message == {"role": "user", "content": [picture, {"type": "text", "text": "what?"}]}


def test_key_comes_from_the_environment(run: Run, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.api_key, server.replies = "secret", [answer("x")]
    assert run("chat", "--url", server.url, stdin="hi\n").code == 1
    monkeypatch.setenv("QUIRE_API_KEY", "secret")
    assert run("chat", "--url", server.url, stdin="hi\n").code == 0


def test_answer_cannot_drive_the_terminal(run: Run, server: ChatServer) -> None:
    server.replies += [answer("a\x1b", "[31mb\r\n\tc\x07\x9b2Jd\x00\x7f日本")]
    assert run("chat", "--url", server.url, stdin="hi\n").out == "a[31mb\n\tc2Jd日本\n"


def test_pipe_ends_with_the_first_error(run: Run, server: ChatServer) -> None:
    server.replies += [answer("fine"), refusal(429, "the queue is full")]
    ran = run("chat", "--url", server.url, stdin="a\nb\nc\n")
    assert ran == (1, "fine\n", "quire: the server answered 429: the queue is full\n")
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--url", "nowhere"), 1, "--url must look like http://HOST:PORT"),
        (("--temperature", "nan"), 1, "temperature must be"),
        (("--max-tokens", "0"), 1, "max_tokens must be"),
        (("no/such/folder",), 1, "no/such/folder"),
        (("--model-name", "x"), 2, "--model-name needs --url"),
        (("--api-key", "x"), 2, "--api-key needs --url"),
        (("some/model", "--url", "http://a"), 2, "MODEL is for a local model"),
        (("--block-size", "16", "--url", "http://a"), 2, "--block-size is for a local model"),
        (("--n", "2"), 2, "No such option"),
        (("--image", "a.svg"), 2, "--image must be a file of PNG, JPEG, WebP or GIF, got a.svg"),
        (("--image", "no/such/a.png"), 2, "--image no/such/a.png: No such file or directory"),
    ],
)
def test_what_cannot_work_ends_with_a_code_and_a_reason(
    run: Run, arguments: tuple[str, ...], code: int, message: str
) -> None:
    ran = run("chat", *arguments, stdin="hi\n")
    assert (ran.code, ran.out) == (code, "")
    assert message in ran.err
    assert "Traceback" not in ran.err


def test_stream_of_a_piped_server_loads_no_torch(server: ChatServer) -> None:
    server.replies += [answer("hello")]
    code = "import sys\nfrom quire.cli.main import main\ntry: main()\nfinally: print('torch' in sys.modules)"
    command = [sys.executable, "-c", code, "chat", "--url", server.url]
    ran = subprocess.run(command, input="hi\n", capture_output=True, text=True, timeout=TIMEOUT_S, check=True)
    assert (ran.stdout, ran.stderr) == ("hello\nFalse\n", "")


# --- a terminal -------------------------------------------------------------------------------------------------------

IN_A_TERMINAL = """
import fcntl, os, signal, sys, termios
terminal = os.open(sys.argv.pop(1), os.O_RDWR)
fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
for stream in range(3):
    os.dup2(terminal, stream)
signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored where the tests run in the background
os.execv(sys.executable, [sys.executable, "-c", "from quire.cli.main import main; main()", *sys.argv[1:]])
"""


class Typist:
    """Sits at a terminal in which `quire` runs: types, and waits for what it shows."""

    def __init__(self, *arguments: str) -> None:
        self._screen, self._terminal = os.openpty()
        command = [sys.executable, "-c", IN_A_TERMINAL, os.ttyname(self._terminal), *arguments]
        self._process = subprocess.Popen(command, start_new_session=True, env=os.environ | {"TERM": "xterm"})
        self._unread, self._decoder = "", codecs.getincrementaldecoder("utf-8")()

    def type(self, keys: str) -> None:
        os.write(self._screen, keys.encode())

    def wait_for(self, text: str) -> str:
        """Read until `text` is there; return what came up to its end, without escape sequences."""
        end_s = time.monotonic() + TIMEOUT_S
        while text not in self._unread:
            # What a process has shown can be read after its end.
            is_over = self._process.poll() is not None or time.monotonic() > end_s
            if select.select([self._screen], [], [], 0 if is_over else 1)[0]:
                more = self._decoder.decode(os.read(self._screen, 65_536))
                self._unread = _without_escapes(self._unread + more)
            else:
                assert not is_over, f"no {text!r} in {self._unread!r}"
        before, _, self._unread = self._unread.partition(text)
        return before + text

    def interrupt(self) -> None:
        """Press Ctrl-C once the command waits: Python overlooks a signal that comes just before it begins to wait."""
        state = Path(f"/proc/{self._process.pid}/stat")
        end_s = time.monotonic() + TIMEOUT_S
        while state.exists() and state.read_text().rpartition(") ")[2][0] != "S":
            assert time.monotonic() < end_s
            time.sleep(0.001)
        self.type("\x03")

    def exit_code(self) -> int:
        return self._process.wait(timeout=TIMEOUT_S)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._terminal)
        os.close(self._screen)


def _without_escapes(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


@pytest.fixture
def typist(server: ChatServer) -> Iterator[Typist]:
    typist = Typist("chat", "--url", server.url)
    yield typist
    typist.close()


def test_terminal_streams_stops_and_goes_on(server: ChatServer, typist: Typist) -> None:
    server.replies += [answer("hel", "lo"), Reply((said("so far"),), holds=True), answer("better")]
    typist.wait_for(f"Chatting with first-model at {server.url}/v1.")
    typist.wait_for("> ")
    typist.type("hi\r")
    typist.wait_for("hello\r\n")
    typist.wait_for("> ")
    typist.type("go on\r")
    typist.wait_for("so far")
    typist.interrupt()
    typist.wait_for("(stopped)")
    assert server.hung_up.wait(TIMEOUT_S)
    typist.wait_for("> ")
    typist.type("and?\r")
    typist.wait_for("better\r\n")
    assert [message["content"] for message in server.asked[-1]["messages"]] == [
        "hi", "hello", "go on", "so far", "and?",
    ]  # fmt: skip
    typist.wait_for("> ")
    typist.type("\x04")
    assert typist.exit_code() == 0


def test_interrupt_at_the_prompt_clears_the_line_and_two_leave(server: ChatServer, typist: Typist) -> None:
    server.replies += [answer("hello")]
    typist.wait_for("> ")
    typist.type("wrong")
    typist.wait_for("wrong")
    typist.interrupt()
    typist.wait_for("Ctrl-C again, or Ctrl-D, leaves.")
    typist.wait_for("> ")
    typist.type("right\r")
    typist.wait_for("hello")
    assert server.asked[0]["messages"][0]["content"] == "right"
    typist.wait_for("> ")
    typist.interrupt()
    typist.wait_for("> ")
    typist.interrupt()
    assert typist.exit_code() == 0


def test_lines_are_called_back_and_pasted_whole(server: ChatServer, typist: Typist) -> None:
    pytest.importorskip("readline")
    server.replies += [answer("one"), answer("two"), answer("three")]
    for keys, reply in (("first\r", "one"), ("\x1b[A again\r", "two"), ("\x1b[200~a\nb\x1b[201~\r", "three")):
        typist.wait_for("> ")
        typist.type(keys)
        typist.wait_for(reply)
    assert [asked["messages"][-1]["content"] for asked in server.asked] == ["first", "first again", "a\nb"]


def test_error_in_a_terminal_is_shown_and_the_chat_goes_on(server: ChatServer, typist: Typist) -> None:
    server.replies += [refusal(429, "the [red]queue[/red] is full"), answer("hello")]
    typist.wait_for("> ")
    typist.type("hi\r")
    typist.wait_for("the server answered 429: the [red]queue[/red] is full")
    typist.wait_for("> ")
    typist.type("/retry\r")
    typist.wait_for("hello")
    assert server.asked[0] == server.asked[1]
