#!/usr/bin/env bash
# Packages: openai 3.54.0 of PyPI, openai 6.49.0 of npm: `chat.completions.stream`, which collects a stream into a completion.
# Expected: both give one message for one stream: the reasoning that DeepSeek's API, vLLM and SGLang send beside the content, in
# pieces (reasoning_content), is whole in it, as the content is; a role that each chunk repeats, as Ollama's do, is one role.
# Seen: the helper of npm keeps the last piece of reasoning_content alone, without a word; a chat that sends the message back, as
# DeepSeek asks for between calls of tools, has lost it. The helper of PyPI has it whole, and joins the roles, too: the message has
# the role "assistantassistantassistant", which servers refuse.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check openai==3.54.0
npm install --silent --no-audit --no-fund openai@6.49.0
cat > collect.mjs <<'JS'
import OpenAI from "openai";

const client = new OpenAI({ apiKey: "x", baseURL: process.argv[2] });
const stream = client.chat.completions.stream({ model: "m", messages: [{ role: "user", content: "hello" }] });
console.log(JSON.stringify((await stream.finalChatCompletion()).choices[0].message));
JS
cat > collect.py <<'PY'
import json
import subprocess
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

from openai import OpenAI

DELTAS = [{"reasoning_content": "Two and "}, {"reasoning_content": "two."}, {"content": "Four."}]


class Server(BaseHTTPRequestHandler):
    def do_POST(self):
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for delta, reason in zip(DELTAS, (None, None, "stop")):
            choice = {"index": 0, "delta": {"role": "assistant"} | delta, "finish_reason": reason}
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_):
        pass


server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
Thread(target=server.serve_forever, daemon=True).start()
url = f"http://127.0.0.1:{server.server_port}/v1"
with OpenAI(base_url=url, api_key="x").chat.completions.stream(model="m", messages=[{"role": "user", "content": "hello"}]) as stream:
    messages = {"PyPI": stream.get_final_completion().choices[0].message.model_dump()}
messages["npm"] = json.loads(subprocess.run(["node", "collect.mjs", url], check=True, capture_output=True).stdout)
found = {name: [message[key] for key in ("role", "reasoning_content", "content")] for name, message in messages.items()}
for name, fields in found.items():
    print(name, fields)
assert found["npm"] == ["assistant", "two.", "Four."], "it is no longer so"
assert found["PyPI"] == ["assistant" * 3, "Two and two.", "Four."], "it is no longer so"
PY
venv/bin/python collect.py
