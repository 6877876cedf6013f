"""The server over a real engine, in a thread of this process, so that a test can look inside while it asks by HTTP."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeVar

import httpx
import pytest
import uvloop

from quire.engine.messages import Report
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire.engine.processes.client import EngineClient
from quire.server.app import create_app
from quire.server.http.http_server import HttpServer
from quire.server.http.sockets import bind, url_of
from quire.server.lifecycle import close_service
from quire.server.options import ServerOptions
from quire.server.service import Service
from quire.server.templates.template_renderer import TemplateRenderer
from support.single_steps import SingleSteps
from support.stopping import stopped

HOST, NAME = "127.0.0.1", "tiny"
LIMIT_S = 120.0
DONE = "[DONE]"
PATIENCE: dict[str, Any] = {"stall_limit": 600.0, "stream_keepalive": 600.0}     # as in support/server.py
T = TypeVar("T")
Json = dict[str, Any]


class OpenAIServer:
    """A server that runs. Its service may only be touched by what `on_loop` runs."""

    def __init__(self, url: str, service: Service, loop: asyncio.AbstractEventLoop, steps: SingleSteps) -> None:
        self.url, self.service, self.child = url, service, steps.child
        self._loop, self._steps = loop, steps
        self.http = httpx.Client(base_url=url, timeout=LIMIT_S)

    def on_loop(self, work: Callable[[], T]) -> T:
        """Call a function where the server runs."""

        async def call() -> T:
            return work()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(LIMIT_S)

    def held(self) -> AbstractContextManager[None]:
        """Hold the engine still: requests come and go, and none of them gets any further."""
        return stopped(self.child.process.pid)

    def single_steps(self) -> AbstractContextManager[Callable[[], None]]:
        """Hold the engine still; the function runs its next step, for which a request must have arrived."""
        return self._steps.on()

    def wait_until(self, condition: Callable[[], bool]) -> None:
        """Wait for a state of the server."""

        async def wait() -> None:
            async with asyncio.timeout(LIMIT_S):
                while not condition():
                    await asyncio.sleep(0.005)

        asyncio.run_coroutine_threadsafe(wait(), self._loop).result()

    def ask(self, path: str, **body: Any) -> Json:  # noqa: ANN401 (JSON)
        """Return the answer to a body."""
        response = self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer

    def refusal(self, path: str, **body: Any) -> tuple[int, Json]:  # noqa: ANN401 (JSON)
        """Return the status and the error that a body is answered with."""
        response = self.http.post(path, json=body)
        assert response.status_code >= 400, response.text
        error: Json = response.json()["error"]
        return response.status_code, error

    def stream(self, path: str, **body: Any) -> list[Json]:  # noqa: ANN401 (JSON)
        """Return the events of a stream."""
        response = self.http.post(path, json=body | {"stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        return events_of(response.text)

    def hand_on_each_output(self, patch: pytest.MonkeyPatch) -> None:
        """Let readers take each output before the next report is looked at: however slow we are, none are joined."""
        client, connection = self.service.client, self.service.client._connection
        receive = connection.receive

        async def receive_after_readers() -> Report:
            while any(stream._has_output for stream in client._streams):
                await asyncio.sleep(0)
            return await receive()

        patch.setattr(connection, "receive", receive_after_readers)

    def is_idle(self) -> bool:
        """Tell whether nothing runs, nothing waits, and no block is in use."""
        client, state = self.service.client, self.service.client.state
        num_used_blocks = 0 if state.kv is None else state.kv.used_blocks  # None: nothing has run yet
        has_requests = state.num_running or state.num_waiting or len(client._streams) or len(self.service.responses)
        return not (has_requests or num_used_blocks)


def events_of(text: str) -> list[Json]:
    """Return the events of a whole stream, without the comments that a slow one has."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    data = [event.removeprefix("data: ") for event in events if not event.startswith(":")]
    assert data.pop() == DONE
    return [json.loads(event) for event in data]


@contextmanager
def openai_server(engine: EngineOptions, **options: Any) -> Iterator[OpenAIServer]:  # noqa: ANN401 (JSON)
    """Serve a model; nothing is left behind."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    ended = asyncio.Event()
    is_ready: asyncio.Future[OpenAIServer] = loop.create_future()

    async def serve() -> None:
        steps = SingleSteps(engine)
        metrics = Metrics(NAME)
        client = await EngineClient.connect(steps.child, engine, metrics.engines[0])
        service = Service(
            client, ServerOptions(**PATIENCE | options), (NAME,), metrics, TemplateRenderer(client.tokenizer),
            engine_options=engine,
        )  # fmt: skip
        service.can_sleep = engine.enable_sleep_mode
        try:
            with bind(HOST, 0) as listener:
                http = HttpServer(create_app(service))
                await http.start(listener, HOST)
                is_ready.set_result(OpenAIServer(url_of(listener, HOST), service, loop, steps))
                await ended.wait()
                await http.stop()
        finally:
            await close_service(service)
            service.threads.close()

    async def ready() -> OpenAIServer:
        return await is_ready

    serving = asyncio.run_coroutine_threadsafe(serve(), loop)
    serving.add_done_callback(lambda done: done.exception() and loop.call_soon_threadsafe(is_ready.cancel))
    try:
        server = asyncio.run_coroutine_threadsafe(ready(), loop).result(LIMIT_S)
        with server.http:
            yield server
    finally:
        loop.call_soon_threadsafe(ended.set)
        serving.result(LIMIT_S)
        loop.call_soon_threadsafe(loop.stop)
        thread.join(LIMIT_S)
        loop.close()
