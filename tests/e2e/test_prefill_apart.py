"""Prefill apart from decoding, whole: servers of each role, answers to the bit, errors, and ends in each phase."""

import itertools
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.extension.isas import usable_isas
from support.fuzz_seeds import first_seed
from support.random_folder import HYBRID, write_random_folder
from support.server import ServerProcess, running_server, wait_until
from support.stopping import stopped

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

Json = dict[str, Any]
# An address of its own for each process of tests: all of 127.0.0.0/8 is this machine.
HOST = f"127.{1 + os.getpid() // 65536 % 250}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"
PROMPT = [3 + number * 7 % 280 for number in range(100)]  # 96 tokens in full blocks
BODY: Json = {"prompt": PROMPT, "max_tokens": 6, "ignore_eos": True}
KEEP: Json = {"max_tokens": 1, "kv_transfer_params": {"do_remote_decode": True}}


def value(server: ServerProcess, name: str, **labels: str) -> float:
    """Return a number of a server's metrics."""
    page = httpx.get(server.url + "/metrics", headers={"Authorization": "Bearer one"}, timeout=120)
    for line in page.text.splitlines():
        if line.startswith(name + "{") and all(f'{label}="{text}"' in line for label, text in labels.items()):
            return float(line.rpartition(" ")[2])
    raise AssertionError(f"no {name} with {labels}")


@contextmanager
def producing(folder: Path, port: int, *flags: str) -> Iterator[ServerProcess]:
    """Run a producer at a port, under the name of the port."""
    (folder / "secret").write_text("a secret of some 30 characters")
    own = ["--kv-role", "producer", "--kv-host", HOST, "--kv-port", str(port), "--kv-engine-id", f"p{port}"]
    with running_server("--num-kv-blocks", "64", "--kv-secret-file", str(folder / "secret"), *own, *flags) as server:
        yield server


@contextmanager
def consuming(folder: Path, ports: list[int], *flags: str) -> Iterator[ServerProcess]:
    """Run a consumer of producers at these ports, and wait until it is connected."""
    peers = folder / f"peers {ports}"
    peers.write_text("".join(f"p{port} {HOST}:{port}\n" for port in ports))
    own = ["--kv-role", "consumer", "--kv-peers", str(peers), "--kv-secret-file", str(folder / "secret")]
    with running_server("--num-kv-blocks", "64", *own, *flags) as server:
        wait_until(lambda: value(server, "quire:kv_transfer_peers", state="connected") == 1)
        yield server


def ask(server: ServerProcess, body: Json, key: str | None = None, path: str = "/v1/completions") -> Json:
    """Return an answer."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    response = httpx.post(server.url + path, json=body, headers=headers, timeout=120)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


def fetched(consumer: ServerProcess) -> float:
    """Return the prompt tokens that a consumer has not computed."""
    return value(consumer, "vllm:prompt_tokens_cached_by_source_total", source="p2p")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    folder = tmp_path_factory.mktemp("transfer")
    with producing(folder, 15001) as producer, consuming(folder, [15001]) as consumer:
        yield producer, consumer


@pytest.fixture(scope="module")
def stateful_pair(
    tmp_path_factory: pytest.TempPathFactory, demo_model: Path
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    folder = tmp_path_factory.mktemp("states")
    model = write_random_folder(folder / "model", HYBRID | {"vocab_size": 4096, "bos_token_id": 0, "eos_token_id": 0})
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(demo_model / name, model)
    with producing(folder, 15007, str(model)) as producer, consuming(folder, [15007], str(model)) as consumer:
        yield producer, consumer


Pair = tuple[ServerProcess, ServerProcess]

CASES: dict[str, Json] = {
    "greedy": {"temperature": 0},
    "a seed": {"seed": 5, "temperature": 1.0, "logprobs": 3},
    "three answers": {"seed": -7, "n": 3, "temperature": 0.9, "top_p": 0.9, "logprobs": 0},
    "no seed": {"temperature": 1.0, "logprobs": 1},
    "a grammar": {"temperature": 0.7, "seed": 1, "ignore_eos": False, "structured_outputs": {"regex": "[a-z]{4}"}},
    "penalties": {"seed": 3, "presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    "stop tokens": {"seed": 4, "stop": ["e"], "min_tokens": 2, "ignore_eos": False},
    "beams": {"use_beam_search": True, "n": 2, "temperature": 0, "ignore_eos": False},
    "a last block that is full": {"temperature": 0, "prompt": PROMPT[:96]},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_answer_is_that_of_one_engine_to_the_bit(pair: Pair, case: Json) -> None:
    assert fetched_for_a_right_answer(pair, case) == len((BODY | case)["prompt"]) - (1 if "prompt" in case else 4)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_answer_of_a_model_with_states_is_that_of_one_engine_to_the_bit(stateful_pair: Pair, case: Json) -> None:
    """The state is that behind the last full block before the prompt's last token."""
    assert fetched_for_a_right_answer(stateful_pair, case) == (80 if "prompt" in case else 96)


