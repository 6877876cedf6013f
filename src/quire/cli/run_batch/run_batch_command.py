"""`quire run-batch`: a file of requests in OpenAI's batch form, answered to another file without a socket.

A line of the input is an object with `custom_id`, `method` (POST), `url` and `body`; one of the output has `id`,
`custom_id`, `response` (`status_code`, `request_id`, `body`) and `error`: null, the error of the response, or what is
wrong with a line that was not asked. A line without a `custom_id` that can be read is malformed: its output names no
request.

Each line is a request to the server's own application, so fields, bounds and errors are those of its routes. Lines are
asked as room comes free, and answered in order.
"""

import asyncio
import contextlib
import json
import socket
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass
from io import BufferedReader, FileIO
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TextIO
from uuid import uuid4

import typer
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Message, Scope

from quire.cli.flag_groups import STANDARD_STREAM, check_output, flag, flag_field, with_config_file, with_flag_groups
from quire.cli.model_flags import OfflineOptions
from quire.core.checks import shown
from quire.core.errors import ConfigError, InvalidRequestError
from quire.engine.fleet.fleet import Fleet
from quire.engine.launcher import EngineProcess, spawn_engines
from quire.engine.messages import EngineDeadError
from quire.engine.options import EngineOptions
from quire.server.apis import system
from quire.server.app import create_app
from quire.server.http.http_server import HttpServer
from quire.server.http.sockets import bind
from quire.server.lifecycle import close_service, connect
from quire.server.options import DEFAULT_LIMITS, ServerOptions
from quire.server.service import Service

URLS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/pooling", "/score",
    "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class BatchLine:
    """A line of the input: a request, or `error`, what is wrong with it."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: str | None = None


def read_lines(file: BinaryIO, max_line_bytes: int, max_lines: int) -> Iterator[BatchLine]:
    """Yield the lines that are not blank; at most `max_line_bytes` of each are held.

    Raises InvalidRequestError when there are more than `max_lines`.
    """
    count = number = 0
    while raw := file.readline(max_line_bytes + 1):
        number += 1
        is_long = len(raw) > max_line_bytes and not raw.endswith(b"\n")
        while is_long and (rest := file.readline(max_line_bytes)) and not rest.endswith(b"\n"):
            pass
        if not is_long and not raw.strip():
            continue
        count += 1
        if count > max_lines:
            raise InvalidRequestError(f"the input has more than {max_lines} lines (max_lines)")
        if is_long:
            yield BatchLine(number, error=f"line {number} is longer than {max_line_bytes} bytes (max_line_bytes)")
        else:
            yield _parsed(raw, number)


def _parsed(raw: bytes, number: int) -> BatchLine:
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return BatchLine(number, error=f"line {number} is not JSON: {error}")
    if not isinstance(given, dict):
        return BatchLine(number, error=f"line {number} must be an object, got a {type(given).__name__}")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        expected = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters"
        return BatchLine(number, error=f"line {number}: {expected}, got {shown(custom_id)}")
    body = given.get("body")
    checks = (
        (given.get("method") == "POST", f"method must be POST, got {shown(given.get('method'))}"),
        (given.get("url") in URLS, f"url must be one of {', '.join(URLS)}, got {shown(given.get('url'))}"),
        (isinstance(body, dict), f"body must be an object, got {shown(body)}"),
        (isinstance(body, dict) and not body.get("stream"), "stream must be false in a batch"),
    )
    wrong = next((message for is_right, message in checks if not is_right), None)
    if wrong is not None:
        return BatchLine(number, custom_id, error=f"line {number}: {wrong}")
    return BatchLine(number, custom_id, given["url"], json.dumps(body).encode())


def answered(line: BatchLine, status: int, request_id: str, body: bytes) -> dict[str, Any]:
    """Return the output of a line that was asked."""
    content = json.loads(body)
    error = content.get("error") if status >= 400 else None
    response = {"status_code": status, "request_id": request_id, "body": content}
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}


def refused(line: BatchLine) -> dict[str, Any]:
    """Return the output of a line that was not asked."""
    error = {"code": "invalid_line", "message": line.error}
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": error}


class BatchLineReader:
    """Reads one line ahead. Its thread ends with the lines, or with the process, which does not wait for it."""

    def __init__(self, lines: Iterator[BatchLine]) -> None:
        self._loop = asyncio.get_running_loop()
        self._read = asyncio.Queue[BatchLine | Exception | None]()  # None: the end
        self._wanted = threading.Semaphore(1)
        threading.Thread(target=self._run, args=(lines,), name="batch lines", daemon=True).start()

    async def next(self) -> BatchLine | None:
        """Return the next line, or None behind the last. Raises what reading has raised."""
        found = await self._read.get()
        self._wanted.release()
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self, lines: Iterator[BatchLine]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no line is awaited
            try:
                for line in lines:
                    self._put(line)
                self._put(None)
            except Exception as error:  # `next` raises it
                self._put(error)

    def _put(self, found: BatchLine | Exception | None) -> None:
        self._wanted.acquire()
        self._loop.call_soon_threadsafe(self._read.put_nowait, found)


MAX_INFLIGHT_PER_SEQ = 4
_RETRY_S = 0.5
_TOO_MANY = 429


@dataclass(frozen=True, slots=True)
class BatchFlags:
    """Bounds of a batch, and the names of the model."""

    max_inflight: int | None = flag_field(
        None, "lines that are asked at a time", panel="Batch", show_default="4 times --max-num-seqs",
        row="lines that are asked at a time, and held until the first of them is answered",
    )  # fmt: skip
    max_lines: int = flag_field(50_000, "lines of the input", panel="Batch", row="lines of the input; more end the run")
    max_line_bytes: int = flag_field(
        DEFAULT_LIMITS.max_body_bytes, "longest line", panel="Batch",
        row="longest line; a longer one is answered with an error",
    )  # fmt: skip
    served_model_name: list[str] = flag_field(
        [], "the model's name in the lines (repeatable)", panel="Batch", metavar="NAME",
        show_default="the model's path or id", row="name of the model in the lines; repeatable",
    )  # fmt: skip
    enable_metrics: bool = flag_field(
        False, "serve the metrics of the run to Prometheus", panel="Batch",
        row="while the batch runs, `GET /metrics` is answered on a port",
    )  # fmt: skip
    url: str = flag_field(
        "127.0.0.1", "address of the metrics", panel="Batch", metavar="HOST",
        row="address of the metrics: a name or an IP address of this machine",
    )  # fmt: skip
    port: int = flag_field(8000, "port of the metrics", panel="Batch", row="port of the metrics", min=1, max=65535)

    def check(self) -> None:
        """Raise ConfigError for a bound below 1."""
        for name in ("max_inflight", "max_lines", "max_line_bytes"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, got {value}")


@with_config_file
@with_flag_groups
def run_batch(
    engine: OfflineOptions,
    batch: BatchFlags,
    input_file: Annotated[Path, flag("requests, a JSON object per line", "--input-file", "-i", metavar="FILE|-")],
    output_file: Annotated[
        Path, flag("where answers go, in the order of the lines", "--output-file", "-o", metavar="FILE|-",
                   callback=check_output)
    ],
) -> None:  # fmt: skip
    """Answer a file of requests, in the form of OpenAI's batches."""
    batch.check()
    if input_file == output_file != STANDARD_STREAM:
        raise typer.BadParameter("the output would replace the input")
    max_inflight = batch.max_inflight or MAX_INFLIGHT_PER_SEQ * engine.resolved_max_num_seqs
    with ExitStack() as files:
        lines = read_lines(_input(input_file, files), batch.max_line_bytes, batch.max_lines)
        output = _output(output_file, files)
        listener = files.enter_context(bind(batch.url, batch.port)) if batch.enable_metrics else None
        totals = asyncio.run(run(engine, _options(batch, max_inflight), lines, output, max_inflight, listener))
    print(f"{totals.num_lines} lines answered, {totals.num_failed} of them with an error", file=sys.stderr)  # noqa: T201
    if totals.num_malformed:
        print(f"{totals.num_malformed} lines are malformed: they have no custom_id", file=sys.stderr)  # noqa: T201
        raise typer.Exit(1)


