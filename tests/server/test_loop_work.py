"""No request holds the event loop: the work between two of its turns is bounded, whatever is asked at the bounds.

From the engine's messages to the bytes of the answer, on a real server; a loop that held still for a call of 1,024
prompts counted millions of units.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from quire.engine.options import EngineOptions
from support.loop_meter import LoopMeter
from support.openai_server import OpenAIServer, openai_server

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MOST_UNITS = 45_000  # a unit takes some 0.1 us
MAX_MODEL_LEN = 1024
STOPS = [f" {'e' * 900}{number:02}" for number in range(64)]
MESSAGES = [{"role": "user", "content": "Write a long story"}]
LONG: dict[str, Any] = {"max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[OpenAIServer]:
    engine = EngineOptions(model=str(demo_model), max_model_len=MAX_MODEL_LEN, num_kv_blocks=6000, max_num_seqs=256)
    with openai_server(engine) as server:
        yield server


def prompts(count: int, length: int) -> list[list[int]]:
    """Return different prompts of token ids."""
    return [[5 + (number + position * 7) % 900 for position in range(length)] for number in range(count)]


def streamed(server: OpenAIServer, path: str, **body: Any) -> None:  # noqa: ANN401 (JSON)
    with server.http.stream("POST", path, json=body | {"stream": True}) as response:
        assert response.status_code == 200, response.read()
        for _ in response.iter_raw():
            pass


def explain(server: OpenAIServer) -> None:
    for _ in range(2):
        asked = server.ask(COMPLETIONS, prompt=prompts(1024, 3), max_tokens=1)
    answer = server.http.get(f"/v1/requests/{asked['id']}/explain").json()
    assert len(answer["prompts"]) == 1024


def cut(server: OpenAIServer) -> None:
    with server.http.stream("POST", COMPLETIONS, json={"prompt": prompts(512, 3), "stream": True, **LONG}) as response:
        next(response.iter_raw())


REQUESTS: dict[str, Callable[[OpenAIServer], object]] = {
    "explain": explain,
    "a call of 1,024 prompts that is cut": cut,
    "echo with logprobs": lambda server: server.ask(
        COMPLETIONS, prompt=prompts(16, 700), echo=True, logprobs=20, max_tokens=1
    ),
    "echo with logprobs, streamed": lambda server: streamed(
        server, COMPLETIONS, prompt=prompts(16, 700), echo=True, logprobs=20, max_tokens=1
    ),
    "prompt_logprobs": lambda server: server.ask(CHAT, messages=MESSAGES, prompt_logprobs=20, n=64, max_tokens=1),
    "prompt_logprobs, streamed": lambda server: streamed(
        server, COMPLETIONS, prompt=prompts(12, 1000), prompt_logprobs=20, max_tokens=1, return_token_ids=True
    ),
    "64 stop strings": lambda server: server.ask(COMPLETIONS, prompt=prompts(4, 3), n=64, stop=STOPS, **LONG),
    "64 stop strings, streamed": lambda server: streamed(
        server, COMPLETIONS, prompt=prompts(4, 3), n=64, stop=STOPS, **LONG
    ),
    "logprobs": lambda server: server.ask(CHAT, messages=MESSAGES, n=64, logprobs=True, top_logprobs=20, **LONG),
    "logprobs, streamed": lambda server: streamed(
        server, COMPLETIONS, prompt=prompts(4, 3), n=64, logprobs=20, **LONG
    ),
    "a beam search": lambda server: server.ask(
        COMPLETIONS, prompt=[5, 6], n=64, use_beam_search=True, temperature=0, **LONG
    ),
    "tokens of many prompts": lambda server: server.ask(
        COMPLETIONS, prompt=prompts(32, 500), n=64, return_token_ids=True, max_tokens=1, echo=True
    ),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_no_request_holds_the_loop(server: OpenAIServer, name: str) -> None:
    meter = LoopMeter(server._loop)
    server.on_loop(meter.start)
    REQUESTS[name](server)
    server.wait_until(server.is_idle)
    server.on_loop(meter.stop)
    assert meter.num_turns > 1
    assert meter.most_units <= MOST_UNITS, meter.most_called
