"""Traces of API requests, as OpenTelemetry spans over OTLP/HTTP: a span of the call, and one of each of its stages.

Routes and the engine's client record times in any case; a traced call collects them (`CallTrace`). Spans are made after
the response, in a thread of the server's own, from numbers and names alone: no text, token, key or salt gets there. The
stages of a call follow one another without gaps, so their durations add up to the call's.

Spans are encoded here, field by field: through the SDK's objects the 8 spans of a call take 0.3 ms of the interpreter
that serves all streams, so 0.02 ms. The sampler and the attributes of the resource are the SDK's, with its variables of
the environment. A batch that the endpoint does not take is dropped and counted, and the next one waits for a moment.
"""

import gzip
import http.client
import logging
import os
import ssl
import struct
import threading
import time
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple, Self

from quire.core.outputs import Preemption, RequestMetrics
from quire.core.version import __version__

if TYPE_CHECKING:
    from quire.server.api.preparation import ApiRequest
    from quire.server.http.application import RequestRecord

log = logging.getLogger(__name__)

MAX_WAITING_CALLS = 4096        # ended calls without spans; some 2 KB each
MAX_PROMPTS = 64                # prompts of one call with spans of their own
CALLS_AT_ONCE = 512             # calls of a batch
GATHERING_S = 1.0               # from the first call of a batch until it is sent
FLUSH_LIMIT_S = 2.0
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # after a batch that could not be sent
_TIMEOUT_S = 10.0
_HEADERS = frozenset((b"traceparent", b"tracestate"))
_MAX_HEADER_BYTES = 512
_OPERATIONS = {"chatcmpl": "chat", "msg": "chat", "resp": "chat", "cmpl": "text_completion", "embd": "embeddings"}


# --- OTLP's protobuf ------------------------------------------------------------------------------------------------
# Fields of opentelemetry/proto/trace/v1/trace.proto and common.proto; the first byte is number << 3 | wire type.

_DOUBLE = struct.Struct("<d")
_PARENT = struct.Struct("<BBQ")
_SPAN = struct.Struct("<BBQBQBQ")       # id, begin, end
_EVENT = struct.Struct("<BQ")

Value = str | int | float | tuple[str, ...]
Attributes = Mapping[str, Value | None]


def _varint(number: int) -> bytes:
    if number < 0x80:
        return bytes((number,))
    encoded = bytearray()
    while number >= 0x80:
        encoded.append(number & 0x7F | 0x80)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


@lru_cache(1 << 10)
def _head(tag: int, size: int) -> bytes:
    """Return what is before the content of a field."""
    return bytes((tag,)) + _varint(size)


def _field(tag: int, content: bytes) -> bytes:
    return _head(tag, len(content)) + content


@cache
def _name(tag: int, name: str) -> bytes:
    """Return a field with one of the few names of spans, events and attributes."""
    return _field(tag, name.encode())


def _value(value: Value) -> bytes:
    """Return an AnyValue."""
    if isinstance(value, float):
        return b"\x21" + _DOUBLE.pack(value)
    if isinstance(value, int):
        return b"\x18" + _varint(value)
    if isinstance(value, str):
        return _field(0x0A, value.encode(errors="replace"))
    return _field(0x2A, b"".join([_field(0x0A, _value(each)) for each in value]))


def _attributes(tag: int, attributes: Attributes) -> bytes:
    """Return fields of KeyValue, without those that are None. Integers are not negative."""
    encoded = b""
    for name, value in attributes.items():
        if type(value) is float:
            encoded += _float_head(tag, name) + _DOUBLE.pack(value)
        elif value is not None:
            encoded += _attribute(tag, name, value)
    return encoded


@lru_cache(1 << 12, typed=True)     # most values are those of other calls, too
def _attribute(tag: int, name: str, value: Value) -> bytes:
    return _field(tag, _name(0x0A, name) + _field(0x12, _value(value)))


@lru_cache(1 << 12)
def _counts(names: tuple[str, ...], count: int | None) -> bytes:
    """Return the attributes of a span with the same number; none for None."""
    return b"".join([_attribute(0x4A, name, count) for name in names]) if count is not None else b""


@cache
def _float_head(tag: int, name: str) -> bytes:
    """Return the beginning of a KeyValue, up to the 8 bytes of its number."""
    return _attribute(tag, name, 0.0)[:-8]


