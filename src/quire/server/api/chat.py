"""Conversation of a chat request, as every API gives it, and its text by the chat template."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.core.checks import refuse
from quire.engine.requests.input_processor import Truncation
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
