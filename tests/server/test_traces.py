"""Spans of calls, as a collector decodes them. An endpoint that is gone or slow costs spans, and nothing else."""

import gzip
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from quire.core.errors import ConfigError, NotInstalledError
from quire.core.outputs import Preemption, RequestMetrics
from quire.engine.options import EngineOptions
from quire.server import traces
from quire.server.http.application import RequestRecord
from quire.server.options import ServerOptions
from quire.server.traces import CallTrace, TraceContext, Traces
from support.http_app import ask, make_app
from support.openai_server import OpenAIServer, openai_server
from support.records import unpacked, whole_record
from support.server import ENTRY, running_server, wait_until

GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 4, "ignore_eos": True}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-0"
MILLISECOND_NS = 1_000_000
KEY, SALT, TEXT = "a-key-to-keep", "a-salt-to-keep", "a prompt to keep"


class Collector:
    """Decodes what is posted to it. `gate`: closed, it takes requests and answers none."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        self.headers: list[dict[str, str]] = []
        self.gate = threading.Event()
        self.gate.set()
        self.url = ""

    @contextmanager
    def listening(self, port: int = 0) -> Iterator["Collector"]:
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.headers.append({name.lower(): value for name, value in self.headers.items()})
                collector.bodies.append(gzip.decompress(body) if self.headers["Content-Encoding"] == "gzip" else body)
                collector.gate.wait(30)
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *args: object) -> None:
                pass

        with ThreadingHTTPServer(("127.0.0.1", port), Handler) as server:
            self.url = f"http://127.0.0.1:{server.server_port}"
            thread = threading.Thread(target=server.serve_forever, args=(0.01,))
            thread.start()
            try:
                yield self
            finally:
                self.gate.set()
                server.shutdown()
                thread.join()

    def requests(self) -> list[ExportTraceServiceRequest]:
        return [ExportTraceServiceRequest.FromString(body) for body in self.bodies]

    def spans(self) -> list[Span]:
        return [span for each in self.requests() for found in each.resource_spans
                for scope in found.scope_spans for span in scope.spans]  # fmt: skip

    def call(self, request_id: str) -> tuple[Span, list[Span]]:
        """Wait for the spans of a call; return its own, and all others of its trace."""
        def roots() -> list[Span]:
            return [span for span in self.spans() if attributes_of(span).get("gen_ai.response.id") == request_id]

        wait_until(lambda: bool(roots()))
        (root,) = roots()
        return root, [span for span in self.spans() if span.trace_id == root.trace_id and span is not root
                      and span.span_id != root.span_id]  # fmt: skip


def attributes_of(span: Span | Span.Event) -> dict[str, Any]:
    found = {}
    for each in span.attributes:
        kind = each.value.WhichOneof("value")
        value = getattr(each.value, kind)
        found[each.key] = [one.string_value for one in value.values] if kind == "array_value" else value
    return found


def check_tree(root: Span, others: list[Span]) -> None:
    """Check that every span has a parent, lies within it, and that the stages follow one another without gaps."""
    by_id = {span.span_id: span for span in (root, *others)}
    assert len(by_id) == len(others) + 1
    for span in others:
        parent = by_id[span.parent_span_id]
        assert parent.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= parent.end_time_unix_nano
    for owner in by_id.values():
        stages = [span for span in others if span.parent_span_id == owner.span_id and span.name != "preempted"]
        if stages and not any(span.name == "prompt" for span in stages):
            total = sum(span.end_time_unix_nano - span.start_time_unix_nano for span in stages)
            assert abs(total - (owner.end_time_unix_nano - owner.start_time_unix_nano)) <= MILLISECOND_NS
            for before, after in pairwise(stages):
                assert before.end_time_unix_nano == after.start_time_unix_nano


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector().listening() as collector:
        yield collector


@pytest.fixture(scope="module")
def server(demo_model: Path, collector: Collector) -> Iterator[OpenAIServer]:
    """Serve with so few blocks that two long answers do not fit."""
    engine = EngineOptions(
        model=str(demo_model), max_num_seqs=4, max_model_len=512, num_kv_blocks=40, num_swap_blocks=40,
        preemption_mode="swap", max_num_batched_tokens=128,
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(traces, "GATHERING_S", 0.01)
        with openai_server(engine, api_key=(KEY,), otlp_traces_endpoint=collector.url) as server:
            server.http.headers["Authorization"] = f"Bearer {KEY}"
            yield server


def names(spans: list[Span]) -> list[str]:
    return [span.name for span in spans]


def test_call_has_a_span_of_each_stage_and_attributes_in_both_vocabularies(
    server: OpenAIServer, collector: Collector
) -> None:
    body = {"messages": [{"role": "user", "content": TEXT}], "cache_salt": SALT}
    grammar = {"regex": "[a-z]{3}"}
    answer = server.ask(CHATS, **body, structured_outputs=grammar, temperature=0.5, top_p=0.9, max_tokens=8)
    root, stages = collector.call(answer["id"])
    check_tree(root, stages)
    assert names(stages) == [
        "body", "grammar", "template", "tokenize", "queue", "prefill", "decode", "detokenize_and_send"
    ]
    assert (root.name, root.kind, root.parent_span_id) == ("llm_request", Span.SPAN_KIND_SERVER, b"")
    found, usage = attributes_of(root), answer["usage"]
    assert found["gen_ai.usage.prompt_tokens"] == found["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert found["gen_ai.usage.completion_tokens"] == found["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert found["gen_ai.request.model"] == found["gen_ai.response.model"] == answer["model"]
    expected = {
        "gen_ai.request.id": answer["id"], "gen_ai.request.max_tokens": 8, "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9, "gen_ai.request.n": 1, "gen_ai.operation.name": "chat",
        "gen_ai.response.finish_reasons": [answer["choices"][0]["finish_reason"]],
        "http.request.method": "POST", "http.response.status_code": 200, "url.path": CHATS,
    }  # fmt: skip
    assert {name: found[name] for name in expected} == expected
    e2e_s = found["gen_ai.latency.e2e"]
    assert e2e_s == pytest.approx((root.end_time_unix_nano - root.start_time_unix_nano) / 1e9, abs=1e-6)
    assert 0 <= found["gen_ai.latency.time_in_queue"] <= found["gen_ai.latency.time_to_first_token"] <= e2e_s
    inference_s = found["gen_ai.latency.time_in_model_prefill"] + found["gen_ai.latency.time_in_model_decode"]
    assert found["gen_ai.latency.time_in_model_inference"] == pytest.approx(inference_s)
    (received,) = stages[0].events
    assert stages[0].start_time_unix_nano <= received.time_unix_nano <= stages[0].end_time_unix_nano
    for secret in (KEY, SALT, TEXT, "[a-z]{3}", answer["choices"][0]["message"]["content"]):
        assert not any(secret.encode() in sent for sent in collector.bodies)


def test_stream_and_prompts_of_one_call(server: OpenAIServer, collector: Collector) -> None:
    (first, *_) = server.stream(COMPLETIONS, prompt=TEXT, **GREEDY)
    root, stages = collector.call(first["id"])
    check_tree(root, stages)
    assert names(stages) == ["body", "tokenize", "queue", "prefill", "decode", "detokenize_and_send"]
    answer = server.ask(COMPLETIONS, prompt=[[5, 6, 7], [8] * 40], **GREEDY)
    root, stages = collector.call(answer["id"])
    check_tree(root, stages)
    assert names(stages).count("prompt") == names(stages).count("decode") == 2
    lengths = [attributes_of(span)["quire.prompt.tokens"] for span in stages if span.name == "prefill"]
    assert lengths == [3, 40]


def test_preempted_span_lies_in_the_stage_that_it_interrupts(server: OpenAIServer, collector: Collector) -> None:
    with ThreadPoolExecutor(3) as clients:
        with server.held():
            asking = [
                clients.submit(server.ask, COMPLETIONS, prompt=[500 + i] * 40, **GREEDY | {"max_tokens": 330})
                for i in range(3)
            ]
            server.wait_until(lambda: len(server.service.client._streams) == 3)
        calls = [collector.call(each.result()["id"]) for each in asking]
    preempted = [(span, stages) for _, stages in calls for span in stages if span.name == "preempted"]
    assert preempted
    for root, stages in calls:
        check_tree(root, stages)
    for span, stages in preempted:
        assert {each.span_id: each.name for each in stages}[span.parent_span_id] in {"prefill", "decode"}
        assert attributes_of(span)["quire.preemption.mode"] == "swap"
        assert ("wait", "swapped_first") in [
            (event.name, attributes_of(event).get("quire.wait.reason")) for event in span.events
        ]


def test_prompt_in_several_steps_has_an_event_at_the_end_of_each(
    server: OpenAIServer, collector: Collector
) -> None:
    prompt = [*range(300, 600)]
    root, stages = collector.call(server.ask(COMPLETIONS, prompt=prompt, **GREEDY)["id"])
    check_tree(root, stages)
    (prefill,) = (span for span in stages if span.name == "prefill")
    chunks = [attributes_of(event) for event in prefill.events if event.name == "chunk"]
    assert [each["quire.chunk.computed_tokens"] for each in chunks] == [128, 256]
    assert [each["quire.chunk.tokens"] for each in chunks] == [128, 128]
    times = [event.time_unix_nano for event in prefill.events]
    assert prefill.start_time_unix_nano < times[0] < times[1] < prefill.end_time_unix_nano
    again = collector.call(server.ask(COMPLETIONS, prompt=[*prompt[:160], *range(1, 161)], **GREEDY)["id"])
    events = [event for span in again[1] if span.name == "prefill" for event in span.events]
    assert [attributes_of(event)["quire.chunk.tokens"] for event in events] == [128], "behind 160 tokens of the cache"
    short = collector.call(server.ask(COMPLETIONS, prompt=[1, 2, 3], **GREEDY)["id"])
    assert not [event for span in short[1] if span.name == "prefill" for event in span.events]


def test_callers_trace_goes_on_and_its_choice_holds(server: OpenAIServer, collector: Collector) -> None:
    def asked(flags: int, state: str = "") -> str:
        headers = {"traceparent": f"{PARENT}{flags}", "tracestate": state}
        return str(server.http.post(COMPLETIONS, json={"prompt": [7], **GREEDY}, headers=headers).json()["id"])

    unsampled, sampled = asked(0), asked(1, "vendor=value")
    root, stages = collector.call(sampled)
    assert (root.trace_id.hex(), root.parent_span_id.hex()) == tuple(PARENT.split("-")[1:3])
    assert {span.trace_state for span in (root, *stages)} == {"vendor=value"}
    assert not any(attributes_of(span).get("gen_ai.response.id") == unsampled for span in collector.spans())


def test_refused_call_has_a_span_alone(server: OpenAIServer, collector: Collector) -> None:
    response = server.http.post(COMPLETIONS, json={"prompt": [7], "max_tokens": -1})
    root, stages = collector.call(response.headers["X-Request-Id"])
    assert stages == []
    assert attributes_of(root)["http.response.status_code"] == 400
    assert root.status.code == 0, "the client's fault"


def test_other_routes_are_not_traced(server: OpenAIServer, collector: Collector) -> None:
    server.http.get("/v1/models")
    server.ask("/tokenize", prompt=TEXT)
    collector.call(server.ask(COMPLETIONS, prompt=[7], **GREEDY)["id"])
    assert {attributes_of(span).get("url.path") for span in collector.spans() if span.name == "llm_request"} <= {
        COMPLETIONS, CHATS
    }


# --- without an engine ----------------------------------------------------------------------------------------------


def ended_call(metrics: RequestMetrics | None = None) -> CallTrace:
    """Return the trace of a call that took from second 10 to 20, and asked for an answer unless `metrics` is None."""
    call = CallTrace.begin(COMPLETIONS, [], 10.0)
    if metrics is not None:
        call.checked_s, call.tokenized_s, call.prompts = 11.0, 12.0, [(metrics, 100)]
    return call


def end(waiting: Traces, call: CallTrace, status: int | None = 200) -> None:
    waiting.end(RequestRecord(request_id="cmpl-1", trace=call), status, 20.0)


@pytest.fixture
def dropped() -> list[int]:
    return []


@pytest.fixture(autouse=True)
def _ends_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the end of traces wait for a thread that the machine has stopped for a while."""
    monkeypatch.setattr(traces, "FLUSH_LIMIT_S", 120.0)


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "GATHERING_S", 0.0)
    monkeypatch.setattr(traces, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(traces, "LONGEST_PAUSE_S", 0.001)


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (RequestMetrics(12.0, finished_s=15.0), {"queue": (12, 15)}),
        (RequestMetrics(12.0, 13.0, finished_s=15.0), {"queue": (12, 13), "prefill": (13, 15)}),
        (RequestMetrics(12.0, 13.0, 14.0), {"queue": (12, 13), "prefill": (13, 14), "decode": (14, 20)}),
        (RequestMetrics(12.0, 13.0, 14.0, 30.0), {"prefill": (13, 14), "decode": (14, 20)}),
        (
            RequestMetrics(12.0, 13.0, 14.0, 19.0, preemptions=[Preemption(15.0), Preemption(16.0, 17.0, 18.0)]),
            {"decode": (14, 19), "detokenize_and_send": (19, 20)},
        ),
    ],
    ids=["queued", "aborted in its prompt", "not finished", "finished late", "preempted"],
)
def test_call_that_ends_early_has_the_stages_that_it_reached(
    metrics: RequestMetrics, expected: dict[str, tuple[float, float]]
) -> None:
    call = ended_call(metrics)
    call.record, call.ended_s = RequestRecord(), 20.0
    encoded = traces._CallSpans(TraceContext(bytes(16)), 0)
    call.add_to(encoded)
    *spans, root = ScopeSpans.FromString(b"".join(encoded.fields)).spans
    stages = [span for span in spans if span.parent_span_id == root.span_id]
    found = {span.name: (span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9) for span in stages}
    assert found | expected == found
    assert sum(end - begin for begin, end in found.values()) == pytest.approx(10)
    num_spans = 1 + len(spans)
    assert num_spans <= call.num_spans <= num_spans + 1, "the last stage may be empty"