def _options(batch: BatchFlags, max_inflight: int) -> ServerOptions:
    """Return the settings of the application: its bounds on waiting requests are those of the batch."""
    return ServerOptions(
        host=batch.url,
        served_model_name=tuple(batch.served_model_name),
        max_queued_requests=max(max_inflight, DEFAULT_LIMITS.max_queued_requests),
        max_queued_tokens=DEFAULT_LIMITS.max_queued_tokens * max_inflight,
        max_body_bytes=batch.max_line_bytes,
        max_total_body_bytes=4 * batch.max_line_bytes * max_inflight,
        max_pinned_prefixes=0,
    )


def _input(path: Path, files: ExitStack) -> BinaryIO:
    """Return the input: not `sys.stdin.buffer`: the interpreter's end needs its lock, which a waiting reader has."""
    is_standard = path == STANDARD_STREAM
    buffer = BufferedReader(FileIO(sys.stdin.fileno(), closefd=False) if is_standard else path.open("rb", buffering=0))
    files.callback(_close_below, buffer)
    return buffer


def _close_below(buffer: "BufferedReader[FileIO]") -> None:
    """Close the file below a buffer. Closing the buffer itself would wait for the thread that reads."""
    buffer.raw.close()


def _output(path: Path, files: ExitStack) -> TextIO:
    return sys.stdout if path == STANDARD_STREAM else files.enter_context(path.open("w", encoding="utf-8"))