@cache
def _ids_heads(size: int) -> tuple[bytes, bytes]:
    """Return the beginnings of both attributes with the id of a request, up to its `size` bytes."""
    first, second = (
        _field(0x4A, _name(0x0A, name) + bytes(size))[:-size] for name in ("gen_ai.request.id", "gen_ai.response.id")
    )
    return first, second


_PROMPT_TOKENS = "gen_ai.usage.prompt_tokens", "gen_ai.usage.input_tokens"
_CACHED_TOKENS = ("gen_ai.usage.cache_read.input_tokens",)
_OUTPUT_TOKENS = "gen_ai.usage.completion_tokens", "gen_ai.usage.output_tokens"
_PREEMPTIONS = ("quire.preemptions",)
_LATENCIES = [
    _float_head(0x4A, f"gen_ai.latency.{name}") for name in (
        "e2e", "time_in_queue", "time_to_first_token", "time_in_model_prefill", "time_in_model_decode",
        "time_in_model_inference",
    )
]  # fmt: skip
_ALL_LATENCIES = struct.Struct("<" + "".join(f"{len(head)}sd" for head in _LATENCIES))


# --- spans of a call ------------------------------------------------------------------------------------------------


class TraceContext(NamedTuple):
    """The trace of a call, and the span of its caller, if there is one."""

    trace_id: bytes
    parent_id: bytes = b""
    state: bytes = b""       # the field of its spans
    last_id: int = 0         # its spans have those that follow


