"""Request models: names and types of the fields of each body, in pydantic, for the checks and for openapi.json.

Types are as lenient as vLLM's: "3" and 3.0 are integers, "true" is true, true is the number 1. null means the default
everywhere. Ranges, and the elements of lists, are only documented here: `SamplingParams` checks them for all routes.
Bounds that depend on the server's options are added to the schema by `quire.server.app`.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import AfterValidator, ConfigDict, Field, WithJsonSchema
from pydantic_core import PydanticCustomError

from quire.core.checks import MAX_INT
from quire.core.logprob_table import PADDING
from quire.core.sampling_params import (
    MAX_LENGTH_PENALTY,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MIN_SEED,
)
from quire.engine.requests.input_processor import MAX_PRIORITY
from quire.server.api.chat import EFFORTS
from quire.server.api.request_bodies import (
    ELEMENT,
    MAX_HTTP_SEED,
    NULL,
    TEXT,
    Body,
    Milliseconds,
    OtherFields,
    Schema,
    Strict,
    documented_as,
    list_of,
)
from quire.text.conversation import PART_FIELDS, is_image, part_problem, part_reasoning, part_text
from quire.text.tools import NAME_PATTERN

# Not supported, with the values besides null that change nothing. A route may have one of them as a field of its own.
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    # OpenAI's
    "audio": (),
    "function_call": ("none", "auto"),         # without functions
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True,),            # without tools, as the next four
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": (),
    "tool_choice": ("none", "auto"),           # without tools
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    # vLLM's
    "best_of": (1,),
    "chat_template": (),
    "documents": ([],),
    "ec_transfer_params": ({},),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "logits_processors": ([],),
    "media_io_kwargs": ({},),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": ([],),
    "return_weight_versions": (False,),
    "structural_tag": (),
    "structured_outputs": (),
    "thinking_token_budget": (-1,),            # no limit
    "vllm_xargs": ({},),
    "watermarking": (False,),
}

# Labels of the client or the request, hints on storage and prices, padding and the size of chunks, options of refused
# features, options of routes and models that Quire does not have.
WITHOUT_EFFECT = frozenset((
    "guided_decoding_backend", "request_id", "stream_interval", "return_token_offsets",
    "routed_experts_prompt_start", "mm_payload", "return_mm_kwargs",
    "metadata", "prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "safety_identifier",
    "service_tier", "stream_options.include_obfuscation", "user",
))

OTHER_FIELDS = OtherFields(UNSUPPORTED, WITHOUT_EFFECT)
MAX_TTL_S = 31_536_000.0        # a session's longest life: a year
MAX_HTTP_TEMPERATURE = 2.0      # OpenAI's and vLLM's; Python takes more

# Other forms of a number and of a flag, loosely: pydantic reads them, and refuses what is none.
_NUMBER_FORMS: tuple[Schema, ...] = ({"type": "string", "pattern": "[0-9]"}, {"type": "boolean"}, NULL)
_FLAG_FORMS: tuple[Schema, ...] = (
    {"type": "integer", "minimum": 0, "maximum": 1}, {"type": "string", "pattern": "^[A-Za-z01]+$"}, NULL,
)  # fmt: skip
Flag = Annotated[bool | None, documented_as({"type": "boolean"}, *_FLAG_FORMS)]
Lenient = ConfigDict(strict=False)


def _integer(low: int, high: int = MAX_INT) -> WithJsonSchema:
    return documented_as({"type": "integer", "minimum": low, "maximum": high}, *_NUMBER_FORMS)


def _number(low: float, high: float, *, above_low: bool = False) -> WithJsonSchema:
    kind = {"type": "number", "exclusiveMinimum" if above_low else "minimum": low, "maximum": high}
    return documented_as(kind, *_NUMBER_FORMS)


_TOKEN: Schema = {"type": "integer", "minimum": 0, "maximum": MAX_INT}
_SCORED_TOKEN: Schema = {"type": "integer", "minimum": PADDING, "maximum": MAX_INT}


def _checked_content(content: object) -> object:
    """Return valid content of a message: text, parts of text, reasoning or images, or null."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise PydanticCustomError("content", "Input should be a string, a list of text parts or null")
    for index, part in enumerate(content):
        if part_text(part) is None and part_reasoning(part) is None and not is_image(part):
            raise PydanticCustomError(ELEMENT, "{problem}", {"problem": part_problem(f"[{index}]", part)})
    return content


def _part(kind: str, field: str) -> Schema:
    """Return the schema of a part with a text."""
    return {
        "type": "object",
        "properties": {"type": {"const": kind}, field: {"type": "string"}},
        "required": ["type", field],
    }