salts = map(str, itertools.count())


def fetched_for_a_right_answer(pair: Pair, case: Json) -> float:
    """Assert that an answer is that of one engine; return the tokens that were fetched for it."""
    producer, consumer = pair
    salt = {"cache_salt": next(salts)}
    before, kept = fetched(consumer), ask(producer, BODY | case | salt | KEEP)
    params = kept["kv_transfer_params"]
    apart = ask(consumer, BODY | case | salt | {"kv_transfer_params": params})
    seed = {} if "seed" in case else {"seed": params["seed"]}
    alone = ask(consumer, BODY | case | seed | {"cache_salt": "alone"})
    assert apart["choices"] == alone["choices"]
    num_fetched = fetched(consumer) - before
    if case.get("n", 1) == 1 and "logprobs" in case:
        tokens = apart["choices"][0]["logprobs"]["tokens"]
        assert tokens[0] == kept["choices"][0]["logprobs"]["tokens"][0], "the producer's token is the first"
    assert alone["kv_transfer_params"] is None
    return num_fetched


def test_chat_is_streamed_from_the_consumer(pair: Pair) -> None:
    producer, consumer = pair
    body: Json = {"messages": [{"role": "user", "content": "def area(shape): " * 8}], "max_tokens": 5, "seed": 2}
    before, kept = fetched(consumer), ask(producer, body | KEEP, path="/v1/chat/completions")
    assert kept["kv_transfer_params"]["remote_engine_id"] == "p15001"
    streamed = body | {"kv_transfer_params": kept["kv_transfer_params"], "stream": True}
    response = httpx.post(consumer.url + "/v1/chat/completions", json=streamed, timeout=120)
    assert response.text.endswith("data: [DONE]\n\n")
    assert fetched(consumer) - before >= 32


def test_ticket_that_was_used_is_refused_and_the_answer_is_right(pair: Pair) -> None:
    producer, consumer = pair
    body = BODY | {"temperature": 0, "cache_salt": "twice"}
    params = ask(producer, body | KEEP)["kv_transfer_params"]
    first = ask(consumer, body | {"kv_transfer_params": params})
    before = fetched(consumer), value(consumer, "quire:kv_transfer_failed_total", reason="refused")
    again = ask(consumer, body | {"kv_transfer_params": params, "prompt": [9, *PROMPT]})
    assert len(again["choices"][0]["text"]) > 0
    assert first["choices"] == ask(consumer, body | {"cache_salt": "alone"})["choices"]
    assert fetched(consumer) == before[0]
    assert value(consumer, "quire:kv_transfer_failed_total", reason="refused") == before[1] + 1


def test_router_hands_a_request_from_one_to_the_other(pair: Pair) -> None:
    producer, consumer = pair
    flags = ["--prefill", producer.url, "--decode", consumer.url, "--prefill-least-bytes", "0"]
    with running_server(*flags, subcommand="route") as router:
        body = BODY | {"temperature": 0, "cache_salt": "routed", "stream_options": {"include_usage": True}}
        before = fetched(consumer)
        streamed = httpx.post(router.url + "/v1/completions", json=body | {"stream": True}, timeout=120).text
        assert streamed.endswith("data: [DONE]\n\n")
        assert fetched(consumer) - before == 96
        del body["stream_options"]
        routed = ask(router, body | {"cache_salt": "again", "n": 2, "temperature": 1.0, "seed": 1})
        alone = ask(consumer, body | {"cache_salt": "alone", "n": 2, "temperature": 1.0, "seed": 1})
        assert routed["choices"] == alone["choices"]
        assert fetched(consumer) - before == 192
        refused = router.post("/v1/completions", body | {"temperature": -1})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "temperature")
        assert 'way="apart"} 2' in router.get("/metrics").text


