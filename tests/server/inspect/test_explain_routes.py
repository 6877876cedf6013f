"""Why a request took its time, over HTTP: while it waits, while it runs, and afterwards; to its owner alone."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.engine.messages import Stepped
from quire.engine.options import EngineOptions
from quire.engine.requests.output_processor import ProcessedStep
from quire.server.inspect import explain_routes
from support.openai_server import LIMIT_S, OpenAIServer, openai_server

COMPLETIONS = "/v1/completions"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
FIRST, SECOND = ({"Authorization": f"Bearer {key}"} for key in ("first", "second"))


@pytest.fixture(scope="module")
def running_server(demo_model: Path) -> Iterator[OpenAIServer]:
    """Serve two keys, with so few blocks that two long answers do not fit."""
    engine = EngineOptions(
        model=str(demo_model), max_num_seqs=4, max_model_len=512, num_kv_blocks=40, num_swap_blocks=40,
        preemption_mode="swap",
    )  # fmt: skip
    with openai_server(engine, max_n=4, api_key=("first", "second")) as server:
        server.http.headers.update(FIRST)
        yield server


@pytest.fixture
def server(running_server: OpenAIServer) -> Iterator[OpenAIServer]:
    yield running_server
    running_server.wait_until(running_server.is_idle)


def explanation(server: OpenAIServer, request_id: str, headers: dict[str, str] | None = None) -> httpx.Response:
    return server.http.get(f"/v1/requests/{request_id}/explain", headers=headers)


def explained(server: OpenAIServer, request_id: str) -> list[dict[str, Any]]:
    answer = explanation(server, request_id).json()
    assert (answer["id"], answer["object"]) == (request_id, "request.explanation")
    return list(answer["prompts"])


def test_a_request_that_went_smoothly(server: OpenAIServer) -> None:
    prompt = list(range(300, 340))
    answer = server.ask(COMPLETIONS, prompt=[prompt, [5]], **GREEDY)
    first, second = explained(server, answer["id"])
    assert first["state"] == second["state"] == "finished"
    assert (first["num_prompt_tokens"], first["num_cached_tokens"]) == (40, 0)
    assert first["first_miss"] == {"token": 0, "block": 0, "reason": "never_seen"}
    assert second["first_miss"] is None, "the only token is always computed"
    assert (first["waits_for"], first["waited_steps"]) == (None, {})
    assert (first["num_preemptions"], first["preemptions"]) == (0, [])
    assert (first["num_draft_tokens"], first["num_accepted_tokens"]) == (0, 0)
    assert 0 <= first["queue_s"] <= first["ttft_s"] <= first["e2e_s"] < LIMIT_S
    again = server.ask(COMPLETIONS, prompt=[*prompt, 9, 9, 9], cache_salt="mine", **GREEDY)
    assert explained(server, again["id"])[0]["first_miss"] == {"token": 0, "block": 0, "reason": "other_salt"}
    longer = server.ask(COMPLETIONS, prompt=[*prompt, 9, 9, 9], **GREEDY)
    (told,) = explained(server, longer["id"])
    assert told["num_cached_tokens"] >= 32
    assert told["first_miss"]["reason"] == "never_seen"


def test_only_the_owner_is_told(server: OpenAIServer) -> None:
    prompt = list(range(400, 440))
    mine = server.ask(COMPLETIONS, prompt=prompt, cache_salt="mine", **GREEDY)
    for request_id, headers in ((mine["id"], SECOND), ("cmpl-0", FIRST), ("x" * 4000, FIRST), ("%00", FIRST)):
        response = explanation(server, request_id, headers)
        assert response.status_code == 404
        error = response.json()["error"]
        assert error["code"] == "request_not_found"
        assert len(error["message"]) < 200
    assert explanation(server, mine["id"], {"Authorization": "Bearer wrong"}).status_code == 401
    theirs = server.http.post(COMPLETIONS, json={"prompt": prompt, **GREEDY}, headers=SECOND).json()
    (told,) = explanation(server, theirs["id"], SECOND).json()["prompts"]
    assert told["first_miss"]["reason"] == "never_seen", "what the other key has asked is not told"


def test_victims_and_those_who_wait_are_told_why(server: OpenAIServer, monkeypatch: pytest.MonkeyPatch) -> None:
    long: dict[str, Any] = {**GREEDY, "max_tokens": 330}
    service, (metrics,) = server.service, server.service.metrics.engines
    on_step = metrics.on_step
    seen: set[tuple[str, bool]] = set()

    def look(step: Stepped, processed: ProcessedStep) -> None:
        """See what could be told after a step; a client over HTTP may miss it."""
        on_step(step, processed)
        for past in chain(*service.history._calls.values()):
            told = explain_routes._explanation(service, past, None)
            seen.add((told["state"], told["waits_for"] is not None))

    monkeypatch.setattr(metrics, "on_step", look)
    with ThreadPoolExecutor(3) as clients:
        with server.held():  # so that all three run together
            asking = [clients.submit(server.ask, COMPLETIONS, prompt=[500 + i] * 40, **long) for i in range(3)]
            server.wait_until(lambda: len(service.client._streams) == 3)
        answers = [each.result() for each in asking]
    told = [one for answer in answers for one in explained(server, answer["id"])]
    preemptions = [preemption for one in told for preemption in one["preemptions"]]
    assert preemptions
    assert len(preemptions) == sum(one["num_preemptions"] for one in told)
    for preemption in preemptions:
        assert preemption["cost_s"] > preemption["away_s"] > 0
        assert preemption["num_swapped_blocks"] > 0
        assert preemption["waited_steps"]["swapped_first"] > 0
    assert ("preempted", True) in seen
    assert ("running", False) in seen
    evicted = server.ask(COMPLETIONS, prompt=[500] * 40, **GREEDY), server.ask(COMPLETIONS, prompt=[501] * 40, **GREEDY)
    misses = [explained(server, answer["id"])[0]["first_miss"] for answer in evicted]
    assert all(miss is None or miss["reason"] == "evicted" for miss in misses)


def test_openapi_tells_of_it(server: OpenAIServer) -> None:
    assert "/v1/requests/{request_id}/explain" in server.http.get("/openapi.json").json()["paths"]
