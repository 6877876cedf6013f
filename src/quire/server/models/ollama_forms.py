"""Forms of Ollama's API: its requests as OpenAI's, and OpenAI's answers as its. Pure."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from quire.server.errors import ApiError, invalid

Json = dict[str, Any]

# Sampling by its names and OpenAI's. Others (num_ctx, num_thread, mirostat, ...) are settings of Ollama's own engine.
_OPTIONS = {name: name for name in (
    "temperature", "top_p", "top_k", "min_p", "seed", "stop", "presence_penalty", "frequency_penalty",
)} | {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens"}  # fmt: skip
_UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION = re.compile(r"([+-]?)((?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+)")
_REFUSED = ("suffix", "template", "logprobs", "top_logprobs")


class OllamaChatBody(msgspec.Struct):
    """The body of /api/chat, and with `prompt` of /api/generate."""

    model: str
    messages: list[Json] | None = None
    prompt: str | None = None
    system: str | None = None
    raw: bool = False
    stream: bool = True
    format: str | Json | None = None
    options: Json | None = None
    think: bool | str | None = None
    tools: list[Json] | None = None
    keep_alive: float | str | None = None
    images: list[str] | None = None
    suffix: str | None = None
    template: str | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class OllamaEmbedBody(msgspec.Struct):
    """The body of /api/embed, and with `prompt` of /api/embeddings."""

    model: str
    input: str | list[str] | None = None
    prompt: str | None = None
    dimensions: int | None = None
    keep_alive: float | str | None = None


class NameBody(msgspec.Struct):
    """The body of /api/show; `name` is an older name of `model`."""

    model: str | None = None
    name: str | None = None


def keep_alive_s(value: float | str | None) -> float | None:
    """Return seconds of "5m", "1h30m" or a number of them; below 0 is for ever. ApiError 400 for anything else."""
    if value is None:
        return None
    if isinstance(value, str):
        found = _DURATION.fullmatch(value)
        try:
            parts = re.findall(r"([\d.]+)([a-zµ]+)", found[2]) if found else []
            seconds = sum(float(number) * _UNITS_S[unit] for number, unit in parts) if found else float(value)
        except ValueError:
            invalid(f"keep_alive must be seconds, or a duration such as 5m, got {value!r:.80}", param="keep_alive")
        value = -seconds if found and found[1] == "-" else seconds
    if math.isnan(value):
        invalid("keep_alive must be a number", param="keep_alive")
    return math.inf if value < 0 else float(value)


def sampling(body: OllamaChatBody) -> Json:
    """Return what a request of OpenAI's API says of sampling and form. ApiError 400 for what is not served."""
    for name in _REFUSED:
        if getattr(body, name):
            invalid(f"{name} is not supported", param=name, code="unsupported_parameter")
    if body.images or any(message.get("images") for message in body.messages or ()):
        message = "images are not supported here: /v1/chat/completions has them"
        invalid(message, param="images", code="unsupported_parameter")
    made: Json = {}
    for name, value in (body.options or {}).items():
        if name in _OPTIONS and value is not None and not (name == "num_predict" and value in (-1, -2)):
            made[_OPTIONS[name]] = value
    if body.format == "json":
        made["response_format"] = {"type": "json_object"}
    elif body.format:
        if isinstance(body.format, str):
            invalid("format must be json, or a JSON schema", param="format")
        made["response_format"] = {"type": "json_schema", "json_schema": {"name": "format", "schema": body.format}}
    return made | _thinking(body.think)


def _thinking(think: bool | str | None) -> Json:
    if think is None:
        return {}
    if think is True:
        return {"chat_template_kwargs": {"enable_thinking": True, "thinking": True}}
    return {"reasoning_effort": think or "none"}


def chat_messages(messages: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return messages in OpenAI's form: calls get ids, and a tool's message the id of the call that it answers."""
    made: list[Json] = []
    unanswered: list[tuple[str, str]] = []      # names and ids of calls
    num_calls = 0
    for message in messages:
        role, content = message.get("role"), message.get("content") or ""
        one: Json = {"role": role, "content": content}
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            one["tool_calls"] = []
            for call in calls:
                function = call.get("function") if isinstance(call, dict) else None
                if not isinstance(function, dict) or not isinstance(function.get("name"), str):
                    invalid("tool_calls must be objects with a function that has a name", param="messages")
                id_ = f"call_{num_calls}"
                num_calls += 1
                unanswered.append((function["name"], id_))
                arguments = json.dumps(function.get("arguments") or {})
                one["tool_calls"].append(
                    {"id": id_, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
                )
        if role == "tool":
            named = message.get("tool_name") or message.get("name")
            place = next((place for place, (name, _) in enumerate(unanswered) if name == named), 0)
            one["tool_call_id"] = unanswered.pop(place)[1] if unanswered else "call_unknown"
        made.append(one)
    return made


def tool_calls(calls: Sequence[Mapping[str, Any]]) -> list[Json]:
    """Return the calls of an answer, their arguments as objects; text that is no object stays text in one."""
    made = []
    for call in calls:
        function = call["function"]
        try:
            arguments = json.loads(function.get("arguments") or "{}")
        except ValueError:
            arguments = {"arguments": function["arguments"]}
        made.append({"function": {"name": function.get("name", ""), "arguments": arguments}})
    return made


class AnswerForm:
    """Answers to one request, in lines as Ollama writes them. `is_chat`: with messages, else with texts."""

    def __init__(self, name: str, *, is_chat: bool) -> None:
        self._name, self._is_chat = name, is_chat

    def part(self, content: str, thinking: str = "", calls: Sequence[Json] = ()) -> Json:
        """Return a line of an answer that goes on, or the content of a whole one."""
        head = {"model": self._name, "created_at": now(), "done": False}
        if not self._is_chat:
            return head | {"response": content} | ({"thinking": thinking} if thinking else {})
        message: Json = {"role": "assistant", "content": content}
        if thinking:
            message["thinking"] = thinking
        if calls:
            message["tool_calls"] = list(calls)
        return head | {"message": message}

    def end(self, reason: str | None, usage: Mapping[str, Any], times_s: Mapping[str, float]) -> Json:
        """Return the fields of the last line. `times_s` in seconds, by their names there."""
        details = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        return {
            "done": True,
            "done_reason": "length" if reason == "length" else "stop",
            **{name: round(value * 1e9) for name, value in times_s.items()},
            "prompt_eval_count": details[0],
            "eval_count": details[1],
        }


def now(later_s: float = 0.0) -> str:
    """Return the time of day, or one that is so many seconds from it; that of a moment that never comes is far off."""
    if later_s == math.inf:
        return "9999-12-31T23:59:59Z"
    return datetime.fromtimestamp(datetime.now(UTC).timestamp() + later_s, UTC).isoformat().replace("+00:00", "Z")


def error_body(error: ApiError) -> Json:
    """Return the body of an error in Ollama's form: its text, without type and code."""
    return {"error": error.message}
