"""Chats of all APIs: a conversation to text and to an engine request with a grammar, an output to its events."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

from msgspec.json import encode

from quire.core.checks import refuse
from quire.core.errors import InvalidRequestError
from quire.core.outputs import CompletionOutput
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.requests.image_prompts import NumberedImage
from quire.engine.requests.input_processor import CheckedParams, Truncation
from quire.server.api.preparation import ApiRequest, prepare
from quire.server.images.image_inputs import ImagePart, marked
from quire.server.service import AdmittedCall, Service
from quire.server.tools.call_reader import CallBegan, CallEnded, Event, Reasoning
from quire.server.tools.served_formats import OutputReading
from quire.text.conversation import Message
from quire.text.tokenizer import Tokenizer, incremental_detokenizer
from quire.text.tools import Tool

_FIELDS = frozenset(("messages", "tools", "add_generation_prompt", "continue_final_message"))
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
SLICE_CHARS = 1 << 12   # read at once
SLICE_TOKENS = 1 << 10  # counted at once


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatPrompt:
    """Messages of a chat, and options of rendering them. Messages have OpenAI's form; they are checked as rendered."""

    messages: Sequence[Message]
    tools: Sequence[Tool] = ()                  # described to the model
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    variables: Mapping[str, Any] = field(default_factory=dict)  # passed to the template
    adds_special_tokens: bool = False           # the template writes them itself
    truncation: Truncation | None = None        # how its tokens are truncated
    reads_images: bool = False                  # an ImagePart may be part of a content


class RenderedChat(NamedTuple):
    """The text of a conversation, with the marks of its images, and the images."""

    text: str
    images: Sequence[ImagePart]


async def rendered(
    service: Service, conversation: ChatPrompt, client_id: str, forced: Sequence[Tool] = ()
) -> RenderedChat:
    """Return the text of a conversation, by the chat template. InvalidRequestError if it cannot be rendered.

    The schemas of the tools that are `forced` are checked, too.
    """
    messages, images, marks = conversation.messages, list[ImagePart](), None
    if conversation.reads_images and service.client.inputs.images is not None:
        marks = service.client.inputs.images.marks
        messages, images = marked(messages, marks)
    text = await service.templates.render(
        messages,
        add_generation_prompt=conversation.add_generation_prompt,
        continue_final_message=conversation.continue_final_message,
        variables={**service.options.template_variables, **conversation.variables},
        tools=conversation.tools or None,
        forced=forced,
        limits=service.options,
        client_id=client_id,
        call_format=service.formats.call_format,
        marks=marks,
    )
    return RenderedChat(text, images)


async def numbered_images(
    service: Service, images: Sequence[ImagePart], admitted: AdmittedCall, client_id: str, cache_salt: str | None = None
) -> Sequence[NumberedImage]:
    """Return the images of a conversation as the model gets them; they count as memory of an admitted call."""
    prompts = service.client.inputs.images
    if not images or service.images is None or prompts is None:
        return ()
    return await service.images.numbered(images, prompts, admitted.reserve_image, client_id, cache_salt)


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
    service: Service, call: ApiRequest, conversation: ChatPrompt, admitted: AdmittedCall, *,
    shows_reasoning: bool = True,
) -> None:  # fmt: skip
    """Add the engine request for a conversation to a call, and the reading of its outputs."""
    text, images = await rendered(service, conversation, call.client_id, _forced_tools(call))
    call.rendered_s = time.monotonic()
    await _add_formats(service, call, text, shows_reasoning=shows_reasoning)
    numbered = await numbered_images(service, images, admitted, call.client_id, call.cache_salt)
    tokenize = partial(
        service.client.inputs.tokenize_rendered, add_special_tokens=conversation.adds_special_tokens,
        truncation=conversation.truncation, images=numbered,
    )  # fmt: skip
    await prepare(service, call, tokenize, [text])


def _forced_tools(call: ApiRequest) -> Sequence[Tool]:
    """Return the tools with schemas that become part of the grammar of the output."""
    use = call.tools
    if use.is_required or call.checked.params.structured_outputs is not None:
        return use.allowed
    return [tool for tool in use.allowed if tool["function"].get("strict")]


async def _add_formats(service: Service, call: ApiRequest, prompt: str, *, shows_reasoning: bool) -> None:
    """Add the reading of outputs that continue a rendered prompt to a call, and their grammar."""
    formats, use = service.formats, call.tools
    call.reading = formats.reading(prompt, use, shows_reasoning=shows_reasoning)
    answer = call.checked.params.structured_outputs
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
        params = replace(call.checked.params, structured_outputs=StructuredOutputsParams(grammar=grammar))
        return service.client.inputs.check_params(params, call.checked.beam, call.checked.priority, is_own=True)

    call.checked = await service.threads.run(len(grammar), checked, call.client_id)
    if use.is_constrained:  # a bound on reasoning alone cannot be at fault
        call.constraint_field = "tools"


class MessageReader:
    """Reads the text of one choice, and counts the tokens of its reasoning."""

    def __init__(self, reading: OutputReading, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int]) -> None:
        self._parser = reading.new_parser()
        self._num_calls = self._num_open = 0
        self._has_reasoning = False
        self._counter: _ReasoningCounter | None = None
        if reading.reasoning_end is not None and tokenizer is not None:
            self._counter = _ReasoningCounter(reading.reasoning_end, tokenizer, prompt_token_ids)

    @property
    def num_reasoning_tokens(self) -> int:
        """Count the tokens so far up to the end of the reasoning, its markers included; 0 without reasoning."""
        return self._counter.num_tokens if self._counter is not None and self._has_reasoning else 0

    @property
    def has_complete_calls(self) -> bool:
        """True if the message has tool calls so far, and each of them has ended."""
        return bool(self._num_calls and not self._num_open)

    def events(self, piece: CompletionOutput, *, is_last: bool) -> Iterator[list[Event]]:
        """Yield the events that the next piece of the output completes, a list for each slice of work."""
        if self._counter is not None:
            for start in range(0, len(piece.token_ids), SLICE_TOKENS):
                if start:
                    yield []
                self._counter.append(piece.token_ids[start : start + SLICE_TOKENS])
        text = piece.text
        for start in range(0, max(1, len(text)), SLICE_CHARS):
            events = self._parser.feed(text[start : start + SLICE_CHARS])
            if is_last and start + SLICE_CHARS >= len(text):
                events = [*events, *self._parser.finish()]
            for event in events:
                self._count(event)
            yield events

    def _count(self, event: Event) -> None:
        match event:
            case Reasoning():
                self._has_reasoning = True
            case CallBegan():
                self._num_calls += 1
                self._num_open += 1
            case CallEnded():
                self._num_open -= 1


class _ReasoningCounter:
    """Counts tokens up to the one that completes the marker at the end of the reasoning."""

    def __init__(self, end: str, tokenizer: Tokenizer, prompt_token_ids: Sequence[int]) -> None:
        self.num_tokens = 0
        self._end, self._tail, self._is_over = end, "", False
        self._detokenizer = incremental_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens=False)

    def append(self, token_ids: Sequence[int]) -> None:
        """Count the next tokens of the output."""
        if self._is_over:
            return
        for token_id in token_ids:
            self.num_tokens += 1
            self._tail += self._detokenizer.append((token_id,))
            if self._end in self._tail:
                self._is_over = True
                return
            self._tail = self._tail[-len(self._end) :]
