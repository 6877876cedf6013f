"""Body of /v1/responses: its fields, those that are known and not supported, and its tools as functions of a chat.

Types are strict, null means the default. Items and the format of the text are checked where they are converted. Tools
that a server would run itself are left out.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import chain
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, NoReturn

from quire.core.checks import check_optional_int, refuse, shown
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import (
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MIN_SEED,
    SamplingParams,
)
from quire.server.api.chat import EFFORTS
from quire.server.api.request_bodies import (
    NULL,
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
from quire.server.apis.responses.input_items import CUSTOM_ARGUMENT, qualified
from quire.server.errors import ApiError, invalid
from quire.text.tools import check_tools

log = logging.getLogger(__name__)

LOGPROBS = "message.output_text.logprobs"
# What `include` may name. Only LOGPROBS has an effect: the others are of tools and inputs that there are none of, and
# reasoning is never encrypted.
INCLUDABLE = (
    LOGPROBS, "reasoning.encrypted_content", "code_interpreter_call.outputs", "computer_call_output.output.image_url",
    "file_search_call.results", "message.input_image.image_url", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip

_OTHERS = OtherFields(
    unsupported={
        # OpenAI's
        "access_programs": (),
        "background_options": ({},),
        "image": ({},),
        "moderation": (),
        # vLLM's
        "kv_transfer_params": (),
        "media_io_kwargs": ({},),
        "mm_processor_kwargs": ({},),
        "previous_input_messages": ([],),
        "spaces_between_special_tokens": (True,),
        "structured_outputs": (),
        "vllm_xargs": ({},),
        "watermarking": (False,),
    },
    without_effect=frozenset((
        "prompt_cache_options", "request_id", "service_tier", "session_id", "stream_options.include_obfuscation",
    )),
)

_MAX_KINDS_LOGGED = 8
_ITEM: Schema = {"type": "object", "properties": {"type": {"type": "string"}}}
_TOOL: Schema = {"type": "object", "properties": {"type": {"type": "string"}}, "required": ["type"]}
_CHOICE: Schema = {"type": "string", "enum": ["none", "auto", "required"]}
log = logging.getLogger(__name__)

_FUNCTION_FIELDS = ("name", "description", "parameters", "strict")
_CUSTOM_PARAMETERS = {
    "type": "object",
    "properties": {CUSTOM_ARGUMENT: {"type": "string"}},
    "required": [CUSTOM_ARGUMENT],
}


class ResponsesStreamOptions(Strict, title="StreamOptions"):
    """Options of a stream, which have no effect."""


class ReasoningOptions(Strict, title="Reasoning"):
    """Options of reasoning. Summaries are never made: the reasoning itself is part of the output."""

    effort: Annotated[str | None, documented_as({"type": "string", "enum": [*EFFORTS]}, NULL)] = None
    summary: str | None = None
    generate_summary: str | None = None


class TextOptions(Strict):
    """Options of the text of an output."""

    format: Annotated[Any, documented_as({"type": "object"}, NULL)] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class ResponsesBody(Body):
    """The body of /v1/responses."""

    OTHERS = _OTHERS
    NESTED: ClassVar = {"stream_options": ResponsesStreamOptions}

    input: Annotated[Any, documented_as(TEXT, list_of(_ITEM, least=1))]
    instructions: str | None = None
    tools: Annotated[Any, documented_as(list_of(_TOOL), NULL)] = None
    tool_choice: Annotated[Any, documented_as(_CHOICE, _TOOL, NULL)] = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: Annotated[int | None, integer(1)] = None
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    include: Annotated[Any, documented_as(list_of({"type": "string", "enum": [*INCLUDABLE]}), NULL)] = None
    max_output_tokens: Annotated[int | None, integer(1)] = None
    temperature: Annotated[float | None, number(0, MAX_TEMPERATURE)] = None
    top_p: Annotated[float | None, number(0, 1, above_low=True)] = None
    top_logprobs: Annotated[int | None, integer(0)] = None
    truncation: Literal["auto", "disabled"] | None = None
    stream: bool | None = None
    stream_options: ResponsesStreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    safety_identifier: str | None = None
    # State, which is not stored
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    session_id: str | None = None
    conversation: Annotated[Any, documented_as(NULL)] = None
    prompt: Annotated[Any, documented_as(NULL)] = None
    context_management: Annotated[Any, documented_as(list_of({"type": "object"}), NULL)] = None
    ttft_deadline_ms: Milliseconds = None
    deadline_ms: Milliseconds = None
    # vLLM's
    top_k: Annotated[int | None, integer(-1)] = None
    min_p: Annotated[float | None, number(0, 1)] = None
    presence_penalty: Annotated[float | None, number(-MAX_PENALTY, MAX_PENALTY)] = None
    frequency_penalty: Annotated[float | None, number(-MAX_PENALTY, MAX_PENALTY)] = None
    repetition_penalty: Annotated[float | None, number(0, MAX_REPETITION_PENALTY, above_low=True)] = None
    seed: Annotated[int | None, integer(MIN_SEED, MAX_SEED)] = None
    stop: Annotated[Any, documented_as(TEXT, list_of(TEXT), NULL)] = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[Any, documented_as({"type": "object"}, NULL)] = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    include_reasoning: bool | None = None
    enable_response_messages: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: Annotated[str | None, documented_as(TEXT, NULL)] = None


# Parameters that a body gives as they are: all that it and SamplingParams name, but for deadlines (`deadlines_of`).
_SAME_NAMES = tuple(
    field.name for field in fields(SamplingParams)
    if field.name in ResponsesBody.model_fields.keys() - {"ttft_deadline_ms", "deadline_ms"}
)  # fmt: skip


def given_params(body: ResponsesBody) -> dict[str, object]:
    """Return the fields of SamplingParams that a body has. InvalidRequestError for an invalid one of its own."""
    given = {name: value for name in _SAME_NAMES if (value := getattr(body, name)) is not None}
    given["max_tokens"] = check_optional_int("max_output_tokens", body.max_output_tokens, 1)
    top_logprobs = check_optional_int("top_logprobs", body.top_logprobs, 0)
    check_optional_int("max_tool_calls", body.max_tool_calls, 1)
    include = [] if body.include is None else body.include
    if not isinstance(include, list) or not all(isinstance(each, str) and each in INCLUDABLE for each in include):
        refuse("include", include, f"a list of some of {', '.join(INCLUDABLE)}")
    if LOGPROBS in include:
        given["logprobs"] = top_logprobs or 0
    return given


def check_context_edits(body: ResponsesBody) -> None:
    """Warn of compactions that a body asks for: all of the input is kept. InvalidRequestError for what are none."""
    given = [] if body.context_management is None else body.context_management
    if not isinstance(given, list) or not all(isinstance(each, dict) and "type" in each for each in given):
        refuse("context_management", given, "a list of objects, each with a type")
    if given:
        kinds = ", ".join(shown(each["type"]) for each in given[:_MAX_KINDS_LOGGED])
        log.warning("%d entries of context_management are left out, all is kept: %s", len(given), kinds)


def check_stateless(body: ResponsesBody) -> None:
    """Raise ApiError 400 for a field that needs stored state.

    `store` is accepted: clients send true by default, and the response says false.
    """
    for name in ("previous_response_id", "conversation"):
        if getattr(body, name) is not None:
            _refuse_state(name, getattr(body, name), "send all items of the conversation as input")
    if body.background:
        _refuse_state("background", body.background, "use a stream, or wait for the response")
    if body.prompt is not None:
        _refuse_state("prompt", body.prompt, "send its text as instructions and input")


def _refuse_state(name: str, value: object, instead: str) -> NoReturn:
    message = f"{name} {shown(value)} is not supported: this server stores no responses and prompts; {instead}"
    raise ApiError(400, message, param=name, code="unsupported_parameter")


class Tools(NamedTuple):
    """Tools of a body, and how their calls are written in items."""

    functions: list[dict[str, Any]]                             # functions in the form of chats
    custom: frozenset[str] = frozenset()                        # names of those with one text as argument
    namespaces: Mapping[str, tuple[str, str]] = MappingProxyType({})    # and own names, by the names of functions


NO_TOOLS = Tools([])


def functions_of(given: Any, added: Sequence[Any], max_tools: int) -> Tools:  # noqa: ANN401 (JSON)
    """Return the tools of a body, without those that are neither functions nor custom tools, with one warning.

    `added`: those of its items. The tools of a namespace are functions, too, with its name in front of theirs.
    InvalidRequestError names the first invalid tool.
    """
    functions, custom, others = list[dict[str, Any]](), set[str](), list[str]()
    namespaces = dict[str, tuple[str, str]]()
    for where, namespace, tool in chain(_flat("tools", given), _flat("tools of items", added)):
        kind, name = tool["type"], tool.get("name")
        if kind not in ("function", "custom"):
            others.append(kind)
            continue
        if namespace is not None and isinstance(name, str):
            own, name = name, qualified(namespace, name)
            namespaces[name] = namespace, own
        functions.append(_function(where, tool | {"name": name}))
        if kind == "custom":
            custom.add(str(name))
    if len(functions) > max_tools:
        refuse("tools", functions, f"at most {max_tools} of them (max_tools), those of namespaces counted")
    if others:
        kinds = ", ".join(shown(kind) for kind in sorted(set(others))[:8])
        log.warning("%d tools of a request are ignored, which are neither functions nor custom: %s", len(others), kinds)
    return Tools(functions, frozenset(custom), namespaces)


def _flat(where: str, given: Any, namespace: str | None = None) -> Iterator[tuple[str, str | None, dict[str, Any]]]:  # noqa: ANN401
    """Yield the place, the namespace and the object of each tool."""
    if given is None:
        return
    if not isinstance(given, list | tuple):
        refuse(where, given, "a list")
    for index, tool in enumerate(given):
        place, kind = f"{where}[{index}]", tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(tool, dict) or not isinstance(kind, str):
            refuse(place, tool, "an object with a type")
        if kind != "namespace":
            yield place, namespace, tool
        elif namespace is not None or not isinstance(tool.get("name"), str):
            refuse(place, tool, "a namespace with a name, in none")
        else:
            yield from _flat(f"{place}.tools", tool.get("tools"), tool["name"])


def _function(where: str, tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool in the form of chats. A format of a custom tool's text is told to the model, and not forced."""
    function = {name: tool[name] for name in _FUNCTION_FIELDS if tool.get(name) is not None}
    if tool["type"] == "custom":
        function["parameters"] = _CUSTOM_PARAMETERS
        definition = tool["format"].get("definition") if isinstance(tool.get("format"), dict) else None
        if isinstance(definition, str):
            told = f"{function.get('description', '')}\n\nFormat of the input:\n{definition}"
            function["description"] = told.lstrip()
    try:
        (checked,) = check_tools([{"type": "function", "function": function}])
    except InvalidRequestError as error:
        message = str(error).replace("tools[0].function", where, 1)
        raise InvalidRequestError(message, param="tools") from error
    return checked


def choice_of(choice: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return the choice among tools in the form of chats, to be checked there: a custom tool is a function."""
    if not isinstance(choice, dict):
        return choice
    kind = choice.get("type")
    if kind == "allowed_tools" and isinstance(choice.get("tools"), list):
        return choice | {"tools": [_as_function(each) for each in choice["tools"]]}
    if kind not in ("function", "custom", "allowed_tools"):
        invalid(f"tool_choice.type must be function, custom or allowed_tools, got {shown(kind)}", param="tool_choice")
    return _as_function(choice)


def _as_function(choice: Any) -> Any:  # noqa: ANN401 (JSON)
    if not isinstance(choice, dict) or choice.get("type") not in ("function", "custom"):
        return choice
    name, namespace = choice.get("name"), choice.get("namespace")
    if isinstance(name, str) and isinstance(namespace, str):
        name = qualified(namespace, name)
    return choice | {"type": "function"} | ({} if name is None else {"name": name})