class MetricsServer:
    """An application with the metrics of a service at / and /metrics, an empty page until there is one."""

    def __init__(self) -> None:
        self.app = Starlette(routes=[Route(path, self._answer) for path in ("/", "/metrics")])
        self.app.state.service = None

    def show(self, service: Service) -> None:
        """Answer with the metrics of a service from now on."""
        self.app.state.service = service

    async def _answer(self, request: Request) -> Response:
        return Response() if self.app.state.service is None else await system.metrics(request)


@asynccontextmanager
async def serving_metrics(listener: socket.socket | None, host: str) -> AsyncIterator[MetricsServer]:
    """Serve metrics on a bound socket, if there is one. ConfigError if another process listens there by now."""
    server = MetricsServer()
    if listener is None:
        yield server
        return
    http = HttpServer(server.app)
    await http.start(listener, host)
    try:
        yield server
    finally:
        await http.stop()


@dataclass(slots=True)
class Totals:
    """Lines that were written, those of them with an error, and malformed ones, which name no request."""

    num_lines: int = 0
    num_failed: int = 0
    num_malformed: int = 0


async def run(
    engine: EngineOptions, options: ServerOptions, lines: Iterator[BatchLine], output: TextIO, max_inflight: int,
    metrics_listener: socket.socket | None = None,
) -> Totals:  # fmt: skip
    """Start an engine, ask all lines, write the answers. Raises as the start of a server, or EngineDeadError.

    An engine without progress is ended. Of several engines those that die are started again.

    metrics_listener: a bound socket, where the metrics of the run are served from its start to its end.
    """
    children = spawn_engines(engine)
    try:
        async with serving_metrics(metrics_listener, options.host) as metrics:
            service = await connect(children, engine, options, ends_stalled=True)
            supervising = asyncio.create_task(_supervise(service, children), name="engine supervisor")
            try:
                metrics.show(service)
                return await _ask_all(create_app(service), service, lines, output, max_inflight)
            finally:
                supervising.cancel()
                await asyncio.wait([supervising])   # it may have to stop an engine that loads
                await close_service(service)
                service.threads.close()
    finally:
        for child in children:
            child.stop()


async def _supervise(service: Service, children: list[EngineProcess]) -> None:
    """Start engines again that die, where there are several."""
    if isinstance(service.client, Fleet):
        await service.client.supervise(children.__setitem__)


async def _ask_all(
    app: FastAPI, service: Service, lines: Iterator[BatchLine], output: TextIO, max_inflight: int
) -> Totals:
    """Ask up to `max_inflight` lines at a time; write answers in the order of the lines."""
    totals, asked = Totals(), deque[asyncio.Task[dict[str, Any]]]()
    reader = BatchLineReader(lines)
    reading: asyncio.Task[BatchLine | None] | None = asyncio.create_task(reader.next())

    async def write_first() -> None:
        answer = await asked.popleft()
        if not service.client.is_alive:
            raise EngineDeadError(service.client.death_reason)
        output.write(json.dumps(answer) + "\n")
        output.flush()
        totals.num_lines += 1
        totals.num_failed += answer["error"] is not None
        totals.num_malformed += answer["custom_id"] is None

    try:
        while reading is not None or asked:
            awaited: list[asyncio.Task[Any]] = list(islice(asked, 1))
            if reading is not None and len(asked) < max_inflight:
                awaited.append(reading)
            await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if asked and asked[0].done():
                await write_first()
            elif reading is not None:
                line = reading.result()
                reading = None
                if line is not None:
                    asked.append(asyncio.create_task(_ask(app, line, asked)))
                    reading = asyncio.create_task(reader.next())
    finally:
        for task in (*asked, *filter(None, [reading])):
            task.cancel()
    return totals


async def _ask(app: FastAPI, line: BatchLine, asked: deque[asyncio.Task[dict[str, Any]]]) -> dict[str, Any]:
    """Return the output of a line. One that finds a bound of the server reached is asked again when others are done."""
    if line.error is not None:
        return refused(line)
    while True:
        status, headers, body = await _call(app, line)
        if status != _TOO_MANY or asked[0] is asyncio.current_task():  # for the first, nothing more comes free
            return answered(line, status, headers.get(b"x-request-id", b"").decode(), body)
        await asyncio.sleep(_RETRY_S)


async def _call(app: FastAPI, line: BatchLine) -> tuple[int, dict[bytes, bytes], bytes]:
    """Return status, headers and body of the application's response."""
    sent: list[Message] = [{"type": "http.request", "body": line.body, "more_body": False}]
    received: list[Message] = []
    path = line.url.encode()
    scope: Scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": line.url, "raw_path": path, "query_string": b"", "root_path": "",
        "headers": [(b"content-type", b"application/json")], "client": None, "server": None,
    }  # fmt: skip

    async def receive() -> Message:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()  # no client goes away
        raise AssertionError("never set")

    async def send(message: Message) -> None:
        received.append(message)

    await app(scope, receive, send)
    start, *parts = received
    return start["status"], dict(start["headers"]), b"".join(part.get("body", b"") for part in parts)
