"""Preprocessing of chat requests: a conversation to an engine request, tokenized off the event loop."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from msgspec.json import encode

from quire.core.errors import InvalidRequestError
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.requests.input_processor import CheckedParams
from quire.server.api.api_request import ApiRequest
from quire.server.api.chat import Conversation, rendered
from quire.server.api.preparation import prepare
from quire.server.service import Service
from quire.text.tools import Tool


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
