"""Router of prefill apart from decoding: vLLM's `kv_transfer_params` between servers for prompts and for decoding.

A long request for a completion goes to a prefill server first, for one token and a ticket, then with the ticket to a
decode server, which answers the client. Where no prefill server can be reached, the decode server computes the
prompt, and the request is counted: an answer never fails for want of a prefill server. All other requests go to a
decode server as they came. Keys pass through to the servers, which check them.

A server that has a request and has not begun to answer is asked for its health now and then. One that gives no sign,
such as a process that is stopped, is given up: the request goes to another one, as if it had not been reached.
"""

import asyncio
import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import aiohttp
import msgspec
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.types import Receive, Scope, Send

from quire.server.errors import NO_JSON, ApiError, as_api_error, shutting_down
from quire.server.http.application import RequestLog, RequestRecord, client_id_in
from quire.server.http.relay import ClientGoneError, HeldBodies, Reply, relay, sent_headers, until_gone
from quire.server.options import ServerOptions

log = logging.getLogger(__name__)

PATHS = frozenset({"/v1/completions", "/v1/chat/completions"})
CONNECT_TIMEOUT_S = 5.0
PROBE_TIMEOUT_S = 2.0
PROBE_PAUSE_S = 1.0             # between two questions for the health of a server that has not begun to answer
MAX_MISSES = 3                  # questions in a row without a good answer; then it is given up
MAX_ANSWER_BYTES = 1 << 20      # a prefill server answers with one token
WAYS = ("apart", "short", "not_reached", "refused")
_ASKED = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip
# Fields of the answer, and what a single token has no room for.
_NOT_FOR_PREFILL = ("stream_options", "min_tokens", "max_completion_tokens", "deadline_ms")


T = TypeVar("T")


class NoSignError(OSError):
    """A server has a request, and gives no sign."""


# Behind one of these a request may go to another server: nothing of its answer has come. A timeout is its own kind.
_UNREACHED = aiohttp.ClientConnectorError | aiohttp.ConnectionTimeoutError | NoSignError


