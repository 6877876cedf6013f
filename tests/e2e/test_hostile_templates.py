"""A hostile chat template costs the requests that meet it, within its limits; the server goes on for all others."""

import asyncio
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.server.templates.template_worker import RENDER_LIMIT_S
from support.clients import LIMIT_S, MODEL
from support.metrics_page import wait_until_idle
from support.reciting_model import TEXT, Reciter
from support.server import ServerProcess, running_server

HOSTILE = {  # the content of the last message, and what it makes the template do
    "loop": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "tree": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "memory": "{{ 'a' * 10 ** 10 }}",
    "range": "{{ range(10 ** 9) | list }}",
    "output": "{% for i in range(99999) %}{{ 'a' * 1000 }}{% endfor %}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "globals": "{{ raise_exception.__globals__.os }}",
    "format": "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    "file": "{% include '/etc/passwd' %}",
    "error": "{{ raise_exception('no' * 10 ** 6) }}",
}


@pytest.fixture(scope="module")
def hostile_server(reciter: Reciter, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Serve a model whose template is well-behaved until it is asked."""
    folder = Path(shutil.copytree(reciter.folder, tmp_path_factory.mktemp("hostile") / "model"))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    asked = "".join(
        "{% if messages[-1].content == '" + word + "' %}" + source + "{% endif %}" for word, source in HOSTILE.items()
    )
    (folder / "chat_template.jinja").write_text(asked + config["chat_template"])
    with running_server(str(folder), "--served-model-name", MODEL) as running:
        yield running


async def ask_all(url: str, reciter: Reciter) -> tuple[list[httpx.Response], list[httpx.Response]]:
    """Return the answers to all that is hostile, and to well-behaved requests at the same time."""
    completion = {"prompt": reciter.prompt(), "max_tokens": len(reciter.script), "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=LIMIT_S) as http:
        chats = [{"messages": [{"role": "user", "content": word}]} for word in HOSTILE]
        hostile = [http.post("/v1/chat/completions", json=chat) for chat in chats]
        peaceful = [http.post("/v1/completions", json=completion) for _ in range(5)]
        async with asyncio.timeout(LIMIT_S + RENDER_LIMIT_S * len(HOSTILE)):
            answers = await asyncio.gather(*hostile, *peaceful)
    return answers[: len(HOSTILE)], answers[len(HOSTILE) :]


def test_hostile_templates_end_and_the_server_goes_on(hostile_server: ServerProcess, reciter: Reciter) -> None:
    engine = hostile_server.engine_pid()
    refused, answered = asyncio.run(ask_all(hostile_server.url, reciter))
    for word, response in zip(HOSTILE, refused, strict=True):
        assert response.status_code == 400, word
        error: dict[str, Any] = response.json()["error"]
        assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", "messages", None), word
        assert "chat template" in error["message"], word
        assert len(error["message"]) < 2000, word
    assert [response.json()["choices"][0]["text"] for response in answered] == [TEXT] * 5
    chat = {"messages": reciter.messages, "max_tokens": len(reciter.script), "temperature": 0}
    after = httpx.post(f"{hostile_server.url}/v1/chat/completions", json=chat, timeout=LIMIT_S).json()
    assert after["choices"][0]["message"]["content"] == TEXT
    assert hostile_server.engine_pid() == engine
    assert "Traceback" not in hostile_server.log
    wait_until_idle(hostile_server.url)
