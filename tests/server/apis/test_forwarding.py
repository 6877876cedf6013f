"""/invocations answers as the route does that its body is for."""

import pytest

from support.http_app import ask, make_app
from support.openai_server import OpenAIServer

CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3, "temperature": 0}
COMPLETION = {"prompt": "def f(", "max_tokens": 3, "temperature": 0}


def streamed_text(server: OpenAIServer, path: str, body: dict[str, object]) -> str:
    choices = [event["choices"][0] for event in server.stream(path, **body)]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)


@pytest.mark.parametrize(("path", "body"), [("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)])
def test_body_goes_to_its_route(server: OpenAIServer, path: str, body: dict[str, object]) -> None:
    answers = [server.ask(each, **body) for each in (path, "/invocations")]
    assert answers[0]["choices"] == answers[1]["choices"]
    assert answers[0]["usage"]["completion_tokens"] == answers[1]["usage"]["completion_tokens"]
    assert streamed_text(server, "/invocations", body) == streamed_text(server, path, body) != ""


def test_errors_are_those_of_the_route(server: OpenAIServer) -> None:
    status, error = server.refusal("/invocations", **COMPLETION | {"max_tokens": -1})
    assert (status, error["param"]) == (400, "max_tokens")


def test_body_without_a_route_is_refused(server: OpenAIServer) -> None:
    status, error = server.refusal("/invocations", text="x")
    assert (status, error["code"]) == (400, None)
    assert error["message"].startswith("the body must have one of the fields messages, prompt")
    for body in ("[]", "{", '"prompt"'):
        answer = server.http.post("/invocations", content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400


def test_body_is_bounded_before_it_is_read() -> None:
    app = make_app(max_body_bytes=100)
    assert ask(app, "POST", "/invocations", json={"prompt": "x" * 200}).status_code == 413