@dataclass(slots=True, eq=False)
class CallTrace:
    """Record of a call until its spans are made. Times in seconds of the monotonic clock; None: not reached."""

    path: str
    started_s: float
    headers: dict[str, str]                   # traceparent and tracestate
    received_s: float | None = None           # when the whole body was there
    checked_s: float | None = None
    grammar_s: float | None = None
    rendered_s: float | None = None
    tokenized_s: float | None = None
    ended_s: float = 0.0
    status: int | None = None                 # None: the client disconnected before a response
    record: "RequestRecord | None" = None     # the log line's, once the call has ended
    parameters: "_Parameters | None" = None
    prompts: Sequence[tuple[RequestMetrics, int]] = ()  # engine requests, and the tokens of their prompts

    @classmethod
    def begin(cls, path: str, headers: Iterable[tuple[bytes, bytes]], started_s: float) -> Self:
        """Return the trace of a call with these headers."""
        kept = {name.decode(): value.decode("latin-1") for name, value in headers
                if name in _HEADERS and len(value) <= _MAX_HEADER_BYTES}  # fmt: skip
        return cls(path, started_s, kept)

    @property
    def num_spans(self) -> int:
        """Count the spans that the call would have."""
        found = 4 + (self.grammar_s is not None) + (self.rendered_s is not None)
        for metrics, _ in self.prompts[:MAX_PROMPTS]:
            found += 1 + (metrics.first_scheduled_s is not None) + (metrics.first_token_s is not None)
            found += len(metrics.preemptions) + (len(self.prompts) > 1)
        return found if self.prompts else 1

    def queued(self, call: "ApiRequest", metrics: Iterable[RequestMetrics]) -> None:
        """Copy the times and numbers of a call with queued requests, and the lengths of its prompts."""
        self.checked_s, self.grammar_s = call.checked_s, call.grammar_s
        self.rendered_s, self.tokenized_s = call.rendered_s, call.tokenized_s
        self.prompts = [
            (each, len(prepared.prompt.token_ids)) for each, prepared in zip(metrics, call.requests, strict=True)
        ]
        params = call.checked.params
        self.parameters = _Parameters(
            call.model, params.max_tokens, float(params.temperature), float(params.top_p), params.n
        )

    def add_to(self, spans: "_CallSpans") -> None:
        """Add the spans of the stages, and then that of the call."""
        span_id = spans.next_id()
        if self.prompts:
            self._add_stages(_Stages(spans, span_id, self.started_s, self.ended_s))
        head = spans.root + (_FAILED if self.has_failed else b"")
        spans.add(head, span_id, "llm_request", self.started_s, self.ended_s, self._attributes())

    def _add_stages(self, stages: "_Stages") -> None:
        """Add the stages in order; each begins when the one before it ends."""
        spans = stages.spans
        stages.add("body", self.checked_s, b"" if self.received_s is None else spans.event("received", self.received_s))
        if self.grammar_s is not None:
            stages.add("grammar", self.grammar_s)
        if self.rendered_s is not None:
            stages.add("template", self.rendered_s)
        stages.add("tokenize", self.tokenized_s)
        if len(self.prompts) == 1:
            _add_engine_stages(*self.prompts[0], stages)
        else:
            self._add_prompts(stages)
        if stages.now_s < self.ended_s:
            stages.add("detokenize_and_send", self.ended_s)

    def _add_prompts(self, stages: "_Stages") -> None:
        """Add a span of each prompt, with its stages in the engine; the next stage begins after the last one's end."""
        spans, queued_s = stages.spans, stages.now_s
        for number, (metrics, num_tokens) in enumerate(self.prompts[:MAX_PROMPTS]):
            span_id = spans.next_id()
            own = _Stages(spans, span_id, queued_s, metrics.finished_s or self.ended_s)
            spans.add(
                stages.within, span_id, "prompt", queued_s, own.end_s, _attribute(0x4A, "quire.prompt.index", number)
            )
            _add_engine_stages(metrics, num_tokens, own)
        last_s = max((each.finished_s or self.ended_s for each, _ in self.prompts), default=self.ended_s)
        stages.now_s = min(max(last_s, queued_s), self.ended_s)

    def _attributes(self) -> bytes:
        """Return what the log line says, under the names of vLLM and of the semantic conventions."""
        record = self.record
        assert record is not None, "the call has ended"
        request_id, reasons = record.request_id or "", tuple(record.finish_reasons or ())
        operation = _OPERATIONS.get(request_id.partition("-")[0].partition("_")[0])
        encoded = _usual_attributes(self.parameters, operation, record.model, reasons, self.status, self.path)
        if request_id:
            value = _field(0x12, _value(request_id))
            first, second = _ids_heads(len(value))
            encoded += first + value + second + value
        return b"".join((
            encoded, _counts(_PROMPT_TOKENS, record.prompt_tokens), _counts(_CACHED_TOKENS, record.cached_tokens),
            _counts(_OUTPUT_TOKENS, record.output_tokens), _counts(_PREEMPTIONS, record.preemptions),
            self._latencies(),
        ))  # fmt: skip

    @property
    def has_failed(self) -> bool:
        """True if the server failed to answer."""
        return self.status is not None and self.status >= 500

    def _latencies(self) -> bytes:
        """Return durations in seconds under vLLM's names, of the first prompt: those that it has reached."""
        whole, queue, first, prefill, decode, inference = _LATENCIES
        whole_s = self.ended_s - self.started_s
        if not self.prompts:
            return whole + _DOUBLE.pack(whole_s)
        metrics = self.prompts[0][0]
        arrival_s, scheduled_s = metrics.arrival_s, metrics.first_scheduled_s
        first_s, finished_s = metrics.first_token_s, metrics.finished_s
        if first_s is not None and finished_s is not None and scheduled_s is not None:
            return _ALL_LATENCIES.pack(
                whole, whole_s, queue, scheduled_s - arrival_s, first, first_s - arrival_s,
                prefill, first_s - scheduled_s, decode, finished_s - first_s, inference, finished_s - scheduled_s,
            )  # fmt: skip
        encoded = whole + _DOUBLE.pack(whole_s)
        if scheduled_s is not None:
            encoded += queue + _DOUBLE.pack(scheduled_s - arrival_s)
        if first_s is not None:
            encoded += first + _DOUBLE.pack(first_s - arrival_s)
        return encoded


class _Parameters(NamedTuple):
    """Parameters of a call that its span has."""

    model: str
    max_tokens: int | None
    temperature: float
    top_p: float
    n: int


@lru_cache(1 << 10)                 # most calls are like others in these
def _usual_attributes(
    parameters: _Parameters | None, operation: str | None, model: str | None, finish_reasons: tuple[str, ...],
    status: int | None, path: str,
) -> bytes:  # fmt: skip
    found: dict[str, Value | None] = {}
    if parameters is not None:
        found = {f"gen_ai.request.{name}": value for name, value in parameters._asdict().items()}
        found["gen_ai.request.choice.count"] = parameters.n if parameters.n > 1 else None
    return _attributes(0x4A, found | {
        "gen_ai.provider.name": "quire",
        "gen_ai.operation.name": operation,
        "gen_ai.response.model": model,
        "gen_ai.response.finish_reasons": finish_reasons or None,
        "http.request.method": "POST",
        "http.response.status_code": status,
        "url.path": path,
        "error.type": "client_disconnected" if status is None else str(status) if status >= 500 else None,
    })  # fmt: skip


