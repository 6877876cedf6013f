"""`quire route`: what it sends in vLLM's form, and what it does where servers are not reached or end."""

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest

from quire.cli.route import check_urls
from quire.core.errors import ConfigError
from quire.server.route import MAX_MISSES, PROBE_PAUSE_S
from support.server import ANSWER_LIMIT_S, ServerProcess, wait_until

Json = dict[str, Any]
# As NixlConnector of vLLM 0.32 answers, with keys that mean nothing to the router.
PARAMS: Json = {
    "do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": [[11, 12]],
    "remote_engine_id": "af0982bf-5e1d-471b-a9fe-f817827078d8", "remote_request_id": "cmpl-b4353ea45d80b9ff-0-86bc157e",
    "remote_host": "127.0.0.1", "remote_port": 15601, "tp_size": 1, "dcp_size": 1, "pp_size": 1,
    "remote_num_tokens": 200, "remote_blocks_expiry_time": None, "transfer_mode": "pull",
    "remote_prefill_cached_tokens": 0,
}  # fmt: skip
TICKET: Json = PARAMS | {"remote_block_ids": []}    # as Quire answers: it names no blocks
PROMPT = "x" * 100
NUM_WAITING = 20

Answer = Callable[[BaseHTTPRequestHandler, Json], None]


def says(body: Json | bytes, status: int = 200) -> Answer:
    """Return an answer."""

    def answer(handler: BaseHTTPRequestHandler, _: Json) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content)))
        handler.end_headers()
        handler.wfile.write(content)

    return answer


def ends(handler: BaseHTTPRequestHandler, _: Json) -> None:
    """End the connection without an answer."""
    handler.connection.shutdown(socket.SHUT_RDWR)


def breaks_off(handler: BaseHTTPRequestHandler, _: Json) -> None:
    """Begin a stream, and end the connection."""
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Transfer-Encoding", "chunked")
    handler.end_headers()
    handler.wfile.write(b"6\r\ndata: \r\n")
    handler.wfile.flush()
    handler.connection.shutdown(socket.SHUT_RDWR)


class Stub:
    """A server that records bodies, and answers by a function."""

    def __init__(self, answer: Answer) -> None:
        self.asked: list[tuple[str, Any, str | None]] = []
        self.num_probes = 0     # questions for its health
        stub, asked = self, self.asked

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["Content-Length"]))
                try:
                    body = json.loads(content)
                except ValueError:
                    body = content
                asked.append((self.path, body, self.headers["Authorization"]))
                answer(self, body)

            def do_GET(self) -> None:
                stub.num_probes += self.path == "/health"
                says({"path": self.path})(self, {})

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def stubs(*answers: Answer) -> Iterator[list[Stub]]:
    opened = [Stub(answer) for answer in answers]
    try:
        yield opened
    finally:
        for stub in opened:
            stub.close()


@contextmanager
def routing(prefill: list[str], decode: list[str], least_bytes: int = 0) -> Iterator[ServerProcess]:
    flags = [part for url in prefill for part in ("--prefill", url)]
    flags += [part for url in decode for part in ("--decode", url)]
    flags += ["--port", "0", "--prefill-least-bytes", str(least_bytes)]
    router = ServerProcess(*flags, is_forked=True, subcommand="route")
    try:
        router.wait_ready()
        yield router
        assert router.stop() == 0
    finally:
        router.close()


def count(router: ServerProcess, way: str) -> int:
    """Return a number of the router's metrics."""
    line = next(line for line in router.get("/metrics").text.splitlines() if f'"{way}"' in line)
    return int(line.rpartition(" ")[2])


