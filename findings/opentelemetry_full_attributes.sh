#!/usr/bin/env bash
# Package: opentelemetry-sdk 1.45.2
# Expected: a span that has as many attributes as its limit allows (OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, 128 by default) discards each
# further one, as the specification says (common, "Attribute Limits": for each unique key, "addition of which would result in exceeding
# the limit, SDK MUST discard that key/value pair"), so that what names the operation and the model, set first, is kept.
# Seen: each further one replaces the oldest: the attributes of the span's start are gone, those of the end are kept. A span of a chat
# that has an attribute for each message loses gen_ai.operation.name and gen_ai.request.model first. Events and links are likewise the
# last ones. A warning in the log and a count of dropped attributes tell.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check opentelemetry-sdk==1.45.2
cat > span.py <<'PY'
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
with provider.get_tracer("chat").start_as_current_span("chat", attributes={"gen_ai.operation.name": "chat"}) as span:
    span.set_attribute("gen_ai.request.model", "m")
    for number in range(130):
        span.set_attribute(f"message.{number}", "text")
        span.add_event(f"event.{number}")
(done,) = exporter.get_finished_spans()
names, events = list(done.attributes), [event.name for event in done.events]
print(f"{len(names)} attributes, from {names[0]} to {names[-1]}; {done.dropped_attributes} dropped")
print(f"{len(events)} events, from {events[0]} to {events[-1]}")
assert names == [f"message.{number}" for number in range(2, 130)] and done.dropped_attributes == 4, "it is no longer so"
assert events == [f"event.{number}" for number in range(2, 130)], "it is no longer so"
PY
venv/bin/python span.py 2> log
sort log | uniq -c | sort -rn | sed -n 1,2p
