#!/usr/bin/env bash
# Package: aiohttp 3.14.5
# Expected: ClientSession.close() closes its connections, so a task that reads the body of a response on one of them gets
# an error (ClientConnectionError), or the end of the body.
# Seen: the connection is closed, and the task waits for ever: neither an error nor an end reaches it. Nor does one when
# the server ends afterwards. A proxy that closes a dead server's session before readers have seen the end of their
# connections hangs its clients.
# Date: 2026-11-29
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet aiohttp==3.14.5
cat > read.py <<'PY'
import asyncio

import aiohttp
from aiohttp import web


async def endless(request):
    response = web.StreamResponse()
    await response.prepare(request)
    await response.write(b"first")
    await asyncio.sleep(3600)


async def main():
    app = web.Application()
    app.router.add_get("/", endless)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
    response = await session.get(f"http://127.0.0.1:{runner.addresses[0][1]}/")
    assert await response.content.readany() == b"first"
    reading = asyncio.create_task(response.content.readany())
    await asyncio.sleep(0)                  # it waits for the next piece
    await session.close()
    await runner.cleanup()                  # the server ends, too
    done, _ = await asyncio.wait({reading}, timeout=5)
    print("the reader has ended" if done else "the reader still waits, 5 s after its session and its server have ended")
    assert not done, "no longer so"
    reading.cancel()


asyncio.run(main())
PY
venv/bin/python read.py