@pytest.fixture(scope="module")
def closed() -> Iterator[str]:
    """A URL at which nothing listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{held.getsockname()[1]}"


def test_request_goes_to_both_in_the_form_of_vllm(closed: str) -> None:
    body = {"prompt": PROMPT, "max_tokens": 50, "min_tokens": 2, "stream": True, "n": 1, "seed": 3,
            "stream_options": {"include_usage": True}}  # fmt: skip
    with stubs(says({"kv_transfer_params": PARAMS}), says({"choices": []})) as (prefill, decode), routing(
        [prefill.url], [closed, decode.url], least_bytes=50
    ) as router:
        headers = {"Authorization": "Bearer key"}
        answer = httpx.post(router.url + "/v1/completions", json=body, headers=headers, timeout=ANSWER_LIMIT_S)
        assert answer.json() == {"choices": []}
        assert prefill.asked == [("/v1/completions", {
            "prompt": PROMPT, "max_tokens": 1, "stream": False, "n": 1, "seed": 3,
            "kv_transfer_params": {
                "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None,
                "remote_block_ids": None, "remote_host": None, "remote_port": None,
            },
        }, "Bearer key")]  # fmt: skip
        assert decode.asked == [("/v1/completions", body | {"kv_transfer_params": PARAMS}, "Bearer key")]
        router.post("/v1/chat/completions", {"messages": [], "max_completion_tokens": 9, "user": PROMPT})
        assert prefill.asked[1][1].keys() == {"messages", "max_tokens", "stream", "user", "kv_transfer_params"}
        router.post("/v1/completions", {"prompt": "short"})
        router.post("/v1/embeddings", {"input": PROMPT})
        assert [len(prefill.asked), [path for path, _, _ in decode.asked][2:]] == [
            2, ["/v1/completions", "/v1/embeddings"]
        ]
        assert (count(router, "apart"), count(router, "short")) == (2, 1)
        assert router.get("/v1/models").json() == {"path": "/v1/models"}
        assert router.get("/health").status_code == router.get("/ready").status_code == 200


def test_what_is_no_request_is_the_decode_servers_to_refuse() -> None:
    """As it came, and in that server's words."""
    refusal = {"error": {"message": "1 validation error", "type": "Bad Request", "param": None, "code": 400}}
    with stubs(says({"kv_transfer_params": PARAMS}), says(refusal, 400)) as (prefill, decode), routing(
        [prefill.url], [decode.url]
    ) as router:
        for wrong in (b"3", b'{"prompt": ', b'{"prompt": "\xff"}'):
            answer = httpx.post(router.url + "/v1/completions", content=wrong, timeout=ANSWER_LIMIT_S)
            assert (answer.status_code, answer.json()) == (400, refusal)
            assert decode.asked.pop()[1] in (wrong, 3)
        assert prefill.asked == []
        assert count(router, "refused") == 3


@pytest.mark.parametrize(
    "answer", [b"[" * 100_000, b'{"kv_transfer_params": "\xff"}', b"{]"], ids=["deep", "no UTF-8", "no JSON"]
)
def test_answer_of_a_prefill_server_that_cannot_be_read_is_none(answer: bytes) -> None:
    with stubs(says(answer), says({"id": "whole"})) as (prefill, decode), routing(
        [prefill.url], [decode.url]
    ) as router:
        found = router.post("/v1/completions", {"prompt": PROMPT})
        assert (found.status_code, found.json()) == (200, {"id": "whole"})
        assert count(router, "refused") == len(prefill.asked) == 1


def test_several_prompts_never_go_with_the_ticket_of_one() -> None:
    """A vLLM server answers several prompts with the blocks of the first."""
    with stubs(says({"kv_transfer_params": PARAMS}), says({})) as (prefill, decode), routing(
        [prefill.url], [decode.url]
    ) as router:
        several: list[Json] = [{"prompt": ["a", "b"]}, {"prompt": [[1], [2]]}, {"prompt": "a", "prompt_embeds": "b"}]
        one: list[Json] = [{"prompt": ["a"]}, {"prompt": [[1, 2]]}, {"prompt": [1, 2]}, {"prompt": [], "n": None}]
        for body in several + one:
            router.post("/v1/completions", body)
        with_ticket = [body | {"kv_transfer_params": PARAMS} for body in one]
        assert [body for _, body, _ in decode.asked] == several + with_ticket
        assert len(prefill.asked) == len(one)


def test_ticket_that_names_blocks_is_read_once() -> None:
    """The first read frees the blocks of a vLLM server, and each of `n` sequences reads them."""
    answers = says({"kv_transfer_params": PARAMS}), says({"kv_transfer_params": TICKET}), says({})
    with stubs(*answers) as (vllm, quire, decode):
        body = {"prompt": "a", "n": 2}
        with routing([vllm.url], [decode.url]) as router:
            for _ in range(2):
                router.post("/v1/completions", body)
            assert [sent for _, sent, _ in decode.asked] == [body, body]
            assert len(vllm.asked) == 1     # the router has seen what its tickets are
        with routing([quire.url], [decode.url]) as router:
            router.post("/v1/completions", body)
            assert decode.asked[2][1] == body | {"kv_transfer_params": TICKET}


def test_answer_does_not_fail_for_want_of_a_prefill_server(closed: str) -> None:
    failing = [says({}, 503), ends, says({"error": {}}, 400), says({"kv_transfer_params": None})]
    with stubs(*failing, says({"ok": 1})) as (down, gone, refusing, silent, decode):
        for prefill, way in (
            ([closed], "not_reached"), ([down.url, gone.url], "not_reached"), ([refusing.url], "refused"),
            ([silent.url], "refused"),
        ):  # fmt: skip
            decode.asked.clear()
            with routing(prefill, [decode.url]) as router:
                assert router.post("/v1/completions", {"prompt": "a"}).json() == {"ok": 1}
                assert count(router, way) == 1
                assert decode.asked[0][1] == {"prompt": "a"}
        assert [len(each.asked) for each in (down, gone, refusing, silent)] == [1] * 4


