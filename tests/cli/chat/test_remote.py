"""Answers of an OpenAI server, whole, broken and refused, over real HTTP."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from quire.cli.chat.chat_back_ends import RemoteBackEnd, base_url
from quire.cli.chat.chat_history import ChatError, Update
from quire.core.errors import ContextLengthError, EngineError
from support.chat_server import DONE, ChatServer, Reply, answer, frame, refusal, running, said

HELLO = [{"role": "user", "content": "hi"}]


@pytest.fixture
def server() -> Iterator[ChatServer]:
    with running(ChatServer()) as server:
        yield server


@contextmanager
def saying(reply: bytes) -> Iterator[str]:
    """Yield the address of a server that says these bytes to whoever comes first, and hangs up."""

    def answer_once() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(reply)
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(65_536):  # all of the request: closed before, the connection would be reset
                pass

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answer_once)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(timeout=30)


def ask(server: ChatServer, *replies: Reply) -> list[Update]:
    server.replies += replies
    updates: list[Update] = []
    RemoteBackEnd(server.url, None).answer(HELLO, updates.append)
    return updates


def failure(server: ChatServer, *replies: Reply) -> str:
    with pytest.raises(EngineError) as caught:
        ask(server, *replies)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_request_asks_for_a_stream_with_usage(server: ChatServer) -> None:
    server.replies += [answer("hello")]
    back_end = RemoteBackEnd(server.url, None, None, {"temperature": 0.5, "seed": 3})
    back_end.answer(HELLO, lambda update: None)
    assert back_end.greeting == f"Chatting with first-model at {server.url}/v1."
    assert server.asked == [
        {
            "model": "first-model",
            "messages": HELLO,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0.5,
            "seed": 3,
        }
    ]


def test_text_comes_in_pieces_then_usage(server: ChatServer) -> None:
    updates = ask(server, answer("日本", " 😀", usage={"prompt_tokens": 4, "completion_tokens": 9}))
    assert [update.text for update in updates if update.text] == ["日本", " 😀"]
    assert updates[-2].finish_reason == "stop"
    assert updates[-1] == Update("", 4, 9, None)


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_apart(server: ChatServer, name: str) -> None:
    thought = frame(choices=[{"index": 0, "delta": {name: "Hm."}, "finish_reason": None}])
    updates = ask(server, Reply((thought, said("Yes", "stop"), DONE)))
    assert [(update.reasoning, update.text) for update in updates] == [("Hm.", ""), ("", "Yes")]


def test_frames_may_be_cut_inside_a_character(server: ChatServer) -> None:
    whole = said("日本😀") + said("", "stop") + DONE
    pieces = tuple(whole[at : at + 1] for at in range(len(whole)))
    assert "".join(update.text for update in ask(server, Reply(pieces))) == "日本😀"


def test_named_model_needs_no_list(server: ChatServer) -> None:
    server.models, server.replies = (), [answer("hello")]
    RemoteBackEnd(server.url + "/v1/", None, "mine").answer(HELLO, lambda update: None)
    assert server.asked[0]["model"] == "mine"


def test_server_without_models_needs_a_name(server: ChatServer) -> None:
    server.models = ()
    assert "give --model-name" in failure(server)


def test_key_is_sent_and_a_wrong_one_is_told(server: ChatServer) -> None:
    server.api_key = "secret"
    assert failure(server) == "the server answered 401: wrong key"
    assert "first-model" in RemoteBackEnd(server.url, "secret").greeting


def test_connection_that_is_refused_is_told_in_a_line() -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(ChatError, match=f"cannot connect to {url}/v1: ") as caught:
            RemoteBackEnd(url, None)
    assert "\n" not in str(caught.value)


def test_message_of_a_refusal_is_shown(server: ChatServer) -> None:
    assert failure(server, refusal(429, "1024 requests\n wait")) == "the server answered 429: 1024 requests wait"


@pytest.mark.parametrize(
    "body",
    [b"<html>", b"", b'{"error": 7}', b'{"detail": "x"}', b"\xff", b'{"a":' * 100_000],
    ids=["html", "nothing", "number", "other form", "no text", "deep"],
)
def test_refusal_of_any_other_form_shows_its_status(server: ChatServer, body: bytes) -> None:
    assert failure(server, Reply((body,), 502, "text/html")) == "the server answered 502 Bad Gateway"


def test_refusal_with_an_error_as_text_is_shown(server: ChatServer) -> None:
    reply = Reply((b'{"error": "no such model"}',), 404, "application/json")
    assert failure(server, reply) == "the server answered 404: no such model"


def test_conversation_that_does_not_fit_is_told_apart(server: ChatServer) -> None:
    with pytest.raises(ContextLengthError, match="300 tokens"):
        ask(server, refusal(400, "the prompt has 300 tokens", "context_length_exceeded"))


def test_error_frame_ends_the_answer_after_its_text(server: ChatServer) -> None:
    server.replies += [Reply((said("so far"), frame(error={"message": "engine died", "code": None}), DONE))]
    updates: list[Update] = []
    with pytest.raises(ChatError, match="the server ended the answer with an error: engine died"):
        RemoteBackEnd(server.url, None).answer(HELLO, updates.append)
    assert [update.text for update in updates] == ["so far"]


def test_stream_that_stops_in_the_middle_is_an_error(server: ChatServer) -> None:
    assert "closed the stream before the answer ended" in failure(server, Reply((said("so f"),)))


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\nff\r\n",
         "failed: IncompleteRead"),
        (b"no HTTP\r\n\r\n", "failed: no HTTP"),
        (b"HTTP/1.1 308 Permanent Redirect\r\nLocation: /x\r\nContent-Length: 0\r\n\r\n",
         "the server answered 308 Permanent Redirect"),
    ],
    ids=["cut", "no HTTP", "redirect"],
)
def test_what_breaks_off_or_is_no_answer_is_told_in_a_line(head: bytes, message: str) -> None:
    with saying(head) as url, pytest.raises(ChatError, match=message) as caught:
        RemoteBackEnd(url, None, "m").answer(HELLO, lambda update: None)
    assert "\n" not in str(caught.value)


def test_stream_may_end_without_done(server: ChatServer) -> None:
    assert ask(server, Reply((said("all", "stop"),))) == [Update("all", None, None, "stop")]


def test_answer_that_is_no_stream_is_an_error(server: ChatServer) -> None:
    assert "application/json instead of a stream" in failure(server, Reply((b"{}",), 200, "application/json"))


@pytest.mark.parametrize("event", [b"data: {\n\n", b'data: {"choices": 7}\n\n', b"data: []\n\n"], ids=repr)
def test_frame_that_is_none_is_an_error(server: ChatServer, event: bytes) -> None:
    assert "the server sent what is no OpenAI answer" in failure(server, Reply((event,)))


@pytest.mark.parametrize("url", ["host:80", "ftp://a", "http://", "http://a:b", "http://u:p@a", "http://a/?q", ""])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ChatError, match="--url must look like http://HOST:PORT"):
        base_url(url)


@pytest.mark.parametrize("url", ["http://a:1", "http://a:1/", "http://a:1/v1", "http://a:1/v1/"])
def test_address_may_name_the_version(url: str) -> None:
    assert base_url(url) == "http://a:1/v1"


@pytest.mark.parametrize("key", ["a\r\nX: y", "ключ"])
def test_key_that_fits_no_header_is_refused(key: str) -> None:
    with pytest.raises(ChatError, match="--api-key must be printable ASCII"):
        RemoteBackEnd("http://127.0.0.1:1", key)
