"""Formats of outputs: the interface between the routes and the optional reading of tool calls and reasoning.

A service has at most one `OutputFormats`, that of its model. Without one an output is content, and nothing else.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.requests.reasoning_gate import ReasoningMarkers
from quire.server.tools.output_events import Event
from quire.text.tools import Tool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Tools of a call, and how an output may use them."""

    tools: Sequence[Tool] = ()      # described to the model
    allowed: Sequence[Tool] = ()    # that an output may call; none if it may call no tool
    is_required: bool = False       # an output calls at least one
    is_parallel: bool = True        # an output may call more than one

    @property
    def is_constrained(self) -> bool:
        """Whether calls are not left to the model alone."""
        is_strict = any(tool["function"].get("strict") for tool in self.allowed)
        is_restricted = len(self.allowed) < len(self.tools) or not self.is_parallel
        return bool(self.allowed) and (self.is_required or is_strict or is_restricted)


NO_TOOLS = ToolUse()


class OutputParser(Protocol):
    """Reads one output, in pieces of any length."""

    def feed(self, text: str) -> list[Event]:
        """Return the events that the next piece completes."""

    def finish(self) -> list[Event]:
        """Return the events of the text that was held back, at the end of the output."""


@dataclass(frozen=True, slots=True)
class OutputReading:
    """Reading of the outputs of one prompt."""

    new_parser: Callable[[], OutputParser]
    call_id: Callable[[str, int], str]          # of the function's name and the index of a call
    shows_reasoning: bool = True
    reasoning_end: str | None = None            # text that ends reasoning, if outputs may begin with some
    reasoning: ReasoningMarkers | None = None   # stop strings are looked for behind it


class OutputFormats(Protocol):
    """Formats in which the served model writes tool calls and reasoning."""

    kept_token_ids: frozenset[int]              # special tokens that are markers of the formats
    call_format: str | None                     # name of the format of calls; None if none was recognized

    def reading(self, prompt: str, use: ToolUse, *, shows_reasoning: bool) -> OutputReading | None:
        """Return how to read outputs that continue a rendered prompt; None if they are content alone."""

    @property
    def bounds_reasoning(self) -> bool:
        """True if the number of reasoning tokens can be limited."""

    def grammar(
        self, prompt: str, use: ToolUse, constraint: StructuredOutputsParams | None, *,
        max_reasoning_tokens: int | None = None, is_for_check: bool = False,
    ) -> str | None:  # fmt: skip
        """Return the grammar of an output that continues a rendered prompt; None if it is free.

        `constraint`: of an output that calls no tool. `max_reasoning_tokens`: then the end of reasoning is forced.
        With `is_for_check` markers that are special tokens are texts, for a check without the model's tokenizer.
        ValueError for tools with schemas it cannot express.
        """