_SERVER, _INTERNAL = b"\x30\x02", b"\x30\x01"   # kinds of spans
_FAILED = b"\x7a\x02\x18\x02"                   # the status of a span


class _CallSpans:
    """Spans of one call, as fields of ScopeSpans with times of the wall clock. Their ids follow one another.

    `root`: the first fields of the call's own span.
    """

    def __init__(self, context: TraceContext, epoch_ns: int) -> None:
        self.fields = list[bytes]()
        self._epoch_ns, self._trace = epoch_ns, b"\x0a\x10" + context.trace_id + context.state
        self._last_id = context.last_id
        self.root = self._trace + (b"\x22\x08" + context.parent_id if context.parent_id else b"") + _SERVER

    def next_id(self) -> int:
        """Return the id of another span."""
        self._last_id += 1
        return self._last_id

    def within(self, parent_id: int) -> bytes:
        """Return the first fields of spans within another one."""
        return self._trace + _PARENT.pack(0x22, 8, parent_id) + _INTERNAL

    def add(self, head: bytes, span_id: int, name: str, begin_s: float, end_s: float, more: bytes) -> None:
        """Add a span. Times in seconds of the monotonic clock; `more`: its attributes and events."""
        begin_ns, end_ns = int(begin_s * 1e9) + self._epoch_ns, int(end_s * 1e9) + self._epoch_ns
        own = _SPAN.pack(0x12, 8, span_id, 0x39, begin_ns, 0x41, end_ns)
        self.fields.append(_field(0x12, head + own + _name(0x2A, name) + more))

    def event(self, name: str, at_s: float, attributes: Attributes = MappingProxyType({})) -> bytes:
        """Return the field of something that happened within a span."""
        at = _EVENT.pack(0x09, int(at_s * 1e9) + self._epoch_ns)
        return _field(0x5A, at + _name(0x12, name) + _attributes(0x1A, attributes))


class _Stages:
    """Stages within a span, each from the end of the last one; a stage that was not left lasts until the end."""

    def __init__(self, spans: _CallSpans, parent_id: int, now_s: float, end_s: float) -> None:
        self.spans, self.within = spans, spans.within(parent_id)
        self.now_s, self.end_s = now_s, max(now_s, end_s)

    def add(
        self, name: str, until_s: float | None, more: bytes = b"", preemptions: Iterable[Preemption] = ()
    ) -> None:
        """Add the stage from now until then, with what has interrupted it, and go there."""
        begin_s, end_s, span_id = self.now_s, self.end_s, self.spans.next_id()
        if until_s is not None and until_s < end_s:
            end_s = until_s if until_s > begin_s else begin_s
        self.now_s = end_s
        self.spans.add(self.within, span_id, name, begin_s, end_s, more)
        for each in preemptions:
            if begin_s <= each.preempted_s < end_s:
                _add_preempted(self.spans, span_id, each, end_s)


def _add_engine_stages(metrics: RequestMetrics, num_tokens: int, stages: _Stages) -> None:
    """Add the stages of an engine request, up to its last token."""
    waits = _waits(stages.spans, metrics.waited_steps, stages.now_s)
    stages.add("queue", metrics.first_scheduled_s or metrics.finished_s, waits)
    if metrics.first_scheduled_s is None:
        return
    prompt = _attribute(0x4A, "quire.prompt.tokens", num_tokens)
    prompt += _attribute(0x4A, "quire.prompt.cached_tokens", metrics.num_cached_tokens)
    until_s = metrics.first_token_s or metrics.finished_s
    stages.add("prefill", until_s, prompt + _chunks(metrics, stages), metrics.preemptions)
    if metrics.first_token_s is None:
        return
    drafts = b""
    if metrics.num_draft_tokens:
        drafts = _attribute(0x4A, "quire.drafts.tokens", metrics.num_draft_tokens)
        drafts += _attribute(0x4A, "quire.drafts.accepted_tokens", metrics.num_accepted_tokens)
    stages.add("decode", metrics.finished_s, drafts, metrics.preemptions)


