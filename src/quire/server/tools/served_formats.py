"""Formats of the served model, how they are applied to a call, and the checked use of tools in a chat."""

import logging
import secrets
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quire.core.checks import shown
from quire.core.errors import ConfigError
from quire.core.options import parse_json_object
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.requests.reasoning_gate import ReasoningMarkers
from quire.grammar_writing.texts import after_reasoning, either
from quire.grammar_writing.writer import grammar_of
from quire.server.errors import invalid
from quire.server.options import ServerOptions
from quire.server.templates.template_renderer import TemplateRenderer
from quire.server.tools.call_grammar import bounded_reasoning, forcing_grammar, marker_id
from quire.server.tools.output_parser import OutputParser
from quire.text.tokenizer import Tokenizer
from quire.text.tool_formats.table import FALLBACK, find_format, find_reasoning
from quire.text.tool_formats.tool_format import ReasoningFormat, ToolFormat
from quire.text.tools import Tool, check_tools

_CHOICES = 'none, auto, required, {"type": "function", ...} or {"type": "allowed_tools", ...}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a call, and the use that an output may make of them."""

    tools: Sequence[Tool] = ()      # described to the model
    allowed: Sequence[Tool] = ()    # an output may call these; none if it may call no tool
    is_required: bool = False       # an output calls at least one
    is_parallel: bool = True        # an output may call more than one

    @property
    def is_constrained(self) -> bool:
        """True if calls are not left to the model alone."""
        is_strict = any(tool["function"].get("strict") for tool in self.allowed)
        is_restricted = len(self.allowed) < len(self.tools) or not self.is_parallel
        return bool(self.allowed) and (self.is_required or is_strict or is_restricted)


NO_TOOLS = ToolUse()


def tool_use(given: Any, choice: Any, *, is_parallel: bool) -> ToolUse:  # noqa: ANN401
    """Return the tools of a body and their use, in OpenAI's JSON.

    InvalidRequestError or ApiError 400 names the invalid field, `tools` or `tool_choice`.
    """
    tools = check_tools(given or [])
    if choice in (None, "auto", "none"):
        return ToolUse(tools, [] if choice == "none" else tools, is_parallel=is_parallel)
    kind = choice.get("type") if isinstance(choice, dict) else choice
    if kind not in ("required", "function", "allowed_tools"):
        invalid(f"tool_choice must be {_CHOICES}, got {shown(choice)}", param="tool_choice")
    if not tools:
        invalid(f"tool_choice {shown(kind)} needs tools", param="tool_choice")
    if kind == "required":
        return ToolUse(tools, tools, is_required=True, is_parallel=is_parallel)
    assert isinstance(choice, dict), "a choice of this kind is an object"
    if kind == "function":
        return ToolUse(tools, [_named("tool_choice", choice, tools)], is_required=True, is_parallel=False)
    return _allowed_tools(choice, tools, is_parallel=is_parallel)


def _allowed_tools(choice: Mapping[str, Any], tools: Sequence[Tool], *, is_parallel: bool) -> ToolUse:
    given = choice.get("allowed_tools", choice)  # Responses have its members one level higher
    named = given.get("tools") if isinstance(given, dict) else None
    mode = given.get("mode", "auto") if isinstance(given, dict) else None
    if mode not in ("auto", "required") or not isinstance(named, list) or not named:
        expected = '{"mode": "auto" or "required", "tools": [{"type": "function", ...}, ...]}'
        invalid(f"tool_choice.allowed_tools must be {expected}, got {shown(given)}", param="tool_choice")
    where = "tool_choice.allowed_tools.tools"
    chosen = {id(tool): tool for tool in (_named(f"{where}[{index}]", each, tools) for index, each in enumerate(named))}
    return ToolUse(tools, list(chosen.values()), is_required=mode == "required", is_parallel=is_parallel)


def _named(where: str, choice: object, tools: Sequence[Tool]) -> Tool:
    """Return the tool with the name in `{"type": "function", "function": {"name": ...}}`."""
    function = choice.get("function", choice) if isinstance(choice, dict) and choice.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        expected = '{"type": "function", "function": {"name": ...}}'
        invalid(f"{where} must be {expected}, got {shown(choice)}", param="tool_choice")
    found = next((tool for tool in tools if tool["function"]["name"] == name), None)
    if found is None:
        invalid(f"{where} names the function {shown(name)}, which is not in tools", param="tool_choice")
    return found


