"""Request models: names and types of the fields of each body, in pydantic, for the checks and for openapi.json.

Types are strict: a bool is no integer and "5" is no number. null means the default everywhere. Ranges, and the elements
of lists, are only documented here: `SamplingParams` checks them for all routes. Bounds that depend on the server's
options are added to the schema by `quire.server.app`.
"""

from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field
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
from quire.server.api.bodies import NULL, TEXT, Body, Schema, Strict, documented_as, integer, list_of, number
from quire.server.chat.conversation import EFFORTS
from quire.server.openai.field_support import OTHER_FIELDS
from quire.text.tools import NAME_PATTERN

_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INT}


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
            "properties": {"mode": {"enum": ["auto", "required"]}, "tools": list_of(_NAMED_TOOL, least=1)},
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
_ONE_PROMPT = ({"type": "string"}, list_of(_TOKEN, least=1))

Prompt = Annotated[Any, documented_as(*_ONE_PROMPT, list_of({"anyOf": list(_ONE_PROMPT)}, least=1))]
Content = Annotated[Any, AfterValidator(_checked_content), documented_as({"type": "string"}, list_of(_PART), NULL)]
TokenIds = Annotated[Any, documented_as(list_of(_TOKEN), NULL)]
Salt = Annotated[str | None, documented_as(TEXT, NULL)]


class OpenAIBody(Body):
    """Fields of every body of these routes."""

    OTHERS = OTHER_FIELDS


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
    tools: Annotated[Any, documented_as(list_of(_TOOL), NULL)] = None
    reasoning_effort: Annotated[str | None, documented_as({"type": "string", "enum": [*EFFORTS]}, NULL)] = None


class GenerationBody(OpenAIBody):
    """Parameters of both kinds of completion."""

    NESTED: ClassVar = {"stream_options": StreamOptions}

    n: Annotated[int | None, integer(1)] = None
    temperature: Annotated[float | None, number(0, MAX_TEMPERATURE)] = None
    top_p: Annotated[float | None, number(0, 1, above_low=True)] = None
    top_k: Annotated[int | None, integer(-1)] = None
    min_p: Annotated[float | None, number(0, 1)] = None
    presence_penalty: Annotated[float | None, number(-MAX_PENALTY, MAX_PENALTY)] = None
    frequency_penalty: Annotated[float | None, number(-MAX_PENALTY, MAX_PENALTY)] = None
    repetition_penalty: Annotated[float | None, number(0, MAX_REPETITION_PENALTY, above_low=True)] = None
    seed: Annotated[int | None, integer(MIN_SEED, MAX_SEED)] = None
    max_tokens: Annotated[int | None, integer(1)] = None
    min_tokens: Annotated[int | None, integer(0)] = None
    ignore_eos: bool | None = None
    stop: Annotated[Any, documented_as(TEXT, list_of(TEXT), NULL)] = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[Any, documented_as(_BIAS, NULL)] = None
    allowed_token_ids: Annotated[Any, documented_as(list_of(_TOKEN, least=1), NULL)] = None
    bad_words: Annotated[Any, documented_as(list_of(TEXT), NULL)] = None
    prompt_logprobs: Annotated[int | None, integer(0)] = None
    return_token_ids: bool | None = None
    add_special_tokens: bool | None = None
    response_format: Annotated[Any, documented_as(_RESPONSE_FORMAT, NULL)] = None
    structured_outputs: Annotated[Any, documented_as({"type": "object"}, NULL)] = None
    guided_json: Annotated[Any, documented_as({"type": "object"}, TEXT, NULL)] = None
    guided_regex: Annotated[str | None, documented_as(TEXT, NULL)] = None
    guided_choice: Annotated[Any, documented_as(list_of(TEXT, least=1), NULL)] = None
    guided_grammar: Annotated[str | None, documented_as(TEXT, NULL)] = None
    guided_whitespace_pattern: Annotated[str | None, documented_as(TEXT, NULL)] = None
    structural_tag: Annotated[Any, documented_as({"type": "object"}, TEXT, NULL)] = None
    cache_salt: Salt = None
    priority: Annotated[int | None, integer(-MAX_PRIORITY, MAX_PRIORITY)] = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float | None, number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int | None, integer(0)] = None  # 0 with echo
    echo: bool | None = None
    logprobs: Annotated[int | None, integer(0)] = None
    best_of: Annotated[int | None, integer(1)] = None


class ChatBody(GenerationBody, TemplateOptions):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, integer(1)] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, integer(0)] = None
    tool_choice: Annotated[Any, documented_as(_CHOICE, _NAMED_TOOL, _ALLOWED_TOOLS, NULL)] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None


class TokenizeBody(OpenAIBody, TemplateOptions):
    """The body of /tokenize: a prompt, or messages as in a chat."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(OpenAIBody):
    """The body of /detokenize."""

    tokens: Annotated[Any, documented_as(list_of(_TOKEN))]


class PrefixBody(OpenAIBody):
    """The body of /v1/prefixes."""

    prompt: Annotated[Any, documented_as(*_ONE_PROMPT)]
    cache_salt: Salt = None