def test_requests_of_the_sidecar_of_llm_d(pair: Pair) -> None:
    """As its connector `nixlv2` sends them; Go's JSON makes floats of numbers, so a drawn seed arrives rounded."""
    producer, consumer = pair
    of_remote = dict.fromkeys(("remote_engine_id", "remote_block_ids", "remote_host", "remote_port"))
    for_prefill: Json = {
        "stream": False, "max_tokens": 1, "max_completion_tokens": 1, "cache_hit_threshold": 0,
        "kv_transfer_params": {"do_remote_decode": True, "do_remote_prefill": False} | of_remote,
    }  # fmt: skip
    messages = [{"role": "user", "content": "def volume(shape): " * 8}]
    headers = {"X-Request-Id": "4ce9c2d0-cd0f-11f0-b6f1-8a2b6bd1f6a4", "X-Prefiller-Host-Port": "10.0.0.1:8000"}
    for path, body in (
        ("/v1/completions", BODY | {"cache_salt": "llm-d"}),
        ("/v1/chat/completions", {"messages": messages, "max_completion_tokens": 5, "stream": True}),
    ):
        kept = httpx.post(producer.url + path, json=body | for_prefill, headers=headers, timeout=120).text
        params = json.loads(kept, parse_int=lambda digits: int(float(digits)))["kv_transfer_params"]
        before = fetched(consumer)
        redeeming = body | {"kv_transfer_params": params}
        answer = httpx.post(consumer.url + path, json=redeeming, headers=headers, timeout=120)
        assert answer.status_code == 200, answer.text
        assert fetched(consumer) - before >= 32


WRONG: dict[str, tuple[Json, str]] = {
    "no peer": (
        {"do_remote_prefill": True, "remote_engine_id": "10.0.0.1:80", "remote_request_id": "a" * 64},
        "'10.0.0.1:80' is no engine of kv_peers",
    ),
    "no name": ({"do_remote_prefill": True, "remote_request_id": "a" * 64}, "remote_engine_id"),
    "no ticket": ({"do_remote_prefill": True, "remote_engine_id": "p15001"}, "remote_request_id"),
    "a short ticket": (
        {"do_remote_prefill": True, "remote_engine_id": "p15001", "remote_request_id": "A" * 63}, "remote_request_id"
    ),
    "both": ({"do_remote_prefill": True, "do_remote_decode": True}, "are both true"),
    "no flag": ({"do_remote_prefill": "yes"}, "must be true or false"),
    "another role": ({"do_remote_decode": True}, "needs a server with kv_role producer or both"),
}  # fmt: skip