log = logging.getLogger(__name__)

_END_CHARS = 256        # end of a prompt in which reasoning may end
_MARKER_KEYS = ("reasoning_start_str", "reasoning_end_str")  # vLLM's names
_MISTRAL_ID_CHARS, _MISTRAL_ID_LENGTH = string.ascii_letters + string.digits, 9  # what its templates accept


@dataclass(frozen=True, slots=True)
class OutputReading:
    """Reading of the outputs of one prompt."""

    new_parser: Callable[[], OutputParser]
    call_id: Callable[[str, int], str]          # from the function's name and the index of a call
    shows_reasoning: bool = True
    reasoning_end: str | None = None            # text that ends reasoning, if outputs may begin with some
    reasoning: ReasoningMarkers | None = None   # stop strings are looked for behind it


class ServedFormats:
    """Formats in which the served model writes tool calls and reasoning.

    ConfigError if the options name one that does not exist.
    `templates` renders the prompts, and knows whether they describe a format to the model.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, options: ServerOptions, templates: TemplateRenderer | None = None
    ) -> None:
        template = None if tokenizer is None else "\n".join(tokenizer.chat_templates.values()) or None
        try:
            self.calls = find_format(options.tool_call_parser, template)
            self.reasoning = find_reasoning(options.reasoning_parser, template)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        _check_markers(options.reasoning_config, self.reasoning)
        rows = (self.calls, self.reasoning)
        self._channels = find_format("gpt_oss") if any(row and row.has_channels for row in rows) else None
        self.call_format = None if self.calls is None else self.calls.name
        self._templates = templates if options.tool_call_parser == "auto" else None
        self._special = {} if tokenizer is None else {
            tokenizer.token_text(token_id): token_id for token_id in tokenizer.grammar_special_token_ids
        }  # fmt: skip
        texts = (self.calls or FALLBACK).marker_texts
        texts += () if self.reasoning is None else self.reasoning.marker_texts
        self.kept_token_ids = frozenset() if tokenizer is None else tokenizer.special_token_ids & {
            token_id for special, token_id in self._special.items() if any(special in text for text in texts)
        }
        names = [None if row is None else row.name for row in rows]
        log.info("format of tool calls: %s; of reasoning: %s", *(name or "none" for name in names))
        if options.enable_auto_tool_choice:
            log.info("enable_auto_tool_choice has no effect: tool_choice auto is always served")

    def reading(self, prompt: str, use: ToolUse, *, shows_reasoning: bool) -> OutputReading | None:
        """Return how to read outputs that continue a rendered prompt; None if they are content alone."""
        calls, reasoning = self._calls_of(use), self.reasoning
        if calls is None and reasoning is None:
            return None
        starts_in_reasoning = reasoning is not None and reasoning.starts(prompt)
        return OutputReading(
            new_parser=lambda: OutputParser(calls, use.allowed, starts_in_reasoning, reasoning),
            call_id=partial(_call_id, calls),
            shows_reasoning=shows_reasoning,
            reasoning_end=None if reasoning is None or reasoning.has_channels else reasoning.markers[0][1],
            reasoning=None if reasoning is None else _markers(reasoning, is_open=starts_in_reasoning),
        )

    @property
    def bounds_reasoning(self) -> bool:
        """True if the number of reasoning tokens can be limited: its markers are one special token each."""
        row = self.reasoning
        if row is None or row.has_channels:
            return False
        return all(marker_id(text, self._special) is not None for text in row.markers[0])

    def grammar(
        self, prompt: str, use: ToolUse, constraint: StructuredOutputsParams | None, *,
        max_reasoning_tokens: int | None = None, is_for_check: bool = False,
    ) -> str | None:  # fmt: skip
        """Return the grammar of an output that continues a rendered prompt; None if it is free.

        `constraint`: of an output that calls no tool. `max_reasoning_tokens`: then the end of reasoning is forced.
        With `is_for_check` markers that are special tokens are texts, for a check without the model's tokenizer. Calls
        that may come are constrained where they begin, and what an output has to be follows its reasoning.
        ValueError for tools with schemas it cannot express.
        """
        answer = None if constraint is None else grammar_of(constraint)
        calls, reasoning = self._calls_of(use), self.reasoning
        special = {} if is_for_check else self._special
        if reasoning is not None and (reasoning.has_channels or self._is_over(prompt)):
            reasoning = None
        force = partial(forcing_grammar, calls, use.allowed, is_parallel=use.is_parallel, special=special)
        if answer is not None and self._channels is not None and not use.is_required:
            return forcing_grammar(self._channels, use.allowed if calls else (), special=special, answer=answer)
        grammar, is_bounded = answer, reasoning is not None and max_reasoning_tokens is not None
        if answer is None and calls is not None and use.is_constrained and not use.is_required:
            grammar = force(is_triggered=True, reasoning=None if is_bounded else reasoning)
            if not is_bounded:
                return grammar
        if use.is_required:
            grammar = force()
        elif answer is not None and calls is not None:
            grammar = either(force(), answer)
        if reasoning is None:
            return grammar
        start, end = reasoning.markers[0]
        starts = reasoning.starts(prompt)
        if grammar is not None:
            return after_reasoning(
                grammar, end, start_marker=None if starts else start, special=special, max_tokens=max_reasoning_tokens
            )
        if max_reasoning_tokens is None:
            return None
        first, last = (marker_id(text, self._special) for text in (start, end))
        assert last is not None, "bounds_reasoning says whether there is such a token"
        return bounded_reasoning(last, None if starts else first, max_reasoning_tokens)

    def _is_over(self, prompt: str) -> bool:
        """Return whether a rendered prompt ends with the end of reasoning, which an output does not begin again."""
        assert self.reasoning is not None, "only reasoning can be over"
        return prompt[-_END_CHARS:].rstrip().endswith(tuple(end.rstrip() for _, end in self.reasoning.markers))

    def _calls_of(self, use: ToolUse) -> ToolFormat | None:
        """Return the format of the calls in an output that may use tools so."""
        if not use.allowed:
            return None
        is_told = self._templates is not None and self._templates.tells_format  # the prompt has just been rendered
        return self.calls or (FALLBACK if use.is_required or is_told else None)


def _markers(reasoning: ReasoningFormat, *, is_open: bool) -> ReasoningMarkers:
    """Return the markers of a format, without the white space that is written around them."""
    starts, ends = (tuple(text.strip() for text in texts) for texts in zip(*reasoning.markers, strict=True))
    others = tuple(text.strip() for text in reasoning.ends)
    return ReasoningMarkers(starts, (*ends, *others), is_open, recurs=reasoning.has_channels)


def _check_markers(config: str, reasoning: ReasoningFormat | None) -> None:
    """Raise ConfigError unless a reasoning_config, as JSON, names no markers but those of the format."""
    given = parse_json_object(config, "reasoning_config")
    if not given:
        return
    if reasoning is None:
        raise ConfigError("reasoning_config: the outputs of this model have no reasoning (see reasoning_parser)")
    markers = dict(zip(_MARKER_KEYS, reasoning.markers[0], strict=True))
    for key, value in given.items():
        if key not in markers:
            raise ConfigError(f"reasoning_config: {key!r:.80} is unknown; the keys are {', '.join(_MARKER_KEYS)}")
        if not isinstance(value, str) or value.strip() != markers[key].strip():
            raise ConfigError(
                f"reasoning_config: {key} must be {markers[key].strip()!r}, the marker of the format "
                f"{reasoning.name} (reasoning_parser), got {value!r:.80}"
            )


def _call_id(row: ToolFormat | None, name: str, index: int) -> str:
    """Return a new id of a call, in the form that the model's template expects where it expects one."""
    family = "" if row is None else row.name
    if family.startswith("mistral"):
        return "".join(secrets.choice(_MISTRAL_ID_CHARS) for _ in range(_MISTRAL_ID_LENGTH))
    if family.startswith("kimi"):
        return f"functions.{name}:{index}"
    return f"call_{secrets.token_hex(12)}"
