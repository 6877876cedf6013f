#!/usr/bin/env bash
# Package: langchain-openai 1.7.3 (with openai 3.54.0)
# Expected: a stream of chat completions in which each chunk has the usage so far (vLLM's stream_options.continuous_usage_stats, its
# --enable-force-include-usage, and servers that always send it) gives the usage of the last chunk, as openai's own helper gives it:
# each object says what the request has used, not what the chunk has.
# Seen: ChatOpenAI adds the objects up, without a setting against it (pydantic-ai, which adds them too, has openai_continuous_usage_stats).
# An answer of 3 tokens to a prompt of 3 is told as 9 tokens of input and 6 of output. An answer of n tokens counts its prompt n times and
# itself (n + 1) / 2 times, in budgets and in bills.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check langchain-openai==1.7.3 openai==3.54.0
cat > usage.py <<'PY'
import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from langchain_openai import ChatOpenAI
from openai import OpenAI

USAGES = [{"prompt_tokens": 3, "completion_tokens": n, "total_tokens": 3 + n} for n in (1, 2, 3)]


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for text, usage, reason in zip("abc", USAGES, (None, None, "stop")):
            choice = {"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice], "usage": usage}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


def of_langchain(url):
    first, *others = ChatOpenAI(model="m", base_url=url, api_key="x").stream("hello")
    usage = sum(others, first).usage_metadata
    return usage["input_tokens"], usage["output_tokens"]


def of_openai(url):
    client = OpenAI(base_url=url, api_key="x")
    with client.chat.completions.stream(model="m", messages=[{"role": "user", "content": "hello"}]) as stream:
        usage = stream.get_final_completion().usage
    return usage.prompt_tokens, usage.completion_tokens


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
Thread(target=server.serve_forever, daemon=True).start()
for read, expected in ((of_openai, (3, 3)), (of_langchain, (9, 6))):
    found = read(f"http://127.0.0.1:{server.server_port}/v1")
    print(f"{read.__name__}: {found[0]} tokens of input, {found[1]} of output")
    assert found == expected, "it is no longer so"
PY
venv/bin/python usage.py