@pytest.mark.parametrize(("params", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_parameters_are_an_error_that_names_them(pair: Pair, params: Json, message: str) -> None:
    response = pair[1].post("/v1/completions", BODY | {"kv_transfer_params": params})
    assert (response.status_code, response.json()["error"]["param"].partition(".")[0]) == (400, "kv_transfer_params")
    assert message in response.json()["error"]["message"]


@pytest.mark.parametrize("fields", [{"stream": True}, {"prompt_logprobs": 1}, {"echo": True}, {"prompt": [[1], [2]]}])
def test_what_does_not_go_with_a_ticket_is_an_error(pair: Pair, fields: Json) -> None:
    response = pair[0].post("/v1/completions", BODY | KEEP | fields)
    assert (response.status_code, response.json()["error"]["param"]) == (400, "kv_transfer_params")


def test_server_without_a_role_keeps_nothing(openai_like: ServerProcess) -> None:
    for params in ({"do_remote_decode": True}, {"do_remote_prefill": True}):
        response = openai_like.post("/v1/completions", BODY | {"kv_transfer_params": params})
        assert (response.status_code, response.json()["error"]["code"]) == (400, "kv_transfer_unavailable")
    assert ask(openai_like, BODY | {"kv_transfer_params": {}})["kv_transfer_params"] is None


@pytest.fixture
def openai_like() -> Iterator[ServerProcess]:
    with running_server("--num-kv-blocks", "64") as server:
        yield server


def test_int8_cache_is_handed_over_and_another_kind_is_an_error_that_names_both(tmp_path: Path) -> None:
    with ExitStack() as stack:
        plain = stack.enter_context(producing(tmp_path, 15002, "--api-key", "one", "--api-key", "two"))
        int8 = ["--kv-cache-dtype", "int8_per_token_head"]
        producer = stack.enter_context(producing(tmp_path, 15003, *int8, "--api-key", "one", "--api-key", "two"))
        keys = ["--api-key", "two", "--api-key", "one"]      # another order
        consumer = stack.enter_context(consuming(tmp_path, [15002, 15003], *int8, *keys))
        body = BODY | {"seed": 1, "logprobs": 2}
        params = ask(producer, body | KEEP, "one")["kv_transfer_params"]
        other = ask(consumer, body | {"kv_transfer_params": params}, "two")
        assert fetched(consumer) == 0, "the ticket of another key"
        assert value(consumer, "quire:kv_transfer_failed_total", reason="refused") == 1
        salted = body | {"cache_salt": "x"}
        params = ask(producer, salted | KEEP, "one")["kv_transfer_params"]
        apart = ask(consumer, salted | {"kv_transfer_params": params}, "one")
        assert fetched(consumer) == 96
        assert apart["choices"] == other["choices"]
        params = ask(plain, body | KEEP, "one")["kv_transfer_params"]
        wait_until(lambda: "keys and values of another kind" in consumer.log)
        headers = {"Authorization": "Bearer one"}
        response = httpx.post(
            consumer.url + "/v1/completions", json=body | {"kv_transfer_params": params}, headers=headers, timeout=120
        )
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "kv_transfer_unavailable"
        message = "'p15002' has keys and values of another kind: here kv_dtype 'int8"
        assert message in response.json()["error"]["message"]


def test_processes_that_end_in_any_phase_cost_computing_and_no_block(tmp_path: Path) -> None:
    body = BODY | {"temperature": 0}
    with ThreadPoolExecutor() as threads, producing(tmp_path, 15004, "--kv-lease-duration", "1") as producer:

        def held() -> float:
            return value(producer, "quire:kv_transfer_held_blocks")

        with consuming(tmp_path, [15004]) as consumer:
            expected = ask(consumer, body | {"cache_salt": "alone"})["choices"]
            params = ask(producer, body | KEEP)["kv_transfer_params"]     # and the router ends: nothing asks
            wait_until(lambda: held() == 0)
            late = ask(consumer, body | {"kv_transfer_params": params})
            assert late["choices"] == expected
            assert value(consumer, "quire:kv_transfer_failed_total", reason="refused") == 1
            # The consumer's engine ends while it waits for blocks.
            params = ask(producer, body | KEEP | {"cache_salt": "1"})["kv_transfer_params"]
            os.kill(producer.engine_pid(), signal.SIGSTOP)
            salted = body | {"cache_salt": "1", "kv_transfer_params": params}
            waiting = threads.submit(consumer.post, "/v1/completions", salted)
            wait_until(lambda: waiting.done() or value(consumer, "vllm:num_requests_waiting") == 1)
            os.kill(consumer.engine_pid(), signal.SIGKILL)
            assert waiting.result().status_code >= 500 or waiting.result().json()["choices"] == expected
            os.kill(producer.engine_pid(), signal.SIGCONT)
        wait_until(lambda: held() == 0)
        with consuming(tmp_path, [15004]) as consumer:
            # The producer's engine ends while another one waits for its blocks.
            params = ask(producer, body | KEEP | {"cache_salt": "2"})["kv_transfer_params"]
            os.kill(producer.engine_pid(), signal.SIGSTOP)
            salted = body | {"cache_salt": "2", "kv_transfer_params": params}
            waiting = threads.submit(consumer.post, "/v1/completions", salted)
            wait_until(lambda: waiting.done() or value(consumer, "vllm:num_requests_waiting") == 1)
            os.kill(producer.engine_pid(), signal.SIGKILL)
            assert waiting.result().json()["choices"] == expected
            assert ask(consumer, salted | {"cache_salt": "3"})["choices"] == expected, "nothing listens there"
            wait_until(lambda: value(consumer, "quire:kv_blocks", state="used") == 0)


def is_settled(server: ServerProcess) -> bool:
    """Return whether a server has no request, holds no block, and keeps none."""
    names = "quire:kv_transfer_held_blocks", "vllm:num_requests_running", "vllm:num_requests_waiting"
    return not value(server, "quire:kv_blocks", state="used") and not any(value(server, name) for name in names)


@contextmanager
def routing(producer: ServerProcess, consumer: ServerProcess) -> Iterator[ServerProcess]:
    """Run a router that sends all completions to both."""
    flags = ["--prefill", producer.url, "--decode", consumer.url, "--prefill-least-bytes", "0"]
    with running_server(*flags, subcommand="route") as router:
        yield router


@contextmanager
def held(server: ServerProcess) -> Iterator[None]:
    """Stop a server and its engine."""
    with stopped(server.pid), stopped(server.engine_pid()):
        yield


def test_router_and_servers_that_end_or_stop_in_any_phase_cost_no_token_and_no_block(tmp_path: Path) -> None:
    body, salts = BODY | {"seed": 3, "n": 2, "temperature": 0.9}, itertools.count()

    def submit(router: ServerProcess) -> Future[httpx.Response]:
        return threads.submit(router.post, "/v1/completions", body | {"cache_salt": str(next(salts))})

    def has_one(server: ServerProcess) -> bool:
        return value(server, "vllm:num_requests_waiting") == 1

    with ExitStack() as stack:
        threads = stack.enter_context(ThreadPoolExecutor())
        producer = stack.enter_context(producing(tmp_path, 15005, "--kv-lease-duration", "1"))
        consumer = stack.enter_context(consuming(tmp_path, [15005]))
        expected = ask(consumer, body)["choices"]

        def is_right(answer: Future[httpx.Response]) -> bool:
            found = answer.result()
            return found.status_code == 200 and found.json()["choices"] == expected

        def settle() -> None:
            wait_until(lambda: is_settled(producer) and is_settled(consumer))

        with routing(producer, consumer) as router:
            assert is_right(submit(router))     # fetched, or computed where a machine was stopped for a whole lease
            with held(producer):                                # the consumer computes
                assert is_right(submit(router))
            settle()
            with held(consumer):                                # none is left: an error
                assert submit(router).result().json()["error"]["code"] == "decode_unreached"
            settle()
            with stopped(producer.engine_pid()):                # the router, until the ticket is over
                answer = submit(router)
                wait_until(lambda: has_one(producer))
                router.signal(signal.SIGSTOP)
            wait_until(lambda: value(producer, "quire:kv_transfer_tickets_total", state="made") >= 2)
            wait_until(lambda: is_settled(producer))
            router.signal(signal.SIGCONT)
            assert is_right(answer)
            settle()
            with stopped(producer.engine_pid()):
                answer = submit(router)
                wait_until(lambda: has_one(producer))
                router.signal(signal.SIGKILL)
                assert isinstance(answer.exception(), httpx.TransportError)
            settle()
        with routing(producer, consumer) as router:
            with stopped(consumer.engine_pid()):
                answer = submit(router)
                wait_until(lambda: has_one(consumer))
                router.signal(signal.SIGKILL)
                assert isinstance(answer.exception(), httpx.TransportError)
            settle()
        with routing(producer, consumer) as router:
            with stopped(producer.engine_pid()):
                answer = submit(router)
                wait_until(lambda: has_one(producer))
                producer.signal(signal.SIGKILL)
                assert is_right(answer)
            wait_until(lambda: is_settled(consumer))
            with stopped(consumer.engine_pid()):
                answer = submit(router)
                wait_until(lambda: has_one(consumer))
                consumer.signal(signal.SIGKILL)
                assert answer.result().json()["error"]["code"] == "decode_unreached"


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_no_block_is_lost_over_many_requests_through_the_router(tmp_path: Path) -> None:
    """As many as QUIRE_FUZZ_STEPS: a tenth of the clients goes early, and engines are stopped for a moment."""
    num_requests = int(os.environ.get("QUIRE_FUZZ_STEPS") or 400)
    rng, going = random.Random(first_seed()), httpx.Timeout(120)
    bodies: list[Json] = [
        {"prompt": [3 + rng.randrange(280) for _ in range(rng.randrange(20, 70))], "max_tokens": rng.randrange(1, 5),
         "ignore_eos": True, "seed": rng.randrange(9), "n": rng.choice([1, 1, 3]), "temperature": 1}
        for _ in range(40)
    ]  # fmt: skip
    with ExitStack() as stack:
        producer = stack.enter_context(producing(tmp_path, 15006, "--kv-lease-duration", "1"))
        consumer = stack.enter_context(consuming(tmp_path, [15006]))
        router = stack.enter_context(routing(producer, consumer))
        client, threads = stack.enter_context(httpx.Client(timeout=going)), stack.enter_context(ThreadPoolExecutor(4))
        expected = [ask(consumer, body)["choices"] for body in bodies]

        def one(number: int, timeout_s: float) -> int:
            chosen = number % len(bodies)
            try:
                found = client.post(
                    router.url + "/v1/completions", json=bodies[chosen] | {"cache_salt": str(number)}, timeout=timeout_s
                )
            except httpx.TimeoutException:
                assert timeout_s < 1
                return 0
            assert found.status_code == 200, found.text
            assert found.json()["choices"] == expected[chosen]
            return 1

        patience_s = [0.01 * rng.random() if rng.random() < 0.1 else 120 for _ in range(num_requests)]
        asked = [threads.submit(one, *each) for each in enumerate(patience_s)]
        while not all(each.done() for each in asked):
            with stopped(rng.choice([producer, consumer]).engine_pid()):
                time.sleep(0.05)
            time.sleep(1.0)
        num_answered = sum(each.result() for each in asked)
        assert num_answered > 0.8 * num_requests
        wait_until(lambda: is_settled(producer) and is_settled(consumer))
        assert fetched(consumer) > 0
        print(f"{num_answered} of {num_requests} answered, {fetched(consumer):.0f} tokens fetched")
