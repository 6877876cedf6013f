#!/usr/bin/env bash
# Package: prometheus_client 0.26.0
# Expected: choose_encoder(accept) takes the format of the header that has the greatest q, as HTTP says, takes none with q=0, and says the
# version that it writes.
# Seen: q is not read. The first format of the list that it knows is taken: OpenMetrics with q=0.1 before text with q=1, and OpenMetrics
# that the client refuses with q=0. Its Content-Type repeats whichever version was asked for: a request for 2.5.0 gets
# "version=2.5.0" over the bytes of 1.0.0, so that a reader of that version takes them for another format.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check prometheus_client==0.26.0
cat > accept.py <<'PY'
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import choose_encoder

registry = CollectorRegistry()
Counter("tokens", "tokens", registry=registry).inc()
Histogram("ttft", "seconds", registry=registry).observe(1)


def written(accept):
    """Return what is written, without its moments in time, and its type."""
    encode, content_type = choose_encoder(accept)
    return [line for line in encode(registry).decode().splitlines() if "_created" not in line], content_type


seen = {}
for accept in ("application/openmetrics-text;version=1.0.0;q=0.1,text/plain;version=0.0.4;q=1", "application/openmetrics-text;q=0,text/plain",
               "application/openmetrics-text;version=1.0.0", "application/openmetrics-text;version=2.5.0"):
    seen[accept] = written(accept)
    print(f"{accept}\n    gives {seen[accept][1]}")
kinds = [content_type.split(";")[0] for _, content_type in seen.values()]
assert kinds == ["application/openmetrics-text"] * 4, "it is no longer so"
(first, first_type), (other, other_type) = [*seen.values()][2:]
assert first == other and "version=1.0.0" in first_type and "version=2.5.0" in other_type, "it is no longer so"
PY
venv/bin/python accept.py