def test_endpoint_that_is_gone_costs_spans_and_one_line(
    hurried: None, dropped: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    held = socket.socket()      # no other process gets the port
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    port = held.getsockname()[1]
    url = f"http://127.0.0.1:{port}/v1/traces"
    waiting = Traces(url, dropped.append)
    for number in range(3):
        end(waiting, ended_call(RequestMetrics(12.0, 13.0, 14.0, 19.0)))
        wait_until(lambda count=number + 1: len(dropped) == count)  # type: ignore[misc]
    assert dropped == [7] * 3
    (warning,) = [record for record in caplog.records if record.name == traces.__name__]
    reason = "[Errno 111] Connection refused"
    assert warning.getMessage() == f"traces cannot be sent to {url}: {reason}; spans are dropped until they can"
    with held, Collector().listening(port) as back:
        end(waiting, ended_call())
        wait_until(lambda: bool(back.bodies))
        waiting.close()
    assert len(dropped) == 3
    assert [record.levelno for record in caplog.records if record.name == traces.__name__] == [logging.WARNING] * 2


def test_slow_endpoint_costs_no_call_more_than_its_spans(hurried: None, dropped: list[int]) -> None:
    with Collector().listening() as slow:
        slow.gate.clear()
        waiting = Traces(f"{slow.url}/v1/traces", dropped.append, max_waiting=5)
        end(waiting, ended_call())
        wait_until(lambda: bool(slow.bodies))
        for _ in range(25):
            end(waiting, ended_call(RequestMetrics(12.0, 13.0, 14.0, 19.0)))  # would hang
        assert dropped == [7] * 20
        slow.gate.set()
        waiting.close()
        assert len(slow.spans()) == 1 + 5 * 7


def test_calls_that_wait_are_sent_at_the_end(dropped: list[int]) -> None:
    with Collector().listening() as collector:
        waiting = Traces(f"{collector.url}/v1/traces", dropped.append)
        end(waiting, ended_call(), status=503)
        end(waiting, ended_call(), status=None)
        waiting.close()
        failed, gone = collector.spans()
    assert (failed.status.code, attributes_of(failed)["error.type"]) == (2, "503")
    assert (gone.status.code, attributes_of(gone)["error.type"]) == (0, "client_disconnected")
    assert "http.response.status_code" not in attributes_of(gone)


def test_variables_of_opentelemetry_hold(dropped: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "OTEL_SERVICE_NAME": "mine", "OTEL_RESOURCE_ATTRIBUTES": "zone=a", "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20all", "OTEL_TRACES_SAMPLER": "parentbased_always_off",
        "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20own",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with Collector().listening() as collector:
        waiting = Traces(f"{collector.url}/v1/traces", dropped.append)
        end(waiting, ended_call())
        end(waiting, CallTrace.begin(COMPLETIONS, [(b"traceparent", f"{PARENT}1".encode())], 10.0))
        waiting.close()
        (span,), ((resource,),) = collector.spans(), [each.resource_spans for each in collector.requests()]
    assert span.trace_id.hex() in PARENT, "the sampler leaves out calls without a caller"
    named = attributes_of(resource.resource)
    assert (named["service.name"], named["zone"], named["telemetry.sdk.name"]) == ("mine", "a", "opentelemetry")
    assert resource.scope_spans[0].scope.name == "quire"
    assert collector.headers[0]["authorization"] == "Bearer own"
    assert collector.headers[0]["content-type"] == "application/x-protobuf"


def test_page_counts_dropped_spans() -> None:
    app = make_app()
    app.state.service.metrics.spans_dropped(7)
    assert 'quire:trace_spans_dropped_total{engine="0"} 7.0' in ask(app, "GET", "/metrics").text


# --- beside all else that operators look at ---------------------------------------------------------------------------


def test_no_prompt_no_answer_no_key_and_no_salt_is_in_anything_for_operators(
    demo_model: Path, tmp_path: Path, collector: Collector
) -> None:
    """Spans, a record, a profile, logs, metrics, the terminal's view and debug routes, of one run that fails, too."""
    operator, text = {"Authorization": "Bearer an-operator-to-keep"}, f"{TEXT}, with words enough to be found, and more"
    folders = {name: tmp_path / name for name in ("records", "profiles", "logs")}
    folders["logs"].mkdir()
    flags = {
        "num-kv-blocks": 64, "max-model-len": 200, "api-key": KEY, "operator-api-key": "an-operator-to-keep",
        "record": folders["records"], "profile-dir": folders["profiles"], "log-file": folders["logs"] / "log",
        "log-level": "debug", "otlp-traces-endpoint": collector.url,
    }  # fmt: skip
    given = (f"--{name}={value}" for name, value in flags.items())
    found, body = dict[str, bytes](), GREEDY | {"cache_salt": SALT, "max_tokens": 24}
    stopped = body | {"prompt": text, "stop": ["a stop to keep"], "logprobs": 1}
    messages = [{"role": "system", "content": text}, {"role": "user", "content": TEXT}]
    with running_server(str(demo_model), "--enable-debug", *given, is_new=True) as server:
        with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}, timeout=120) as http:
            assert http.post("/start_profile", headers=operator).status_code == 200
            ended = http.post(COMPLETIONS, json=stopped).json()
            streamed = http.post(CHATS, json=body | {"messages": messages, "stream": True}).text
            assert streamed.endswith("data: [DONE]\n\n")
            regex = {"structured_outputs": {"regex": "(to-keep)+"}, "prompt": text}
            assert http.post(COMPLETIONS, json=body | regex).status_code == 200
            assert http.post(COMPLETIONS, json=body | {"prompt": text * 99}).status_code == 400
            assert http.post(COMPLETIONS, content=text.encode()).status_code == 400
            assert http.get("/v1/models", headers={"Authorization": "Bearer another-to-keep"}).status_code == 401
            assert http.post("/stop_profile", headers=operator).status_code == 200
            explain = f"/v1/requests/{ended['id']}/explain"
            for route in ("/debug/top", "/debug/kv", "/debug/blocks", "/metrics", "/status", explain):
                answer = http.get(route, headers={} if route == explain else operator)
                assert answer.status_code == 200, answer.text
                found[route] = answer.content
            for form in ([], ["--json"]):
                top = ["top", "--url", server.url, "--once", "-i", "0.1", "--api-key", KEY, *form]
                seen = subprocess.run([sys.executable, "-c", ENTRY, *top], capture_output=True, check=True)
                found[f"top {*form,}"] = seen.stdout
        wait_until(lambda: any(ended["id"].encode() in each for each in collector.bodies))
        assert server.stop() == 0
        found["output"] = (server.out + server.log).encode()
    whole_record(folders["records"])
    found["spans"] = b"".join(collector.bodies)
    for path in (file for folder in folders.values() for file in folder.iterdir()):
        assert path.stat().st_mode & 0o777 == 0o600, path
        found[str(path)] = b"".join(unpacked(path)) if path.suffix == ".quirelog" else path.read_bytes()
    assert len(found) == 6 + 2 + 2 + 4, found.keys()     # answers, screens, output and spans, files
    assert all(found.values())
    for secret in ("to-keep", TEXT, "words enough", "a stop to keep", ended["choices"][0]["text"]):
        assert [name for name, content in found.items() if secret.encode() in content] == [], secret


# --- options --------------------------------------------------------------------------------------------------------


def test_endpoint_without_a_path_gets_that_of_traces() -> None:
    for given, url in {
        "http://localhost:4318": "http://localhost:4318/v1/traces", "https://[::1]/": "https://[::1]/v1/traces",
        "http://collector/own?a=b": "http://collector/own?a=b",
    }.items():  # fmt: skip
        assert ServerOptions(otlp_traces_endpoint=given).traces_url == url


@pytest.mark.parametrize(
    "given",
    ["", "localhost:4318", "grpc://localhost:4317", "http://", "http://:4318", "http://a:99999", "http://a b", "http://a\n",
     "http://[::1", "http://user:word@a", "file:///etc/passwd"],
)  # fmt: skip
def test_endpoint_that_is_no_url_of_otlp_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"^otlp_traces_endpoint must [^\n]*$"):
        _ = ServerOptions(otlp_traces_endpoint=given)


def test_missing_extra_is_told_before_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.version", None)
    told = r"^otlp_traces_endpoint needs the package opentelemetry: pip install 'quire\[otel\]'$"
    with pytest.raises(NotInstalledError, match=told):
        _ = ServerOptions(otlp_traces_endpoint="http://localhost:4318")
