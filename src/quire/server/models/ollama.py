"""Routes of Ollama's API over the models of a folder: /api/chat, generate, embed, tags, ps, show and version.

Each request is sent to its model's server in OpenAI's form. Streams are lines of JSON, the default here.
"""

import hashlib
import json
import math
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from starlette.responses import JSONResponse, Response
from starlette.types import Send

from quire.core.errors import ModelError
from quire.core.model_files import read_json_object
from quire.server.errors import NO_JSON, ApiError, invalid
from quire.server.models.model_process import ModelProcess
from quire.server.models.ollama_forms import (
    AnswerForm,
    Json,
    NameBody,
    OllamaChatBody,
    OllamaEmbedBody,
    chat_messages,
    keep_alive_s,
    now,
    sampling,
    tool_calls,
)
from quire.server.models.supervisor import Supervisor

API_VERSION = "0.13.0"      # the release of Ollama with these routes: clients ask for a least version
NDJSON = "application/x-ndjson"
PREFIX = "/api/"
_PASSED_ON = frozenset({b"authorization", b"x-api-key", b"x-request-id"})
_CHATS, _TEXTS, _VECTORS = "/v1/chat/completions", "/v1/completions", "/v1/embeddings"
_OF_CHATS = frozenset({"chat_template_kwargs", "reasoning_effort"})      # fields of chats alone
_POSTS = frozenset({"chat", "generate", "embed", "embeddings", "show"})

Headers = Iterable[tuple[bytes, bytes]]


class OllamaRoutes:
    """The routes of one supervisor."""

    def __init__(self, supervisor: Supervisor) -> None:
        self._supervisor = supervisor

    def get(self, path: str) -> Response | None:
        """Return the answer to a GET; None for another path."""
        names = self._supervisor.folder.names
        match path.removeprefix(PREFIX) if path.startswith(PREFIX) else None:
            case "version":
                return JSONResponse({"version": API_VERSION})
            case "tags":
                return JSONResponse({"models": [_listed(name, folder) for name, folder in names().items()]})
            case "ps":
                paths = names()
                loaded = [name for name in self._supervisor.places.loaded() if name in paths]
                return JSONResponse({"models": [self._running(name, paths[name]) for name in loaded]})
        return None

    async def post(self, path: str, body: bytes, headers: Headers, send: Send) -> None:
        """Answer a POST below /api. ApiError for what cannot be answered, before anything is sent."""
        kind = path.removeprefix(PREFIX)
        if kind not in _POSTS:
            raise ApiError(404, f"there is nothing at {path[:200]}; quire pull, list and rm manage models")
        passed = {name.decode(): value.decode("latin-1") for name, value in headers if name in _PASSED_ON}
        if kind == "show":
            asked = _decode(body, NameBody)
            name = self._supervisor.folder.served_name(asked.model or asked.name or "")
            await _send_json(_shown(name, self._supervisor.folder.path(name)), send)
        elif kind in ("embed", "embeddings"):
            await self._embed(_decode(body, OllamaEmbedBody), passed, send, is_old=kind == "embeddings")
        else:
            await self._generate(_decode(body, OllamaChatBody), passed, send, is_chat=kind == "chat")

    def _running(self, name: str, path: Path) -> Json:
        expires_s = self._supervisor.places.expires_s(name) - time.monotonic()
        listed = _listed(name, path)
        return listed | {"expires_at": now(expires_s), "size_vram": 0}

    async def _generate(self, body: OllamaChatBody, headers: dict[str, str], send: Send, *, is_chat: bool) -> None:
        began_s, name = time.monotonic(), self._supervisor.folder.served_name(body.model)
        form = AnswerForm(body.model, is_chat=is_chat)
        kept_s, made = keep_alive_s(body.keep_alive), sampling(body)
        if not (body.messages if is_chat else body.prompt):
            await self._load(name, kept_s, form, send)
            return
        options = {"stream": True, "stream_options": {"include_usage": True}} if body.stream else {}
        texts = {field: value for field, value in made.items() if field not in _OF_CHATS}
        requests = [
            (path, (made if path == _CHATS else texts) | options | fields | {"model": name})
            for path, fields in _requests(body, is_chat=is_chat)
        ]
        is_begun = False
        try:
            async with self._supervisor.lend(name, kept_s) as process:
                loaded_s = time.monotonic()
                async with await _first_answer(process, requests, headers) as response:
                    times_s = {"total_duration": -began_s, "load_duration": loaded_s - began_s}
                    if body.stream:
                        is_begun = True
                        await _stream(response, form, times_s, loaded_s, send)
                    else:
                        await _send_json(_whole(await response.json(), form, times_s), send)
        except ApiError as failure:
            if not is_begun:
                raise
            await _send_line({"error": failure.message}, send, is_last=True)

    async def _load(self, name: str, kept_s: float | None, form: AnswerForm, send: Send) -> None:
        """Load or, with `kept_s` of 0, unload a model: what a request without a text is for."""
        if kept_s == 0:
            self._supervisor.unload(name)
        else:
            async with self._supervisor.lend(name, kept_s):
                pass
        await _send_json(form.part("") | {"done": True, "done_reason": "unload" if kept_s == 0 else "load"}, send)

    async def _embed(self, body: OllamaEmbedBody, headers: dict[str, str], send: Send, *, is_old: bool) -> None:
        began_s, name = time.monotonic(), self._supervisor.folder.served_name(body.model)
        texts = body.prompt if is_old else body.input
        if texts is None:
            invalid(f"the body must have {'prompt' if is_old else 'input'}")
        request: Json = {"model": name, "input": texts}
        if body.dimensions is not None:
            request["dimensions"] = body.dimensions
        async with self._supervisor.lend(name, keep_alive_s(body.keep_alive)) as process:
            loaded_s = time.monotonic()
            async with await _first_answer(process, [(_VECTORS, request)], headers) as response:
                answer = await response.json()
        vectors = [each["embedding"] for each in answer["data"]]
        if is_old:
            await _send_json({"embedding": vectors[0]}, send)
            return
        total_s = time.monotonic() - began_s
        await _send_json({
            "model": body.model, "embeddings": vectors, "total_duration": round(total_s * 1e9),
            "load_duration": round((loaded_s - began_s) * 1e9),
            "prompt_eval_count": answer["usage"]["prompt_tokens"],
        }, send)  # fmt: skip