class RoutedServer:
    """A server, and the requests that are open there. `is_read_once`: its tickets were, as in `_is_read_once`."""

    def __init__(self, url: str) -> None:
        self.url, self.num_open, self.is_read_once = url.rstrip("/"), 0, False
        self._probe: asyncio.Task[bool] | None = None
        self._probed_s = -math.inf

    async def gives_sign(self, is_ready: Callable[["RoutedServer"], Coroutine[None, None, bool]]) -> bool:
        """Return whether the server is ready: it is asked once in PROBE_PAUSE_S, whatever waits for it."""
        now_s = time.monotonic()
        if self._probe is None or (self._probe.done() and now_s - self._probed_s >= PROBE_PAUSE_S):
            self._probe, self._probed_s = asyncio.create_task(is_ready(self)), now_s
        return await asyncio.shield(self._probe)    # others wait for it, too: the end of one request does not end it

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Count an open request."""
        self.num_open += 1
        try:
            yield
        finally:
            self.num_open -= 1


class RouteApp:
    """The router's application. `least_bytes`: bodies with fewer go to a decode server alone."""

    def __init__(
        self, prefill: Sequence[str], decode: Sequence[str], options: ServerOptions, least_bytes: int = 0
    ) -> None:
        self.is_draining = False
        self._prefill, self._decode = [*map(RoutedServer, prefill)], [*map(RoutedServer, decode)]
        self._least_bytes, self._bodies = least_bytes, HeldBodies(options)
        self._log, self.counts = RequestLog(options.log_requests), Counter[str]()
        self._session: aiohttp.ClientSession | None = None

    @property
    def session(self) -> aiohttp.ClientSession:
        """The client of all servers, made on the event loop."""
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0), auto_decompress=False,
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
                skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding"),
            )  # fmt: skip
        return self._session

    async def close(self) -> None:
        """Close the connections."""
        if self._session is not None:
            await self._session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; log it unless a server does."""
        began_s, sender = time.monotonic(), Reply(send)
        record = RequestRecord(client_request_id=client_id_in(scope))
        try:
            await self._dispatch(scope, receive, sender)
        except ClientGoneError:
            sender.is_forwarded = False
        except Exception as error:
            if sender.status is not None:
                raise       # too late for an error response: the connection is closed, so the client sees the end
            sender.is_forwarded = False
            if not isinstance(error, ApiError):
                log.exception("a request failed")
            failure = as_api_error(error)
            await JSONResponse(failure.body, failure.status, failure.headers)(scope, receive, sender.send)
        finally:
            if not sender.is_forwarded:
                self._log.write(scope, sender.status, time.monotonic() - began_s, record)

    async def _dispatch(self, scope: Scope, receive: Receive, sender: Reply) -> None:
        method, path = scope["method"], scope["path"]
        if method in ("GET", "HEAD") and (own := await self._own(path)) is not None:
            await own(scope, receive, sender.send)
            return
        if self.is_draining:
            raise shutting_down()
        if method != "POST":
            await until_gone(receive, self._decode_only(scope, b"", sender))
            return
        body = await self._bodies.read(receive)
        try:
            await until_gone(receive, self._post(scope, body, sender))
        finally:
            self._bodies.release(body)

    async def _own(self, path: str) -> Response | None:
        """Return the router's own answer to a GET; None for a path of the servers."""
        if path in ("/health", "/ping"):
            return JSONResponse({})
        if path == "/ready":
            found = await asyncio.gather(*(self._is_ready(target) for target in self._decode))
            is_ready = any(found) and not self.is_draining
            return JSONResponse({"ready": is_ready}, 200 if is_ready else 503)
        if path == "/metrics":
            lines = ["# TYPE quire:route_requests_total counter"]
            lines += [f'quire:route_requests_total{{way="{way}"}} {self.counts[way]}' for way in WAYS]
            return PlainTextResponse("\n".join([*lines, ""]))
        return None

    async def _is_ready(self, target: RoutedServer) -> bool:
        timeout = aiohttp.ClientTimeout(total=PROBE_TIMEOUT_S)
        try:
            async with self.session.get(f"{target.url}/health", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _watched(
        self, target: RoutedServer, asking: Coroutine[None, None, T], has_begun: Callable[[], bool] = lambda: False
    ) -> T:
        """Return what a request to a server gives. NoSignError, unless its answer `has_begun`, if it gives no sign."""
        task, num_missed = asyncio.create_task(asking), 0
        try:
            while not (await asyncio.wait((task,), timeout=PROBE_PAUSE_S))[0]:
                num_missed = 0 if has_begun() or await target.gives_sign(self._is_ready) else num_missed + 1
                if num_missed >= MAX_MISSES and not has_begun() and not task.done():
                    raise NoSignError("it gives no sign")
            return task.result()
        finally:
            task.cancel()
            await asyncio.wait((task,))

    async def _post(self, scope: Scope, body: bytes, sender: Reply) -> None:
        if scope["path"] not in PATHS:
            await self._decode_only(scope, body, sender)
            return
        if len(body) < self._least_bytes:
            self.counts["short"] += 1
            await self._decode_only(scope, body, sender)
            return
        try:
            fields = msgspec.json.decode(body)
        except NO_JSON:
            fields = None
        way, params = await self._prefilled(scope, fields)
        self.counts[way] += 1
        if params is None:
            await self._decode_only(scope, body, sender)
            return
        with_ticket = msgspec.json.encode(fields | {"kv_transfer_params": params})
        await self._decode_only(scope, with_ticket, sender, body if _is_read_once(params) else with_ticket)

    async def _prefilled(self, scope: Scope, fields: Any) -> tuple[str, dict[str, Any] | None]:  # noqa: ANN401 (JSON)
        """Return the way of a request, and what a prefill server's answer has for the decode server.

        None: the decode server computes the prompt. Another prefill server is tried once. A refusal of the request
        itself is the decode server's to tell, too.
        """
        if not isinstance(fields, dict) or _has_several_prompts(fields):
            return "refused", None
        has_one_sequence = fields.get("n") in (None, 1)
        asked = {name: value for name, value in fields.items() if name not in _NOT_FOR_PREFILL}
        asked |= {"max_tokens": 1, "stream": False, "kv_transfer_params": _ASKED}
        body, headers = msgspec.json.encode(asked), sent_headers(scope)
        for target in sorted(self._prefill, key=lambda each: each.num_open)[:2]:
            if target.is_read_once and not has_one_sequence:
                return "refused", None
            try:
                with target.opened():
                    asking = self._ask(target.url + scope["path"], body, headers)
                    status, answer = await self._watched(target, asking)
                if status >= 500 or status == 429:
                    continue
            except (aiohttp.ClientError, OSError, TimeoutError) as error:
                log.warning("prefill server %s: %s", target.url, error)
                continue
            params = _params_of(answer) if status == 200 else None
            if params is None:
                log.warning("prefill server %s gives no kv_transfer_params (status %d)", target.url, status)
                return "refused", None
            target.is_read_once = _is_read_once(params)
            return ("apart", params) if has_one_sequence or not target.is_read_once else ("refused", None)
        return "not_reached", None

    async def _ask(self, url: str, body: bytes, headers: list[tuple[str, str]]) -> tuple[int, bytes]:
        """Return the status and the body of a prefill server's answer."""
        async with self.session.post(url, data=body, headers=headers) as response:
            return response.status, await _read(response)

    async def _decode_only(self, scope: Scope, body: bytes, sender: Reply, again: bytes | None = None) -> None:
        """Send a request to the decode server with the fewest open requests; to another if that is not reached.

        `again`: the body for another server where one has had the first and gave no sign; None: the same.
        """
        last: Exception | None = None
        for target in sorted(self._decode, key=lambda each: each.num_open):
            try:
                with target.opened():
                    relaying = relay(self.session, target.url, scope, body, sender)
                    await self._watched(target, relaying, lambda: sender.status is not None)
                return
            except (aiohttp.ClientError, OSError) as error:
                log.warning("decode server %s: %s", target.url, error)
                last = error
                if not isinstance(error, _UNREACHED):
                    break       # it may have begun to answer
                if isinstance(error, NoSignError) and again is not None:
                    body = again
        if sender.status is not None and sender.is_stream:
            failure = _unreached(last)
            event = b"data: " + msgspec.json.encode(failure.body) + b"\n\n"
            await sender.send({"type": "http.response.body", "body": event})
            return
        raise _unreached(last)


async def _read(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of an answer, up to a bound."""
    answer = bytearray()
    async for piece in response.content.iter_any():
        answer += piece
        if len(answer) > MAX_ANSWER_BYTES:
            return b""
    return bytes(answer)


def _has_several_prompts(fields: dict[str, Any]) -> bool:
    """Return whether a completion has several prompts, of which a ticket is for one. Embeddings are prompts, too."""
    prompt = fields.get("prompt")
    has_list = isinstance(prompt, list) and len(prompt) > 1 and not isinstance(prompt[0], int)
    return has_list or fields.get("prompt_embeds") is not None


def _is_read_once(params: dict[str, Any]) -> bool:
    """Return whether a ticket names blocks, as vLLM's do: the first read frees them, and a later one may find others.

    Quire's tickets name none, and what is no longer there is computed.
    """
    return bool(params.get("remote_block_ids"))


def _params_of(answer: bytes) -> dict[str, Any] | None:
    """Return the field of a prefill server's answer, if it has one."""
    try:
        params = msgspec.json.decode(answer).get("kv_transfer_params")
    except (*NO_JSON, AttributeError):
        return None
    return params if isinstance(params, dict) and params else None


def _unreached(error: Exception | None) -> ApiError:
    told = "no decode server can be reached" if error is None else f"the decode server has ended: {error}"
    return ApiError(502, told[:500], type="server_error", code="decode_unreached", headers={"Retry-After": "1"})
