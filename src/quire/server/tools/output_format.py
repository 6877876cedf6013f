"""Entry point of tool calls and reasoning: formats, the parser of outputs, its events, grammars that force calls."""

from quire.server.call_grammars.forcing import forcing_grammar
from quire.server.tools.output_events import Arguments, CallBegan, CallEnded, Content, Event, Reasoning
from quire.server.tools.output_parser import OutputParser
from quire.server.tools.served_formats import served_formats
from quire.text.tool_formats.rows import ReasoningFormat, ToolFormat
from quire.text.tool_formats.table import (
    FALLBACK,
    REASONING_FORMATS,
    TOOL_FORMATS,
    UNSUPPORTED,
    find_format,
    find_reasoning,
)

__all__ = [
    "FALLBACK",
    "REASONING_FORMATS",
    "TOOL_FORMATS",
    "UNSUPPORTED",
    "Arguments",
    "CallBegan",
    "CallEnded",
    "Content",
    "Event",
    "OutputParser",
    "Reasoning",
    "ReasoningFormat",
    "ToolFormat",
    "find_format",
    "find_reasoning",
    "forcing_grammar",
    "served_formats",
]