def _decode(body: bytes, kind: type[Any]) -> Any:  # noqa: ANN401 (of the type)
    try:
        return msgspec.json.decode(body, type=kind)
    except NO_JSON as error:
        raise ApiError(400, f"the body is not what this route takes: {error}") from error


def _requests(body: OllamaChatBody, *, is_chat: bool) -> list[tuple[str, Json]]:
    """Return the request in OpenAI's form; a second one is for a model that has no chat template."""
    if is_chat:
        tools = {"tools": body.tools} if body.tools else {}
        return [(_CHATS, {"messages": chat_messages(body.messages or ())} | tools)]
    prompt, system = body.prompt or "", body.system or ""
    plain = (_TEXTS, {"prompt": f"{system}\n\n{prompt}" if system else prompt})
    if body.raw:
        return [(_TEXTS, {"prompt": prompt})]
    first = [{"role": "system", "content": system}] if system else []
    return [(_CHATS, {"messages": [*first, {"role": "user", "content": prompt}]}), plain]


async def _first_answer(
    process: ModelProcess, requests: list[tuple[str, Json]], headers: dict[str, str]
) -> aiohttp.ClientResponse:
    """Return the answer to the first request, or to the second for want of a chat template. ApiError of a refusal."""
    for number, (path, request) in enumerate(requests, 1):
        response = await process.session.post(
            f"http://model{path}", data=msgspec.json.encode(request),
            headers=headers | {"Content-Type": "application/json"},
        )  # fmt: skip
        if response.status == 200:
            return response
        error = (await response.json())["error"]
        if number == len(requests) or "no chat template" not in error["message"]:
            told = {name: value for name, value in response.headers.items() if name.lower() == "retry-after"}
            raise ApiError(response.status, error["message"], code=error.get("code"), headers=told)
    raise AssertionError("there is a request")