_IMAGE: Schema = {
    "type": "object",
    "properties": {
        "type": {"const": "image_url"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string"}, "detail": {"enum": ["auto", "low", "high"]}},
            "required": ["url"],
        },
    },
    "required": ["type", "image_url"],
}
_PART: Schema = {
    "anyOf": [{"type": "string"}, *(_part(kind, field) for kind, field in PART_FIELDS.items()), _IMAGE]
}
_BIAS: Schema = {
    "type": "object",
    "propertyNames": {"pattern": "^[0-9]{1,10}$"},
    "additionalProperties": {"type": "number"},   # clipped to -100 to 100
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
_REPETITION: Schema = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("max_pattern_size", "min_pattern_size", "min_count")},
    "additionalProperties": False,
}
_ONE_PROMPT = ({"type": "string"}, list_of(_TOKEN, least=1))

Prompt = Annotated[Any, documented_as(*_ONE_PROMPT, list_of({"anyOf": list(_ONE_PROMPT)}, least=1))]
Content = Annotated[Any, AfterValidator(_checked_content), documented_as({"type": "string"}, list_of(_PART), NULL)]
TokenIds = Annotated[Any, documented_as(list_of(_TOKEN), NULL)]
Salt = Annotated[str | None, documented_as(TEXT, NULL)]
SessionId = Annotated[str | None, documented_as(TEXT, NULL)]


class OpenAIBody(Body):
    """Fields of every body of these routes."""

    model_config = Lenient

    OTHERS = OTHER_FIELDS


class StreamOptions(Strict):
    """Options of a stream."""

    model_config = Lenient

    include_usage: Flag = None
    continuous_usage_stats: Flag = None


