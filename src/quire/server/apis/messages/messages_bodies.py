"""Bodies of the Messages API. Blocks of messages, and tools, are checked where they are converted."""

from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.core.sampling_params import MAX_TEMPERATURE
from quire.server.api.request_bodies import (
    TEXT,
    Body,
    Milliseconds,
    OtherFields,
    Schema,
    Strict,
    documented_as,
    integer,
    list_of,
    number,
)
from quire.server.errors import ApiError

_STRING: Schema = {"type": "string"}
_MARK: Schema = {
    "type": ["object", "null"],
    "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h"]}},
    "required": ["type"],
    "additionalProperties": False,
}
# Error types by status; 529 is Anthropic's own, which clients retry as they retry 503.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}

_BODY = {
    "type": "object",
    "properties": {
        "type": {"const": "error"},
        "error": {
            "type": "object",
            "properties": {"type": {"type": "string"}, "message": {"type": "string"}},
            "required": ["type", "message"],
            "additionalProperties": False,
        },
    },
    "required": ["type", "error"],
    "additionalProperties": False,
}
_CONTENT = {"application/json": {"schema": _BODY}}
ERRORS: dict[int | str, dict[str, Any]] = {  # statuses of every route, for openapi.json
    "4XX": {"description": "the request was refused", "content": _CONTENT},
    "5XX": {"description": "the request failed", "content": _CONTENT},
}


def _block(kind: str, **properties: Schema) -> Schema:
    """Return the schema of a block."""
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, "cache_control": _MARK} | properties,
        "required": ["type", *properties],
        "additionalProperties": False,
    }


_TEXT_BLOCKS = list_of(_block("text", text=_STRING))
_BLOCKS = list_of({"anyOf": [
    _block("text", text=_STRING),
    _block("thinking", thinking=_STRING),
    _block("tool_use", id=_STRING, name=_STRING, input={"type": "object", "maxProperties": 4}),
    _block("tool_result", tool_use_id=_STRING, content={"anyOf": [_STRING, _TEXT_BLOCKS]}),
]})  # fmt: skip
_OBJECT: Schema = {"type": ["object", "null"], "maxProperties": 4}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "description": {"type": ["string", "null"]},
        "input_schema": {"type": "object"},
    },
    "required": ["name"],
}
_CHOICE: Schema = {
    "type": ["object", "null"],
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": {"type": "string"},
        "disable_parallel_tool_use": {"type": ["boolean", "null"]},
    },
    "required": ["type"],
}
_FORMAT: Schema = {
    "type": ["object", "null"],
    "properties": {"type": {"const": "json_schema"}, "schema": {"type": "object"}},
    "required": ["type", "schema"],
}


class Effort(Strict):
    """Effort that an answer may take."""

    effort: str | None = None


class InputMessage(Strict):
    """One turn of a conversation. Only messages of the system have the last two fields, or may have no content."""

    role: str
    content: Annotated[Any, documented_as(_STRING, _BLOCKS)] = None
    clear_at: str | None = None
    output_config: Effort | None = None


class OutputConfig(Effort):
    """Form of the answer, and how much work it is worth."""

    format: Annotated[dict[str, Any] | None, documented_as(_FORMAT)] = None


class ConversationBody(Body):
    """Fields of both routes: everything in the prompt."""

    OTHERS: ClassVar[OtherFields] = OtherFields(
        unsupported={"compaction": (), "container": (), "mcp_servers": ([],), "thread": ({"type": "create"},)},
        without_effect=(
            "betas", "billing_policy", "diagnostics", "fallback_credit_token", "fallbacks", "inference_geo", "metadata",
            "service_tier", "speed", "user_profile_id", "workspace_id",
        ),
    )  # fmt: skip

    messages: Annotated[list[InputMessage], Field(min_length=1, fail_fast=True)]
    system: Annotated[Any, documented_as({"type": ["string", "null"]}, _TEXT_BLOCKS)] = None
    tools: Annotated[Any, documented_as(list_of(_TOOL), {"type": "null"})] = None
    tool_choice: Annotated[dict[str, Any] | None, documented_as(_CHOICE)] = None
    thinking: Annotated[dict[str, Any] | None, documented_as(_OBJECT)] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[dict[str, Any] | None, documented_as(_FORMAT)] = None     # its name in an earlier beta
    cache_control: Annotated[dict[str, Any] | None, documented_as(_MARK)] = None
    context_management: Annotated[dict[str, Any] | None, documented_as(_OBJECT)] = None


class MessagesBody(ConversationBody):
    """The body of /v1/messages."""

    max_tokens: Annotated[int, integer(0)]
    stop_sequences: Annotated[Any, documented_as(list_of(TEXT), {"type": "null"})] = None
    temperature: Annotated[float | None, number(0, MAX_TEMPERATURE)] = None
    top_p: Annotated[float | None, number(0, 1, above_low=True)] = None
    top_k: Annotated[int | None, integer(0)] = None
    ttft_deadline_ms: Milliseconds = None
    deadline_ms: Milliseconds = None
    stream: bool | None = None


def error_body(error: ApiError) -> dict[str, Any]:
    """Return the JSON body of an error."""
    kind = _TYPES.get(error.status, "api_error" if error.status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}
