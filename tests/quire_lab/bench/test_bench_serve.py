"""`quire bench serve` against a real server: what it reports, how it ends, and what it refuses."""

import asyncio
import json
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support.completions_server import Body, CompletionsServer, all_tokens, token_chunk

Run = Callable[..., Any]

SMALL = ("--num-prompts", 6, "--input-len", 5, "--output-len", 4)


@pytest.fixture
def server() -> CompletionsServer:
    return CompletionsServer()


@pytest.fixture
def url(server: CompletionsServer) -> Iterator[str]:
    with server.in_a_thread() as url:
        yield url


@pytest.fixture
def measured(run: Run, url: str, tmp_path: Path) -> Callable[..., tuple[Any, Any]]:
    """Return a function that runs the command and gives how it ended and what it wrote as JSON."""

    def bench(*arguments: object) -> tuple[Any, Any]:
        path = tmp_path / "figures.json"
        ran = run("bench", "serve", "--url", url, "--json", path, *arguments)
        return ran, json.loads(path.read_text()) if path.exists() else None

    return bench


Measured = Callable[..., tuple[Any, Any]]


def test_report_counts_what_was_done(measured: Measured, server: CompletionsServer) -> None:
    ran, record = measured(*SMALL)
    assert ran.code == 0, ran.err
    assert set(record["figures"]) == {"ttft_s", "itl_s", "tpot_s", "e2e_s"}
    assert record["requests"]["num_finished"] == len(record["per_request"]) == len(server.bodies) == 6
    assert record["requests"]["num_output_tokens"] == 24
    assert record["rates"]["tokens_per_s"] == pytest.approx(24 / record["requests"]["duration_s"])
    assert record["workload"] == {
        "source": "random", "num_requests": 6, "num_prompt_tokens": 30, "num_output_tokens": 24
    }
    assert record["interrupted"] is False
    assert "Little's law" in ran.out
    assert record["diagnosis"].split(":")[0] in ran.out


def test_model_and_key_are_the_ones_given_or_the_first_and_none(measured: Measured, server: CompletionsServer) -> None:
    measured(*SMALL, "--num-prompts", 1)
    measured(*SMALL, "--num-prompts", 1, "--model-name", "other", "--api-key", "k")
    assert [body["model"] for body in server.bodies] == ["tiny", "other"]
    assert server.keys == [None, "Bearer k"]


def test_url_may_end_in_v1(run: Run, url: str) -> None:
    assert run("bench", "serve", "--url", f"{url}/v1/", *SMALL).code == 0


def test_goodput_and_the_servers_counters_are_reported(measured: Measured, server: CompletionsServer) -> None:
    server.metrics_page = lambda: f"vllm:num_preemptions_total {len(server.bodies)}\n"
    _, record = measured(*SMALL, "--e2e-limit-ms", 1e9)
    assert record["limits"] == {"e2e_s": 1e6, "attained": 1.0}
    assert record["rates"]["goodput_rps"] == record["rates"]["requests_per_s"]
    assert record["kv_cache"]["num_preemptions"] == 6


def test_goodput_is_asked_for_and_reported_as_vllm_does(measured: Measured) -> None:
    ran, record = measured("--goodput", "ttft:1e9", "tpot:1e9", "e2el:1e9", *SMALL)
    assert ran.code == 0, ran.err
    assert record["limits"] == {"ttft_s": 1e6, "tpot_s": 1e6, "e2e_s": 1e6, "attained": 1.0}
    assert record["request_goodput"] == record["rates"]["goodput_rps"] == record["rates"]["requests_per_s"]
    assert f"Request goodput (req/s): {record['request_goodput']:.4g}" in ran.out
    _, record = measured(*SMALL, "--goodput", "ttft:1e9", "--goodput=e2el:0")
    assert (record["request_goodput"], record["limits"]["attained"]) == (0.0, 0.0)
    assert "request_goodput" not in measured(*SMALL)[1]