class ChatMessage(Strict):
    """One message of a conversation. Other fields are passed to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Content = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class TemplateOptions(Strict):
    """Options of rendering messages by the chat template."""

    model_config = Lenient

    add_generation_prompt: Flag = None
    continue_final_message: Flag = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: Annotated[Any, documented_as(list_of(_TOOL), NULL)] = None
    reasoning_effort: Annotated[str | None, documented_as({"type": "string", "enum": [*EFFORTS]}, NULL)] = None


class GenerationBody(OpenAIBody):
    """Parameters of both kinds of completion."""

    NESTED: ClassVar = {"stream_options": StreamOptions}

    n: Annotated[int | None, _integer(1)] = None
    temperature: Annotated[float | None, _number(0, MAX_HTTP_TEMPERATURE)] = None
    top_p: Annotated[float | None, _number(0, 1, above_low=True)] = None
    top_k: Annotated[int | None, _integer(-1)] = None
    min_p: Annotated[float | None, _number(0, 1)] = None
    presence_penalty: Annotated[float | None, _number(-MAX_PENALTY, MAX_PENALTY)] = None
    frequency_penalty: Annotated[float | None, _number(-MAX_PENALTY, MAX_PENALTY)] = None
    repetition_penalty: Annotated[float | None, _number(0, MAX_REPETITION_PENALTY, above_low=True)] = None
    seed: Annotated[int | None, _integer(MIN_SEED, MAX_HTTP_SEED)] = None
    max_tokens: Annotated[int | None, _integer(1)] = None
    min_tokens: Annotated[int | None, _integer(0)] = None
    ignore_eos: Flag = None
    stop: Annotated[Any, documented_as(TEXT, list_of(TEXT), NULL)] = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: Flag = None
    skip_special_tokens: Flag = None
    logit_bias: Annotated[Any, documented_as(_BIAS, NULL)] = None
    allowed_token_ids: Annotated[Any, documented_as(list_of(_TOKEN, least=1), NULL)] = None
    bad_words: Annotated[Any, documented_as(list_of(TEXT), NULL)] = None
    prompt_logprobs: Annotated[int | None, _integer(-1)] = None
    prompt_logprob_token_ids: Annotated[Any, documented_as(list_of(list_of(_SCORED_TOKEN)), NULL)] = None
    prompt_logprob_start: Annotated[int | None, _integer(0)] = None
    logprob_token_ids: TokenIds = None
    return_token_ids: Flag = None
    return_tokens_as_token_ids: Flag = None
    add_special_tokens: Flag = None
    spaces_between_special_tokens: Flag = None
    truncate_prompt_tokens: Annotated[int | None, _integer(-1)] = None
    truncation_side: Annotated[str | None, documented_as({"type": "string", "enum": ["left", "right"]}, NULL)] = None
    echo: Flag = None
    response_format: Annotated[Any, documented_as(_RESPONSE_FORMAT, NULL)] = None
    structured_outputs: Annotated[Any, documented_as({"type": "object"}, NULL)] = None
    guided_json: Annotated[Any, documented_as({"type": "object"}, TEXT, NULL)] = None
    guided_regex: Annotated[str | None, documented_as(TEXT, NULL)] = None
    guided_choice: Annotated[Any, documented_as(list_of(TEXT, least=1), NULL)] = None
    guided_grammar: Annotated[str | None, documented_as(TEXT, NULL)] = None
    guided_whitespace_pattern: Annotated[str | None, documented_as(TEXT, NULL)] = None
    structural_tag: Annotated[Any, documented_as({"type": "object"}, TEXT, NULL)] = None
    repetition_detection: Annotated[dict[str, Any] | None, documented_as(_REPETITION, NULL)] = None
    cache_salt: Salt = None
    kv_transfer_params: dict[str, Any] | None = None
    priority: Annotated[int | None, _integer(-MAX_PRIORITY, MAX_PRIORITY)] = None
    ttft_deadline_ms: Milliseconds = None
    deadline_ms: Milliseconds = None
    use_beam_search: Flag = None
    length_penalty: Annotated[float | None, _number(-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY)] = None
    stream: Flag = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Prompt
    max_tokens: Annotated[int | None, _integer(0)] = None  # 0 with echo
    logprobs: Annotated[int | None, _integer(-1)] = None
    best_of: Annotated[int | None, _integer(1)] = None
    session_id: SessionId = None


class ForkBody(GenerationBody):
    """The body of /v1/requests/{id}/fork: where to fork, and the fields of a completion but for its prompt."""

    prompt_index: Annotated[int | None, _integer(0)] = None
    index: Annotated[int | None, _integer(0)] = None
    at: Annotated[int | None, _integer(0)] = None
    max_tokens: Annotated[int | None, _integer(0)] = None  # 0 with echo
    logprobs: Annotated[int | None, _integer(-1)] = None


class ChatBody(GenerationBody, TemplateOptions):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, _integer(1)] = None
    logprobs: Flag = None
    top_logprobs: Annotated[int | None, _integer(-1)] = None
    tool_choice: Annotated[Any, documented_as(_CHOICE, _NAMED_TOOL, _ALLOWED_TOOLS, NULL)] = None
    parallel_tool_calls: Flag = None
    include_reasoning: Flag = None
    thinking_token_budget: Annotated[int | None, _integer(-1)] = None
    return_prompt_text: Flag = None
    documents: Annotated[Any, documented_as(list_of({"type": "object"}), NULL)] = None
    session_id: SessionId = None


class TokenizeBody(OpenAIBody, TemplateOptions):
    """The body of /tokenize: a prompt, or messages as in a chat."""

    prompt: str | None = None
    add_special_tokens: Flag = None
    messages: Messages | None = None
    return_token_strs: Flag = None


class DetokenizeBody(OpenAIBody):
    """The body of /detokenize."""

    tokens: Annotated[Any, documented_as(list_of(_TOKEN))]


class PrefixBody(OpenAIBody):
    """The body of /v1/prefixes."""

    prompt: Annotated[Any, documented_as(*_ONE_PROMPT)]
    cache_salt: Salt = None


class SessionExtendBody(OpenAIBody, TemplateOptions):
    """The body of /v1/sessions/{id}/extend: exactly one of prompt, messages and answer_id."""

    prompt: Annotated[Any, documented_as(*_ONE_PROMPT, NULL)] = None
    messages: Messages | None = None
    answer_id: Annotated[str | None, documented_as(TEXT, NULL)] = None
    prompt_index: Annotated[int | None, _integer(0)] = None
    index: Annotated[int | None, _integer(0)] = None
    add_special_tokens: Flag = None
    ttl: Annotated[float | None, _number(0, MAX_TTL_S, above_low=True)] = None


class SessionBody(SessionExtendBody):
    """The body of /v1/sessions: exactly one of prompt, messages, answer_id and restore."""

    restore: Annotated[str | None, documented_as(TEXT, NULL)] = None
    cache_salt: Salt = None


class SessionForkBody(OpenAIBody):
    """The body of /v1/sessions/{id}/fork."""

    at: Annotated[int | None, _integer(1)] = None
    ttl: Annotated[float | None, _number(0, MAX_TTL_S, above_low=True)] = None


class SessionSaveBody(OpenAIBody):
    """The body of /v1/sessions/{id}/save."""

    name: str


class SlotBody(OpenAIBody):
    """The body of /slots/{id_slot}, llama.cpp's."""

    filename: Annotated[str | None, documented_as(TEXT, NULL)] = None
    cache_salt: Salt = None
