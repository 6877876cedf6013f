"""What clients may send, as pydantic models: names and types, for the checks and for openapi.json.

Types are strict: a bool is no integer and "5" is no number. null means the default everywhere. Ranges, and the elements
of lists, are the business of `SamplingParams`, which the parameters of every route become.
"""

from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema
from pydantic_core import PydanticCustomError


def _as(kind: Any) -> WithJsonSchema:  # noqa: ANN401 (a type, or a union of types)
    """Describe a field as a type that pydantic does not check: our own check is faster, or its error clearer."""
    return WithJsonSchema(TypeAdapter(kind).json_schema())


def _checked_content(content: object) -> object:
    """Let through what a message may say: text, text in parts, or nothing."""
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(_is_text_part(part) for part in content):
        return content
    raise PydanticCustomError("content", "Input should be a string, a list of text parts or null")


def _is_text_part(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


Prompt = Annotated[Any, _as(str | list[str] | list[int] | list[list[int]])]
Content = Annotated[Any, AfterValidator(_checked_content), _as(str | list[dict[str, str]] | None)]
TokenIds = Annotated[Any, _as(list[int] | None)]
Strings = Annotated[Any, _as(list[str] | None)]


class Body(BaseModel):
    """What every body has."""

    model_config = ConfigDict(strict=True)

    model: str | None = None


class StreamOptions(BaseModel):
    """How a stream ends."""

    model_config = ConfigDict(strict=True)

    include_usage: bool | None = None


class ChatMessage(BaseModel):
    """One message of a conversation. What else it has goes to the chat template as it is."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: str
    content: Content = None


Messages = Annotated[list[ChatMessage], Field(min_length=1, fail_fast=True)]


class TemplateOptions(BaseModel):
    """How a chat template writes messages."""

    model_config = ConfigDict(strict=True)

    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class GenerationBody(Body):
    """Parameters that both kinds of completion have."""

    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop: Annotated[Any, _as(str | list[str] | None)] = None
    stop_token_ids: TokenIds = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    logit_bias: Annotated[Any, _as(dict[str, float] | None)] = None
    allowed_token_ids: TokenIds = None
    bad_words: Strings = None
    prompt_logprobs: int | None = None
    return_token_ids: bool | None = None
    cache_salt: str | None = None
    priority: int | None = None
    use_beam_search: bool | None = None
    length_penalty: float | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None


class CompletionBody(GenerationBody):
    """The body of /v1/completions."""

    prompt: Prompt
    echo: bool | None = None
    logprobs: int | None = None
    best_of: int | None = None


class ChatBody(GenerationBody, TemplateOptions):
    """The body of /v1/chat/completions."""

    messages: Messages
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


class TokenizeBody(Body, TemplateOptions):
    """The body of /tokenize: a prompt, or messages as in a chat."""

    prompt: str | None = None
    add_special_tokens: bool | None = None
    messages: Messages | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Body):
    """The body of /detokenize."""

    tokens: Annotated[Any, _as(list[int])]


class PrefixBody(Body):
    """The body of /v1/prefixes."""

    prompt: Annotated[Any, _as(str | list[int])]
    cache_salt: str | None = None


def takes(body_type: type[BaseModel]) -> dict[str, Any]:
    """Describe a body that a route decodes by itself."""
    content = {"application/json": {"schema": schema_of(body_type)}}
    return {"requestBody": {"required": True, "content": content}}


def schema_of(body_type: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of a body in one piece: openapi.json has no place for definitions of its own."""
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

    whole: dict[str, Any] = inlined(schema)
    return whole