def _chunks(metrics: RequestMetrics, stages: _Stages) -> bytes:
    """Return an event at the end of each step that computed a part of the prompt, but the last one: the span's end."""
    num_before, encoded = metrics.num_cached_tokens, b""
    for ended_s, num_computed in metrics.chunks:
        tokens = {"quire.chunk.tokens": max(0, num_computed - num_before), "quire.chunk.computed_tokens": num_computed}
        encoded += stages.spans.event("chunk", min(max(ended_s, stages.now_s), stages.end_s), tokens)
        num_before = num_computed
    return encoded


def _waits(spans: _CallSpans, waited_steps: Mapping[str, int], at_s: float) -> bytes:
    """Return an event for each reason that a request waited for; they share the time at which it began to wait."""
    encoded = b""
    for reason, count in waited_steps.items():
        encoded += spans.event("wait", at_s, {"quire.wait.reason": reason, "quire.wait.steps": count})
    return encoded


def _add_preempted(spans: _CallSpans, parent_id: int, preemption: Preemption, end_s: float) -> None:
    """Add the time from a preemption on until the tokens of then were computed again."""
    more = _attributes(0x4A, {
        "quire.preemption.mode": "swap" if preemption.num_swapped_blocks else "recompute",
        "quire.preemption.recomputed_tokens": preemption.num_recomputed_tokens,
        "quire.preemption.swapped_blocks": preemption.num_swapped_blocks,
    })  # fmt: skip
    more += _waits(spans, preemption.waited_steps, preemption.preempted_s)
    if preemption.returned_s is not None:
        more += spans.event("returned", preemption.returned_s)
    until_s = end_s if preemption.recovered_s is None else min(preemption.recovered_s, end_s)
    spans.add(spans.within(parent_id), spans.next_id(), "preempted", preemption.preempted_s, until_s, more)


# --- sending --------------------------------------------------------------------------------------------------------


class _Sampling:
    """The SDK's sampler, and the message around the spans of a batch: by the variables of the environment."""

    def __init__(self) -> None:
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415 (optional)
        from opentelemetry.sdk.trace.sampling import Decision  # noqa: PLC0415 (optional)
        from opentelemetry.trace import SpanKind, get_current_span  # noqa: PLC0415 (optional)
        from opentelemetry.trace.propagation.tracecontext import (  # noqa: PLC0415 (optional)
            TraceContextTextMapPropagator,
        )

        provider = TracerProvider(shutdown_on_exit=False)
        self._sample, self._kind = provider.sampler.should_sample, SpanKind.SERVER
        self._is_sampled = Decision.RECORD_AND_SAMPLE
        self._random = Random()     # noqa: S311 (ids, no secrets)
        self._extract, self._span_of = TraceContextTextMapPropagator().extract, get_current_span
        attributes = dict(provider.resource.attributes)
        if str(attributes.get("service.name", "")).startswith("unknown_service"):
            attributes["service.name"] = "quire"
        texts = {name: value if isinstance(value, int | float) else str(value) for name, value in attributes.items()}
        self._resource = _field(0x0A, _attributes(0x0A, texts))
        self._scope = _field(0x0A, _name(0x0A, "quire") + _name(0x12, __version__))

    def context(self, call: CallTrace) -> TraceContext | None:
        """Return the trace that a call belongs to; None if it is not sampled."""
        parent = None
        number, parent_id = self._random.getrandbits(128), b""
        if "traceparent" in call.headers:
            parent = self._extract(call.headers)
            caller = self._span_of(parent).get_span_context()
            if caller.is_valid:
                number, parent_id = caller.trace_id, caller.span_id.to_bytes(8)
        sampled = self._sample(parent, number, "llm_request", self._kind, {"url.path": call.path})
        if sampled.decision is not self._is_sampled:
            return None
        state = sampled.trace_state.to_header().encode() if sampled.trace_state else b""
        state = _field(0x1A, state) if state else b""
        return TraceContext(number.to_bytes(16), parent_id, state, self._random.getrandbits(63))

    def request(self, spans: Sequence[bytes]) -> bytes:
        """Return an ExportTraceServiceRequest. The spans, a megabyte of them, are copied once."""
        num_bytes = sum(map(len, spans))
        scope = _head(0x12, len(self._scope) + num_bytes) + self._scope
        head = _head(0x0A, len(self._resource) + len(scope) + num_bytes) + self._resource + scope
        return b"".join((head, *spans))


