#!/usr/bin/env bash
# Package: huggingface_hub 2.4.0 (with httpx 0.28.1), beside openai 3.54.0
# Expected: InferenceClient(base_url=...), which its documentation offers for any server of OpenAI's protocol, reads each stream that is
# valid by the specification of server-sent events, and JSON with its characters as they are, which is valid by RFC 8259.
# Seen: a line ends at U+2028 and U+0085, too, so that an answer that has one of them as it is, inside a JSON string, is a JSONDecodeError
# in the middle of the stream. An event whose data has several lines is one as well. openai reads all of them.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check huggingface_hub==2.4.0 httpx==0.28.1 openai==3.54.0
cat > stream.py <<'PY'
import http.server
import json
import threading

from huggingface_hub import InferenceClient
from openai import OpenAI


def event(text, indent=None):
    choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
    lines = json.dumps(chunk, ensure_ascii=False, indent=indent).split("\n")
    return "".join(f"data: {line}\n" for line in lines) + "\n"


TEXTS = {"plain": event("ab"), "U+2028": event("a\u2028b"), "U+0085": event("a\x85b"), "lines": event("ab", indent=1)}
sent = b""


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_):
        pass


server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_address[1]}"
seen = {}
for name, text in TEXTS.items():
    sent = (text + event("!") + "data: [DONE]\n\n").encode()
    for client in (OpenAI(base_url=url, api_key="x", max_retries=0), InferenceClient(base_url=url, api_key="x")):
        try:
            chunks = client.chat.completions.create(model="m", messages=[{"role": "user", "content": "x"}], stream=True)
            found = "".join(chunk.choices[0].delta.content for chunk in chunks)
        except Exception as fault:
            found = type(fault).__name__
        seen[name, type(client).__name__] = found
        print(f"{name}: {type(client).__name__} {found!r}")
server.shutdown()
assert [seen[name, "OpenAI"] for name in TEXTS] == ["ab!", "a\u2028b!", "a\x85b!", "ab!"], "it is no longer so"
assert [seen[name, "InferenceClient"] for name in TEXTS] == ["ab!"] + ["JSONDecodeError"] * 3, "it is no longer so"
PY
venv/bin/python stream.py