def _whole(answer: Json, form: AnswerForm, times_s: dict[str, float]) -> Json:
    choice = answer["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    calls = tool_calls(message.get("tool_calls") or ())
    times_s = times_s | {"total_duration": times_s["total_duration"] + time.monotonic()}
    part = form.part(message.get("content") or "", message.get("reasoning") or "", calls)
    return part | form.end(choice.get("finish_reason"), answer.get("usage") or {}, times_s)


async def _stream(
    response: aiohttp.ClientResponse, form: AnswerForm, times_s: dict[str, float], asked_s: float, send: Send
) -> None:
    """Send an answer line by line, calls at its end; an error is the last line."""
    head = [(b"content-type", NDJSON.encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    calls: dict[int, Json] = {}
    reason, usage, first_s = None, dict[str, Any](), math.inf
    async for event in _events(response):
        if "error" in event:
            await _send_line({"error": event["error"]["message"]}, send, is_last=True)
            return
        usage = event.get("usage") or usage
        for choice in event["choices"]:
            delta = choice.get("delta") or {"content": choice.get("text")}
            reason = choice.get("finish_reason") or reason
            for call in delta.get("tool_calls") or ():
                known = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})["function"]
                known["name"] += call["function"].get("name") or ""
                known["arguments"] += call["function"].get("arguments") or ""
            content, thinking = delta.get("content") or "", delta.get("reasoning") or ""
            if content or thinking:
                first_s = min(first_s, time.monotonic())
                await _send_line(form.part(content, thinking), send)
    if calls:
        await _send_line(form.part("", "", tool_calls([calls[index] for index in sorted(calls)])), send)
    ended_s = time.monotonic()
    first_s = min(first_s, ended_s)
    times_s |= {"total_duration": times_s["total_duration"] + ended_s, "prompt_eval_duration": first_s - asked_s,
                "eval_duration": ended_s - first_s}  # fmt: skip
    await _send_line(form.part("") | form.end(reason, usage, times_s), send, is_last=True)


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[Json]:
    """Yield the events of a stream but for its end. Comments are left out."""
    held = b""
    async for piece in response.content.iter_any():
        *whole, held = (held + piece).split(b"\n\n")
        for each in whole:
            if each.startswith(b"data: ") and each != b"data: [DONE]":
                yield json.loads(each[len(b"data: ") :])


async def _send_line(line: Json, send: Send, *, is_last: bool = False) -> None:
    body = msgspec.json.encode(line) + b"\n"
    await send({"type": "http.response.body", "body": body, "more_body": not is_last})


async def _send_json(body: Json, send: Send) -> None:
    encoded = msgspec.json.encode(body)
    head = [(b"content-type", b"application/json"), (b"content-length", str(len(encoded)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": head})
    await send({"type": "http.response.body", "body": encoded})


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [each for each in path.iterdir() if each.is_file()]


def _config(path: Path) -> Json:
    """Return the config.json of a folder; nothing for a GGUF file, or a config that cannot be read."""
    try:
        return {} if path.is_file() else read_json_object(path, "config.json")
    except ModelError:
        return {}


def _listed(name: str, path: Path) -> Json:
    """Return the entry of a model in a list. `digest`: of names, sizes and times of its files, by which it is known."""
    found = [(each.name, each.stat()) for each in _files(path)]
    known = "\n".join(f"{each} {status.st_size} {status.st_mtime_ns}" for each, status in sorted(found))
    modified_s = max((status.st_mtime for _, status in found), default=0.0)
    return {
        "name": name,
        "model": name,
        "modified_at": now(modified_s - time.time()),
        "size": sum(status.st_size for _, status in found),
        "digest": hashlib.sha256(known.encode(errors="replace")).hexdigest(),
        "details": _details(name, path),
    }


def _details(name: str, path: Path) -> Json:
    family = str(_config(path).get("model_type") or "")
    return {
        "parent_model": "", "format": "gguf" if path.is_file() else "safetensors", "family": family,
        "families": [family] if family else [], "parameter_size": "",
        "quantization_level": name.rpartition(":")[2] if ":" in name else "",
    }  # fmt: skip


def _shown(name: str, path: Path) -> Json:
    config, listed = _config(path), _listed(name, path)
    family = listed["details"]["family"] or "unknown"
    sizes = {"context_length": "max_position_embeddings", "embedding_length": "hidden_size",
             "block_count": "num_hidden_layers"}  # fmt: skip
    found = {f"{family}.{name}": config[key] for name, key in sizes.items() if isinstance(config.get(key), int)}
    return {
        "modelfile": "", "parameters": "", "template": "", "details": listed["details"],
        "model_info": {"general.architecture": family} | found, "capabilities": ["completion", "tools"],
        "modified_at": listed["modified_at"],
    }  # fmt: skip
