"""Request models: names and types of the fields of each body, in pydantic, for the checks and for openapi.json.

Types are strict: a bool is no integer and "5" is no number. null means the default everywhere. Ranges, and the elements
of lists, are only documented here: `SamplingParams` checks them for all routes. Bounds that depend on the server's
options are added to the schema by `quire.server.app`.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from quire.core.beam_search_params import MAX_LENGTH_PENALTY
from quire.core.checks import MAX_INT
from quire.core.sampling_params import (
    MAX_LOGIT_BIAS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MIN_SEED,
)
from quire.engine.input_processor import MAX_PRIORITY
from quire.text.tools import NAME_PATTERN

Schema = dict[str, Any]
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
_NULL: Schema = {"type": "null"}
_TEXT: Schema = {"type": "string", "minLength": 1}
_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INT}


def _as(*kinds: Schema) -> WithJsonSchema:
    """Document a field that pydantic checks only in part: a later check is faster, or its error clearer."""
    return WithJsonSchema({"anyOf": list(kinds)} if len(kinds) > 1 else kinds[0])


def _list_of(items: Schema, *, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


def _number(low: float, high: float, *, above_low: bool = False) -> WithJsonSchema:
    """Document a number in [low, high], or in (low, high] with `above_low`, or null."""
    return _as({"type": "number", "exclusiveMinimum" if above_low else "minimum": low, "maximum": high}, _NULL)


def _integer(low: int, high: int = MAX_INT) -> WithJsonSchema:
    return _as({"type": "integer", "minimum": low, "maximum": high}, _NULL)


def _checked_content(content: object) -> object:
    """Return valid content of a message: text, text parts or null."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return content
    raise PydanticCustomError("content", "Input should be a string, a list of text parts or null")


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


_PART: Schema = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number", "minimum": -MAX_LOGIT_BIAS, "maximum": MAX_LOGIT_BIAS},
}
_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "properties": {"type": {"const": "object"}}},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["type", "function"],
}
_CHOICE: Schema = {"type": "string", "enum": ["none", "auto", "required"]}
_NAMED_TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "function"},
        "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    },
    "required": ["type", "function"],
}
_ALLOWED_TOOLS: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "allowed_tools"},
        "allowed_tools": {
            "type": "object",
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": _list_of(_NAMED_TOOL, least=1)},
            "required": ["mode", "tools"],
        },
    },
    "required": ["type", "allowed_tools"],
}
_RESPONSE_FORMAT: Schema = {
    "type": "object",
    "properties": {"type": {"enum": ["text", "json_object", "json_schema", "structural_tag"]}},
    "required": ["type"],
}
_ONE_PROMPT = ({"type": "string"}, _list_of(_TOKEN, least=1))

Prompt = Annotated[Any, _as(*_ONE_PROMPT, _list_of({"anyOf": list(_ONE_PROMPT)}, least=1))]
Content = Annotated[Any, AfterValidator(_checked_content), _as({"type": "string"}, _list_of(_PART), _NULL)]
TokenIds = Annotated[Any, _as(_list_of(_TOKEN), _NULL)]
Salt = Annotated[str | None, _as(_TEXT, _NULL)]


class Strict(BaseModel):
    """An object without conversions between types."""

    model_config = ConfigDict(strict=True)


class Body(Strict):
    """Fields of every body."""

    model: str | None = None


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool | None = None


