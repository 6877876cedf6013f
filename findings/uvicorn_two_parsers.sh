#!/usr/bin/env bash
# Packages: uvicorn 0.54.0 with h11 0.16.0 and with httptools 0.9.0, the default where it is installed
# Expected: one application gets one request from one text of HTTP/1.1, whichever of uvicorn's two parsers reads it, and RFC 9110 and 9112
# say which.
# Seen: four requests are different ones. A POST that offers an upgrade to h2c, which a server may pass over: with httptools the
# application gets an empty body. A response of unknown length to HTTP/1.0: with httptools it is chunked, which RFC 9112 (6.1) forbids.
# Blanks behind a header's value, which are no part of it (RFC 9110, 5.5): httptools leaves them, so that a key is another key. An
# absolute target, "GET http://host/path", which a server has to accept (RFC 9112, 3.2.2): with h11 the whole URL is the path.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check uvicorn==0.54.0 h11==0.16.0 httptools==0.9.0
cat > parsers.py <<'PY'
import asyncio
import socket

import uvicorn

REQUESTS = {
    "h2c": b"POST /v1 HTTP/1.1\r\nHost: h\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
           b"Content-Length: 4\r\n\r\nbody",
    "HTTP/1.0": b"GET /v1 HTTP/1.0\r\n\r\n",
    "blanks": b"GET /v1 HTTP/1.1\r\nHost: h\r\nConnection: close\r\nX-Api-Key: key \t\r\n\r\n",
    "absolute": b"GET http://h/v1 HTTP/1.1\r\nHost: h\r\nConnection: close\r\n\r\n",
}


async def application(scope, receive, send):
    """Answer with the path, the body and the key, in a response of unknown length."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    key = dict(scope["headers"]).get(b"x-api-key", b"")
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": f"<{scope['path']}|{body.decode()}|{key.decode()}>".encode()})


async def answer(port, request):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    text = (await reader.readuntil(b">")).decode()
    writer.close()
    head, _, body = text.partition("\r\n\r\n")
    return ("chunked " if "chunked" in head.lower() else "") + body[body.index("<"):]


async def answers(parser):
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(application, http=parser, lifespan="off", log_level="critical"))
    serving = asyncio.create_task(server.serve([listener]))
    found = {name: await answer(listener.getsockname()[1], request) for name, request in REQUESTS.items()}
    server.should_exit = True
    await serving
    return found


seen = {parser: asyncio.run(answers(parser)) for parser in ("h11", "httptools")}
for name in REQUESTS:
    print(f"{name}: h11 {seen['h11'][name]!r}, httptools {seen['httptools'][name]!r}")
assert [*seen["h11"].values()] == ["chunked </v1|body|>", "</v1||>", "chunked </v1||key>", "chunked <http://h/v1||>"], "no longer so"
assert [*seen["httptools"].values()] == ["chunked </v1||>", "chunked </v1||>", "chunked </v1||key \t>", "chunked </v1||>"], "no longer so"
PY
venv/bin/python parsers.py
