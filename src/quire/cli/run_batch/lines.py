"""Lines of batch files, in OpenAI's form: what is asked, and what came of it.

A line of the input is an object with `custom_id`, `method` (POST), `url` and `body`; one of the output has `id`,
`custom_id`, `response` (`status_code`, `request_id`, `body`) and `error`: null, the error of the response, or what is
wrong with a line that was not asked. A line without a `custom_id` that can be read is malformed: its output names no
request.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, BinaryIO
from uuid import uuid4

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError

URLS = (
    "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/embeddings", "/pooling", "/score",
    "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank",
)  # fmt: skip
MAX_ID_CHARS = 512


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the input: a request, or `error`, what is wrong with it."""

    number: int
    custom_id: str | None = None
    url: str = ""
    body: bytes = b""
    error: str | None = None


def read_lines(file: BinaryIO, max_line_bytes: int, max_lines: int) -> Iterator[Line]:
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
            yield Line(number, error=f"line {number} is longer than {max_line_bytes} bytes (max_line_bytes)")
        else:
            yield _parsed(raw, number)


def _parsed(raw: bytes, number: int) -> Line:
    try:
        given = json.loads(raw)
    except (ValueError, RecursionError) as error:
        return Line(number, error=f"line {number} is not JSON: {error}")
    if not isinstance(given, dict):
        return Line(number, error=f"line {number} must be an object, got a {type(given).__name__}")
    custom_id = given.get("custom_id")
    if not isinstance(custom_id, str) or not 0 < len(custom_id) <= MAX_ID_CHARS:
        expected = f"custom_id must be a string of 1 to {MAX_ID_CHARS} characters"
        return Line(number, error=f"line {number}: {expected}, got {shown(custom_id)}")
    body = given.get("body")
    checks = (
        (given.get("method") == "POST", f"method must be POST, got {shown(given.get('method'))}"),
        (given.get("url") in URLS, f"url must be one of {', '.join(URLS)}, got {shown(given.get('url'))}"),
        (isinstance(body, dict), f"body must be an object, got {shown(body)}"),
        (isinstance(body, dict) and not body.get("stream"), "stream must be false in a batch"),
    )
    wrong = next((message for is_right, message in checks if not is_right), None)
    if wrong is not None:
        return Line(number, custom_id, error=f"line {number}: {wrong}")
    return Line(number, custom_id, given["url"], json.dumps(body).encode())


def answered(line: Line, status: int, request_id: str, body: bytes) -> dict[str, Any]:
    """Return the output of a line that was asked."""
    content = json.loads(body)
    error = content.get("error") if status >= 400 else None
    response = {"status_code": status, "request_id": request_id, "body": content}
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, "response": response, "error": error}


def refused(line: Line) -> dict[str, Any]:
    """Return the output of a line that was not asked."""
    error = {"code": "invalid_line", "message": line.error}
    return {"id": f"batch_req_{uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": error}


class BatchLineReader:
    """Reads one line ahead. Its thread ends with the lines, or with the process, which does not wait for it."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._loop = asyncio.get_running_loop()
        self._read = asyncio.Queue[Line | Exception | None]()  # None: the end
        self._wanted = threading.Semaphore(1)
        threading.Thread(target=self._run, args=(lines,), name="batch lines", daemon=True).start()

    async def next(self) -> Line | None:
        """Return the next line, or None behind the last. Raises what reading has raised."""
        found = await self._read.get()
        self._wanted.release()
        if isinstance(found, Exception):
            raise found
        return found

    def _run(self, lines: Iterator[Line]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, and no line is awaited
            try:
                for line in lines:
                    self._put(line)
                self._put(None)
            except Exception as error:  # `next` raises it
                self._put(error)

    def _put(self, found: Line | Exception | None) -> None:
        self._wanted.acquire()
        self._loop.call_soon_threadsafe(self._read.put_nowait, found)
