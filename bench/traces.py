"""CPU time that a traced request costs outside of steps, beside vLLM's tracing with its SDK.

    python bench/traces.py [--vllm PYTHON]

The calls are those of a completion of 64 tokens, with and without a traceparent: on the event loop (one `end` and its
collection), and in the thread of traces (its spans, encoded). Sending a batch is the same for both and not measured.
`--vllm`: a Python that has vLLM; it makes the one span of `do_tracing` with its 12 attributes, ends and encodes it.
"""

import argparse
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import opentelemetry.sdk.trace  # noqa: F401 (imports are no part of the figures)

from quire.core.outputs import RequestMetrics
from quire.server import traces
from quire.server.http.application import RequestRecord
from quire.server.traces import CallTrace

CALLS, ROUNDS = 512, 9
TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
HEADERS = [(b"host", b"x"), (b"content-type", b"application/json"), (b"content-length", b"90")]

VLLM = """
import time
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SpanProcessor
from opentelemetry.trace import SpanKind, set_tracer_provider
from vllm.tracing.otel import extract_trace_context, manual_instrument_otel
from vllm.tracing.utils import SpanAttributes as A
ended = []
class Kept(SpanProcessor):
    def on_end(self, span):
        ended.append(span)
provider = TracerProvider(shutdown_on_exit=False)
provider.add_span_processor(Kept())
set_tracer_provider(provider)
headers = HEADERS_OF_CALL
def one():
    context = extract_trace_context(headers)
    now = time.time_ns()
    manual_instrument_otel("llm_request", start_time=now - 10**8, end_time=now, attributes={
        A.GEN_AI_LATENCY_TIME_TO_FIRST_TOKEN: 0.1, A.GEN_AI_LATENCY_E2E: 0.4, A.GEN_AI_LATENCY_TIME_IN_QUEUE: 0.01,
        A.GEN_AI_USAGE_PROMPT_TOKENS: 100, A.GEN_AI_USAGE_COMPLETION_TOKENS: 64,
        A.GEN_AI_LATENCY_TIME_IN_MODEL_PREFILL: 0.1, A.GEN_AI_LATENCY_TIME_IN_MODEL_DECODE: 0.3,
        A.GEN_AI_LATENCY_TIME_IN_MODEL_INFERENCE: 0.4, A.GEN_AI_REQUEST_ID: "cmpl-1", A.GEN_AI_REQUEST_TOP_P: 1.0,
        A.GEN_AI_REQUEST_MAX_TOKENS: 64, A.GEN_AI_REQUEST_TEMPERATURE: 0.7, A.GEN_AI_REQUEST_N: 1,
    }, context=context, kind=SpanKind.SERVER)
loop, thread = [], []
for _ in range(ROUNDS):
    ended.clear()
    begin = time.process_time()
    for _ in range(CALLS):
        one()
    middle = time.process_time()
    encode_spans(ended).SerializeToString()
    loop.append(middle - begin)
    thread.append(time.process_time() - middle)
print(f"{sorted(loop)[ROUNDS // 2] / CALLS * 1e6:.1f} {sorted(thread)[ROUNDS // 2] / CALLS * 1e6:.1f}")
"""


def call_of(number: int) -> Any:  # noqa: ANN401 (what `queued` reads of a call)
    """Return a call with queued requests."""
    params = SimpleNamespace(max_tokens=64, temperature=0.7, top_p=1.0, n=1)
    prompt = SimpleNamespace(prompt=SimpleNamespace(token_ids=range(100)))
    return SimpleNamespace(
        model="quire-demo", checked_s=number + 0.001, grammar_s=None, rendered_s=number + 0.002,
        tokenized_s=number + 0.003, checked=SimpleNamespace(params=params), requests=[prompt],
    )  # fmt: skip


def measure(headers: list[tuple[bytes, bytes]]) -> tuple[float, float, int]:
    """Return the microseconds of a call on the event loop and in the thread, and the spans of a call."""
    sampling, waiting = traces._Sampling(), traces.Traces.__new__(traces.Traces)
    waiting._max_waiting = CALLS
    waiting._calls, waiting._has_calls = traces.deque(), traces.threading.Event()
    waiting._sampling = sampling
    on_loop, in_thread = [], []
    for _ in range(ROUNDS):
        records = [
            RequestRecord(f"cmpl-{number}", None, "quire-demo", True, 1, 100, 64, 64, ["stop"], 0.01, 0.1, 0)
            for number in range(CALLS)
        ]
        calls = [call_of(number) for number in range(CALLS)]
        metrics = [
            RequestMetrics(number, number + 0.01, number + 0.1, number + 0.4, 0, 64, {"seats": 2})
            for number in range(CALLS)
        ]
        begin_s = time.process_time()
        for number, record in enumerate(records):
            record.trace = CallTrace.begin("/v1/completions", headers, float(number))
            record.trace.queued(calls[number], (metrics[number],))
            waiting.end(record, 200, number + 0.41)
        middle_s = time.process_time()
        spans = waiting._encoded(waiting._calls)
        sampling.request(spans)
        in_thread.append(time.process_time() - middle_s)
        on_loop.append(middle_s - begin_s)
        waiting._calls.clear()
    return median_us(on_loop), median_us(in_thread), len(spans) // CALLS


def median_us(rounds: list[float]) -> float:
    """Return the microseconds of a call in the middle round."""
    return sorted(rounds)[ROUNDS // 2] / CALLS * 1e6


def main() -> None:
    """Print both, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--vllm", help="a Python that has vLLM")
    given = parser.parse_args()
    with_caller = [*HEADERS, (b"traceparent", TRACEPARENT.encode())]
    for name, headers in (("no traceparent", HEADERS), ("traceparent", with_caller)):
        loop_us, thread_us, num_spans = measure(headers)
        print(f"{name}: Quire {loop_us:.1f} us on the event loop, {thread_us:.1f} us in the thread; {num_spans} spans")
        if given.vllm:
            sent = {"traceparent": TRACEPARENT} if name == "traceparent" else {}
            script = f"CALLS, ROUNDS = {CALLS}, {ROUNDS}\n" + VLLM.replace("HEADERS_OF_CALL", repr(sent))
            run = subprocess.run([given.vllm, "-c", script], check=True, capture_output=True, text=True)
            found = run.stdout.split()
            print(f"{name}: vLLM  {found[-2]} us on the event loop, {found[-1]} us in the thread; 1 span")


if __name__ == "__main__":
    sys.exit(main())