class ChatMessage(Strict):
    """One message of a conversation. Other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Content = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class TemplateOptions(Strict):
    """Options of rendering messages by the chat template."""

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[Any, _as(_list_of(_TOOL), _NULL)] = None
    reasoning_effort: Annotated[str | None, _as({"type": "string", "enum": [*EFFORTS]}, _NULL)] = None


class GenerationBody(Body):
    """Parameters of both kinds of completion."""

    n: Annotated[int | None, _integer(1)] = None
    temperature: Annotated[float | None, _number(0, MAX_TEMPERATURE)] = None
    top_p: Annotated[float | None, _number(0, 1, above_low=True)] = None
    top_k: Annotated[int | None, _integer(-1)] = None
    min_p: Annotated[float | None, _number(0, 1)] = None
    presence_penalty: Annotated[float | None, _number(-MAX_PENALTY, MAX_PENALTY)] = None
    frequency_penalty: Annotated[float | None, _number(-MAX_PENALTY, MAX_PENALTY)] = None
    repetition_penalty: Annotated[float | None, _number(0, MAX_REPETITION_PENALTY, above_low=True)] = None
    seed: Annotated[int | None, _integer(MIN_SEED, MAX_SEED)] = None
    max_tokens: Annotated[int | None, _integer(1)] = None
    min_tokens: Annotated[int | None, _integer(0)] = None
    ignore_eos: bool | None = None
    stop: Annotated[Any, _as(_TEXT, _list_of(_TEXT), _NULL)] = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[Any, _as(_BIAS, _NULL)] = None
    allowed_token_ids: Annotated[Any, _as(_list_of(_TOKEN, least=1), _NULL)] = None
    bad_words: Annotated[Any, _as(_list_of(_TEXT), _NULL)] = None
    prompt_logprobs: Annotated[int | None, _integer(0)] = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: Annotated[Any, _as(_RESPONSE_FORMAT, _NULL)] = None
    structured_outputs: Annotated[Any, _as({"type": "object"}, _NULL)] = None
    guided_json: Annotated[Any, _as({"type": "object"}, _TEXT, _NULL)] = None
    guided_regex: Annotated[str | None, _as(_TEXT, _NULL)] = None
    guided_choice: Annotated[Any, _as(_list_of(_TEXT, least=1), _NULL)] = None
    guided_grammar: Annotated[str | None, _as(_TEXT, _NULL)] = None
    guided_whitespace_pattern: Annotated[str | None, _as(_TEXT, _NULL)] = None
    structural_tag: Annotated[Any, _as({"type": "object"}, _TEXT, _NULL)] = None
    cache_salt: Salt = None
    priority: Annotated[int | None, _integer(-MAX_PRIORITY, MAX_PRIORITY)] = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float | None, _number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int | None, _integer(0)] = None  # 0 with echo
    echo: bool | None = None
    logprobs: Annotated[int | None, _integer(0)] = None
    best_of: Annotated[int | None, _integer(1)] = None


class ChatBody(GenerationBody, TemplateOptions):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, _integer(1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, _integer(0)] = None
    tool_choice: Annotated[Any, _as(_CHOICE, _NAMED_TOOL, _ALLOWED_TOOLS, _NULL)] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TokenizeBody(Body, TemplateOptions):
    """The body of /tokenize: a prompt, or messages as in a chat."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: Annotated[Any, _as(_list_of(_TOKEN))]


class PrefixBody(Body):
    """The body of /v1/prefixes."""

    prompt: Annotated[Any, _as(*_ONE_PROMPT)]
    cache_salt: Salt = None


def request_body(body_type: type[BaseModel]) -> Schema:
    """Return the OpenAPI entry of a body that the route decodes itself."""
    content = {"application/json": {"schema": schema_of(body_type)}}
    return {"requestBody": {"required": True, "content": content}}


def schema_of(body_type: type[BaseModel]) -> Schema:
    """Return the JSON schema of a body with all definitions inlined: openapi.json has no place for them."""
    schema = body_type.model_json_schema()
    definitions = schema.pop("$defs", {})

    def inlined(value: Any) -> Any:  # noqa: ANN401 (JSON)
        if isinstance(value, list):
            return [inlined(item) for item in value]
        if not isinstance(value, dict):
            return value
        if "$ref" in value:
            return inlined(definitions[value["$ref"].rpartition("/")[2]])
        return {key: inlined(item) for key, item in value.items()}

    whole: Schema = inlined(schema)
    return whole