def test_decode_server_that_takes_no_connection_is_passed_over() -> None:
    """A machine that drops packets, or a queue of connections that is full, is no refusal: the attempt is late."""
    with ExitStack() as held:
        listener = held.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        is_full = False
        while not is_full:
            waiting = held.enter_context(socket.socket())
            waiting.settimeout(0.2)
            try:
                waiting.connect(listener.getsockname())
            except TimeoutError:
                is_full = True
        (decode,) = held.enter_context(stubs(says({"ok": 1})))
        full = f"http://127.0.0.1:{listener.getsockname()[1]}"
        router = held.enter_context(routing([full], [full, decode.url]))
        assert router.post("/v1/completions", {"prompt": "a"}).json() == {"ok": 1}
        assert count(router, "not_reached") == 1


def test_servers_that_give_no_sign_are_given_up_before_they_answer() -> None:
    """A listener that never accepts is what a stopped process looks like. It may have read the blocks of a ticket."""
    with ExitStack() as held:
        stopped = [held.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        silent = [f"http://127.0.0.1:{each.getsockname()[1]}" for each in stopped]
        answers = says({"kv_transfer_params": TICKET}), says({"kv_transfer_params": PARAMS}), says({"ok": 1}), says({})
        prefill, vllm, decode, other = held.enter_context(stubs(*answers))
        router = held.enter_context(routing([silent[0], prefill.url], [silent[1], decode.url]))
        before_vllm = held.enter_context(routing([vllm.url], [silent[1], other.url]))
        cut_off = held.enter_context(routing([silent[0]], [silent[1]]))
        waits = held.enter_context(ThreadPoolExecutor())    # a server is given up after seconds: all at the same time
        refused = waits.submit(cut_off.post, "/v1/completions", {"prompt": "a"})
        computed = waits.submit(before_vllm.post, "/v1/completions", {"prompt": "a"})
        assert router.post("/v1/completions", {"prompt": "a"}).json() == {"ok": 1}
        computed.result()
        assert decode.asked[0][1]["kv_transfer_params"] == TICKET
        assert other.asked[0][1] == {"prompt": "a"}
        assert count(router, "apart") == 1
        answer = refused.result()
        assert (answer.status_code, answer.json()["error"]["code"]) == (502, "decode_unreached")
        assert "it gives no sign" in answer.json()["error"]["message"]
        assert count(cut_off, "not_reached") == 1


def test_slow_answers_of_a_healthy_server_are_waited_for_and_it_is_asked_once_a_second_for_all() -> None:
    may_answer = threading.Event()

    def answers_late(handler: BaseHTTPRequestHandler, body: Json) -> None:
        assert may_answer.wait(60)
        says({"ok": 2})(handler, body)

    with stubs(says({}, 400), answers_late) as (prefill, decode), routing(
        [prefill.url], [decode.url]
    ) as router, ThreadPoolExecutor(NUM_WAITING) as threads:
        began_s = time.monotonic()
        waiting = [threads.submit(router.post, "/v1/completions", {"prompt": "a"}) for _ in range(NUM_WAITING)]
        wait_until(lambda: decode.num_probes > MAX_MISSES)
        num_probes = decode.num_probes
        assert num_probes <= 1 + (time.monotonic() - began_s) / PROBE_PAUSE_S
        may_answer.set()
        assert [each.result().json() for each in waiting] == [{"ok": 2}] * NUM_WAITING


def test_decode_servers_that_end_are_a_clear_error(closed: str) -> None:
    with stubs(ends, breaks_off, says({"kv_transfer_params": PARAMS})) as (gone, broken, prefill):
        with routing([prefill.url], [closed]) as router:
            answer = router.post("/v1/completions", {"prompt": "a"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "decode_unreached")
            assert router.get("/ready").status_code == 503
        with routing([prefill.url], [gone.url]) as router:
            assert router.post("/v1/completions", {"prompt": "a"}).status_code == 502
        with routing([prefill.url], [broken.url]) as router:
            answer = router.post("/v1/completions", {"prompt": "a", "stream": True})
            assert answer.text.startswith("data: ")
            assert '"code":"decode_unreached"' in answer.text


def test_client_that_goes_ends_its_request() -> None:
    has_begun, has_gone = threading.Event(), threading.Event()

    def hold(handler: BaseHTTPRequestHandler, _: Json) -> None:
        has_begun.set()
        handler.connection.settimeout(60)
        assert handler.connection.recv(1) == b""
        has_gone.set()

    with stubs(hold, says({})) as (prefill, decode), routing([prefill.url], [decode.url]) as router:
        with socket.create_connection(("127.0.0.1", router.port)) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b'Content-Length: 15\r\n\r\n{"prompt": "a"}')
            wait_until(has_begun.is_set)
        wait_until(has_gone.is_set)
        assert decode.asked == []


@pytest.mark.parametrize("urls", [[], ["ftp://a"], ["10.0.0.1:80"], ["http://"], ["http://u:p@a"], ["http://a"] * 65])
def test_wrong_urls_are_an_error(urls: list[str]) -> None:
    with pytest.raises(ConfigError, match="decode must be"):
        check_urls("decode", urls)
