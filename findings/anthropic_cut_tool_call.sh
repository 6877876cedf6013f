#!/usr/bin/env bash
# Package: anthropic 2.12.0
# Expected: the final message of a stream in which max_tokens cuts a tool call has no input for it, or the text so far:
# what was streamed is no JSON, and a whole response would not have it either.
# Seen: an object that looks whole, without an error. Texts that were cut are missing, lists are closed, and a number that
# was cut is another number: 12 becomes 1, lines 1 to 20 become 1 to 2. Only `stop_reason` tells; a client that runs each
# `tool_use` block calls its function with other arguments than the model was about to write.
# Date: 2026-11-28
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet anthropic==2.12.0
cat > cut.py <<'PY'
import json

import httpx2
from anthropic import Anthropic

WHOLE = '{"path": "a.txt", "lines": [1, 20], "text": "the new words", "count": 12}'
USAGE = {"input_tokens": 5, "output_tokens": 0}
HEAD = {"id": "m", "type": "message", "role": "assistant", "model": "m", "content": [], "usage": USAGE}


def final_input(text):
    call = {"type": "tool_use", "id": "t", "name": "edit", "input": {}}
    events = [
        {"type": "message_start", "message": HEAD | {"stop_reason": None, "stop_sequence": None}},
        {"type": "content_block_start", "index": 0, "content_block": call},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": text}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "max_tokens", "stop_sequence": None}, "usage": USAGE},
        {"type": "message_stop"},
    ]
    body = "".join(f"event: {event['type']}\ndata: {json.dumps(event)}\n\n" for event in events)
    answer = httpx2.Response(200, headers={"content-type": "text/event-stream"}, text=body)
    http = httpx2.Client(transport=httpx2.MockTransport(lambda request: answer))
    client = Anthropic(api_key="none", http_client=http)
    with client.messages.stream(model="m", max_tokens=9, messages=[{"role": "user", "content": "x"}]) as stream:
        return stream.get_final_message().content[0].input


seen = {}
for end in ("", '"a.tx', "[1, 2", "the new", '"count": 1'):
    cut = WHOLE[: WHOLE.index(end) + len(end)] if end else WHOLE
    seen[end] = final_input(cut)
    print(f"{cut!r} -> {seen[end]}")
assert seen[""] == json.loads(WHOLE)
assert seen['"a.tx'] == {}, "a text that was cut is no longer dropped"
assert seen["the new"] == {"path": "a.txt", "lines": [1, 20]}
assert seen["[1, 2"] == {"path": "a.txt", "lines": [1, 2]}, "a list that was cut is no longer closed behind a part of 20"
assert seen['"count": 1'] == json.loads(WHOLE) | {"count": 1}, "a number that was cut is no longer another number"
PY
venv/bin/python cut.py