class Traces:
    """Ended calls, and the thread that makes their spans and sends them. `end` is called on the event loop.

    `count_dropped` is called with numbers of spans that will never be sent, by both.
    """

    def __init__(
        self, endpoint: str, count_dropped: Callable[[int], None], *, max_waiting: int = MAX_WAITING_CALLS
    ) -> None:
        self._endpoint, self._count_dropped, self._max_waiting = endpoint, count_dropped, max_waiting
        self._sampling, self._sender = _Sampling(), _SpanSender(endpoint, os.environ)
        self._calls = deque[CallTrace]()
        self._has_calls, self._is_closing = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="traces", daemon=True)
        self._thread.start()

    def end(self, record: "RequestRecord", status: int | None, ended_s: float) -> None:
        """Take the trace off the record of a call that has ended, and queue it; or drop it if the queue is full."""
        call, record.trace = record.trace, None
        assert call is not None, "the call is traced"
        call.record, call.status, call.ended_s = record, status, ended_s
        if len(self._calls) >= self._max_waiting:
            self._count_dropped(call.num_spans)
            return
        self._calls.append(call)
        if not self._has_calls.is_set():
            self._has_calls.set()

    def close(self) -> None:
        """Send what waits, for FLUSH_LIMIT_S at most."""
        self._is_closing.set()
        self._has_calls.set()
        self._thread.join(FLUSH_LIMIT_S)

    def _run(self) -> None:
        pause_s = 0.0
        while self._calls or not self._is_closing.is_set():
            self._has_calls.wait()
            self._is_closing.wait(pause_s or GATHERING_S)
            self._has_calls.clear()
            pause_s = self._send_waiting(pause_s)
            if self._calls:
                self._has_calls.set()

    def _send_waiting(self, pause_s: float) -> float:
        """Send the calls that wait, in batches; return the pause after a failure, which was `pause_s` before."""
        while self._calls:
            batch = [self._calls.popleft() for _ in range(min(len(self._calls), CALLS_AT_ONCE))]
            spans = self._encoded(batch)
            if not spans:
                continue
            failure = self._sender.send(self._sampling.request(spans))
            if failure is not None:
                self._count_dropped(len(spans))
                if not pause_s:
                    log.warning(
                        "traces cannot be sent to %s: %s; spans are dropped until they can", self._endpoint, failure
                    )
                return min(2 * pause_s or FIRST_PAUSE_S, LONGEST_PAUSE_S)
            if pause_s:
                log.warning("traces are sent to %s again", self._endpoint)
            pause_s = 0.0
        return pause_s

    def _encoded(self, calls: Iterable[CallTrace]) -> list[bytes]:
        """Return the spans of the calls that are sampled."""
        epoch_ns, fields = time.time_ns() - time.monotonic_ns(), list[bytes]()
        for call in calls:
            context = self._sampling.context(call)
            if context is not None:
                spans = _CallSpans(context, epoch_ns)
                call.add_to(spans)
                fields += spans.fields
        return fields


class _SpanSender:
    """Posts batches, with the exporter's variables of the environment: those of traces, then those of all signals."""

    def __init__(self, endpoint: str, environment: Mapping[str, str]) -> None:
        from opentelemetry.util.re import parse_env_headers  # noqa: PLC0415 (optional)

        def setting(name: str) -> str:
            own = environment.get(f"OTEL_EXPORTER_OTLP_TRACES_{name}")
            return own or environment.get(f"OTEL_EXPORTER_OTLP_{name}", "")

        self._endpoint = endpoint
        self._headers = {"user-agent": f"quire/{__version__}", **parse_env_headers(setting("HEADERS"), liberal=True)}
        self._headers["content-type"] = "application/x-protobuf"
        self._timeout_s = float(setting("TIMEOUT") or _TIMEOUT_S)
        self._is_packed = setting("COMPRESSION") == "gzip"
        if self._is_packed:
            self._headers["content-encoding"] = "gzip"
        authorities = setting("CERTIFICATE") or None
        self._tls = ssl.create_default_context(cafile=authorities) if endpoint.startswith("https:") else None

    def send(self, message: bytes) -> str | None:
        """Send a message; return the reason if the endpoint did not take it."""
        if self._is_packed:
            message = gzip.compress(message, 1)
        request = urllib.request.Request(self._endpoint, message, self._headers)  # noqa: S310 (http or https)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout_s, context=self._tls):  # noqa: S310
                return None
        except (OSError, http.client.HTTPException) as error:
            return str(getattr(error, "reason", None) or error)[:200] or type(error).__name__
