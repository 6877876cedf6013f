"""Chat requests of all APIs: a conversation, its text by the chat template, and its engine request with a grammar."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from msgspec.json import encode

from quire.core.checks import refuse
from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.requests.input_processor import CheckedParams, Truncation
from quire.server.api.api_request import ApiRequest
from quire.server.api.preparation import prepare
from quire.server.service import Service
from quire.text.conversation import Message
from quire.text.tools import Tool

_FIELDS = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Messages, and the options of rendering them. The form of messages is OpenAI's; they are checked as rendered."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()                  # described to the model
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # passed to the template
    adds_special_tokens: bool = False           # the template writes them itself
    truncation: Truncation | None = None        # how its tokens are truncated


async def rendered(
    service: Service, conversation: Conversation, client_id: str, forced: Sequence[Tool] = ()
) -> str:
    """Return the text of a conversation, by the chat template. InvalidRequestError if it cannot be rendered.

    The schemas of the tools that are `forced` are checked, too.
    """
    return await service.templates.render(
        conversation.messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables={**service.options.template_variables, **conversation.variables},
        tools=conversation.tools or None,
        forced=forced,
        limits=service.options,
        client_id=client_id,
        call_format=service.formats.call_format,
    )


def template_variables(
    effort: str | None, given: Mapping[str, Any] | None, *, param: str = "reasoning_effort"
) -> dict[str, Any]:
    """Return the variables of the template that a body gives, and those for the effort of its field `param`.

    InvalidRequestError for variables that are fields of bodies.
    """
    variables = _effort_variables(effort, param) | dict(given or {})
    for name in _FIELDS.intersection(variables):
        refuse("chat_template_kwargs", name, "variables that are no fields of the body")
    return variables


def _effort_variables(effort: str | None, param: str) -> dict[str, Any]:
    """Return the variables that depend on the effort; templates ignore those that they do not know.

    `enable_thinking` is that of Qwen3 and GLM, `thinking` of DeepSeek V3.1 and Granite, `reasoning_effort` of gpt-oss.
    """
    if effort is None:
        return {}
    if effort not in EFFORTS:
        refuse(param, effort, f"one of {', '.join(EFFORTS)}")
    if effort == "none":
        return {"enable_thinking": False, "thinking": False}
    return {"reasoning_effort": effort, "enable_thinking": True, "thinking": True}


async def prepare_chat(
    service: Service, call: ApiRequest, conversation: Conversation, *, shows_reasoning: bool = True
) -> None:
    """Add the engine request for a conversation to a call, and the reading of its outputs."""
    text = await rendered(service, conversation, call.client_id, _forced_tools(call))
    await _add_formats(service, call, text, shows_reasoning=shows_reasoning)
    tokenize = partial(
        service.client.inputs.tokenize_rendered, add_special_tokens=conversation.adds_special_tokens,
        truncation=conversation.truncation,
    )  # fmt: skip
    await prepare(service, call, tokenize, [text])


def _forced_tools(call: ApiRequest) -> Sequence[Tool]:
    """Return the tools with schemas that become part of the grammar of the output."""
    use = call.tools
    if use.is_required or call.params.structured_outputs is not None:
        return use.allowed
    return [tool for tool in use.allowed if tool["function"].get("strict")]


async def _add_formats(service: Service, call: ApiRequest, prompt: str, *, shows_reasoning: bool) -> None:
    """Add the reading of outputs that continue a rendered prompt to a call, and their grammar."""
    formats, use = service.formats, call.tools
    call.reading = formats.reading(prompt, use, shows_reasoning=shows_reasoning)
    answer = call.params.structured_outputs
    applies_at_once = service.grammars.applies_in_reasoning
    is_free = answer is None and call.max_reasoning_tokens is None
    if not use.is_constrained and (is_free or (answer is not None and applies_at_once)):
        return

    write = partial(formats.grammar, prompt, use, answer, max_reasoning_tokens=call.max_reasoning_tokens)

    def grammars() -> tuple[str | None, str | None]:
        """Return the grammar, and that of the check: none if no tool is part of it."""
        try:
            return write(), write(is_for_check=True) if _forced_tools(call) else None
        except InvalidRequestError:
            raise
        except ValueError as error:
            raise InvalidRequestError(f"tools cannot be enforced: {error}", param="tools") from error

    num_chars = len(prompt) + sum(len(encode(tool)) for tool in _forced_tools(call))
    grammar, own = await service.threads.run(num_chars, grammars, call.client_id)
    if grammar is None:
        return
    if own is not None:
        await service.grammars.check_grammar(own, "tools", call.client_id)

    def checked() -> CheckedParams:
        params = replace(call.params, structured_outputs=StructuredOutputsParams(grammar=grammar))
        return service.client.inputs.check_params(params, call.checked.beam, call.checked.priority, is_own=True)

    call.checked = await service.threads.run(len(grammar), checked, call.client_id)
    if use.is_constrained:  # a bound on reasoning alone cannot be at fault
        call.constraint_field = "tools"