@pytest.mark.parametrize(
    ("arguments", "due_s"),
    [
        ((), [0.0] * 6),
        (("--arrivals", "burst"), [0.0] * 6),
        (("--rate", 1e5), None),
        (("--arrivals", "poisson", "--rate", 1e5, "--burstiness", 0.5), None),
    ],
)
def test_open_arrivals_are_as_asked(
    measured: Measured, arguments: tuple[object, ...], due_s: list[float] | None
) -> None:
    ran, record = measured(*SMALL, *arguments)
    assert ran.code == 0, ran.err
    found = [request["due_s"] for request in record["per_request"]]
    assert found == sorted(found)
    assert found == due_s if due_s else 0.0 < found[-1] < 1.0


def test_closed_loop_has_as_many_clients_as_asked(measured: Measured, server: CompletionsServer) -> None:
    ran, record = measured(*SMALL, "--concurrency", 2)
    assert ran.code == 0, ran.err
    assert server.most_open <= 2
    assert "offered_rps" not in record["rates"]


def test_trace_is_played_at_its_times(measured: Measured, server: CompletionsServer, tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n0,3,1\n5.0,4,2\n5.2,5,3\n5.4,6,4\n")
    ran, record = measured("--workload", path, "--start-s", 5, "--speed-up", 10, "--num-prompts", 2)
    assert ran.code == 0, ran.err
    assert [request["due_s"] for request in record["per_request"]] == [0.0, pytest.approx(0.02)]
    assert [(len(body["prompt"]), body["max_tokens"]) for body in server.bodies] == [(4, 2), (5, 3)]


def test_trace_can_come_in_another_way(measured: Measured, server: CompletionsServer, tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 5, "output_length": 1, "hash_ids": [1]}\n' * 3)
    ran, _ = measured("--workload", path, "--concurrency", 1, "--vocab-size", 100)
    assert ran.code == 0, ran.err
    assert server.bodies[0]["prompt"] == server.bodies[2]["prompt"]


def test_failed_requests_are_counted_and_the_rest_is_reported(measured: Measured, server: CompletionsServer) -> None:
    error = {"error": {"message": "full", "type": "rate_limit_error", "code": "server_overloaded"}}
    server.refusals = iter([(429, error)] * 2)
    ran, record = measured(*SMALL)
    assert ran.code == 0
    assert record["errors"] == {"429 server_overloaded": 2}
    assert record["requests"]["num_finished"] == 4
    assert "2 requests failed" in record["diagnosis"]
    assert "429 server_overloaded 2" in ran.out


def test_load_of_which_nothing_was_answered_is_an_error(measured: Measured, server: CompletionsServer) -> None:
    server.refusals = iter([(400, {"error": {"message": "no such token", "type": "invalid_request_error"}})] * 6)
    ran, record = measured(*SMALL)
    assert ran.code == 1
    assert "400 invalid_request_error: no such token" in ran.err
    assert record["requests"]["num_failed"] == 6


def test_ctrl_c_reports_what_was_measured(measured: Measured, server: CompletionsServer) -> None:
    async def until_interrupted(body: Body) -> AsyncIterator[bytes]:
        if len(server.bodies) < 3:
            async for piece in all_tokens(body):
                yield piece
            return
        yield token_chunk()
        if len(server.bodies) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        await asyncio.Event().wait()

    server.stream = until_interrupted
    ran, record = measured(*SMALL, "--concurrency", 1)
    assert ran.code == 130
    assert record["interrupted"] is True
    counts = record["requests"]
    assert (counts["num_finished"], counts["num_failed"], counts["num_cut"]) == (2, 0, 4)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_rate_is_searched_until_the_limits_are_missed(measured: Measured, server: CompletionsServer) -> None:
    async def refuses_the_many(body: Body) -> AsyncIterator[bytes]:
        if len(server.bodies) > 30:  # probes of 10 and 20 requests fit, one of 40 does not
            return
        async for piece in all_tokens(body):
            yield piece

    server.stream = refuses_the_many
    limits = ("--e2e-limit-ms", 1e9, "--attain", 0.9, "--probe-s", 0.1, "--precision", 1.0)
    ran, record = measured(*SMALL, "--find-rate", *limits, "--rate", 100)
    assert ran.code == 0, ran.err
    found = record["find_rate"]
    assert (found["rate"], found["missed_rate"]) == (200.0, 400.0)
    assert [(probe["num_requests"], probe["is_met"]) for probe in found["probes"]] == [
        (10, True), (20, True), (40, False)
    ]
    assert record["requests"]["num_finished"] == 20
    assert re.search(r"200 requests/s for .*: 20 of 20 met the limits, enough", ran.out)
    prompts = [tuple(body["prompt"]) for body in server.bodies[:30]]
    assert len(set(prompts)) == 30


def test_search_without_any_rate_is_an_error_that_says_so(measured: Measured, server: CompletionsServer) -> None:
    ran, record = measured(*SMALL, "--find-rate", "--e2e-limit-ms", 0.001, "--probe-s", 0.1)
    assert ran.code == 1
    assert "no rate meets the limits, down to 100 requests/s" in ran.err
    assert record["find_rate"]["rate"] is None
    assert len(server.bodies) <= 10


def test_ctrl_c_ends_a_search_with_the_best_so_far(measured: Measured, server: CompletionsServer) -> None:
    async def until_interrupted(body: Body) -> AsyncIterator[bytes]:
        async for piece in all_tokens(body):
            yield piece
        if len(server.bodies) == 31:
            os.kill(os.getpid(), signal.SIGINT)

    server.stream = until_interrupted
    ran, record = measured(*SMALL, "--find-rate", "--e2e-limit-ms", 1e9, "--probe-s", 0.1, "--rate", 100)
    assert ran.code == 130
    assert record["find_rate"]["rate"] == 200.0
    assert record["interrupted"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arrivals", "poisson"), "rate is for arrivals poisson, which needs it"),
        (("--arrivals", "burst", "--rate", 3), "arrivals are burst, rate is 3"),
        (("--arrivals", "closed"), "concurrency is for arrivals closed, which needs it"),
        (("--rate", 3, "--concurrency", 3), "arrivals are poisson, concurrency is 3"),
        (("--burstiness", 2), "burstiness is for arrivals poisson"),
        (("--arrivals", "trace"), "needs a workload with arrival times"),
        (("--speed-up", 2), "are for traces"),
        (("--start-s", 2), "are for traces"),
        (("--workload", "w.txt"), "must be random, or a .json"),
        (("--find-rate",), "find-rate needs a limit"),
        (("--goodput", "ttft:500", "itls:3"), "goodput must be pairs of ttft, itl, tpot, e2el and milliseconds, got"),
        (("--goodput", "ttft:500", "3000"), "got '3000'"),
        (("--goodput", "tpot"), "goodput tpot must be milliseconds of at least 0, got 'tpot'"),
        (("--goodput", "tpot:-1"), "got 'tpot:-1'"),
        (("--goodput", "ttft:nan"), "got 'ttft:nan'"),
        (("--goodput", "ttft:inf"), "got 'ttft:inf'"),
        (("--goodput", "ttft:5:6"), "got 'ttft:5:6'"),
        (("--goodput", "ttft:5", "ttft:6"), "goodput names ttft twice, the second time in 'ttft:6'"),
        (("--goodput", "ttft:5", "--ttft-limit-ms", 5), "goodput has ttft:5, ttft-limit-ms is 5; give one"),
        (("--find-rate", "--ttft-limit-ms", 9, "--concurrency", 3), "leave arrivals and concurrency out"),
        (("--find-rate", "--ttft-limit-ms", 9, "--arrivals", "burst"), "leave arrivals and concurrency out"),
    ],
)
def test_flags_that_contradict_each_other_are_refused_before_anything_is_sent(
    run: Run, arguments: tuple[object, ...], message: str
) -> None:
    ran = run("bench", "serve", *arguments)
    assert ran.code == 1
    assert message in ran.err


def test_missing_server_is_one_line(run: Run) -> None:
    ran = run("bench", "serve", "--url", "http://127.0.0.1:1")
    assert ran.code == 1
    assert ran.err.startswith("quire: no server answers at http://127.0.0.1:1")
    assert ran.err.count("\n") == 1
