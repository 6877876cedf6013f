"""Outputs that a parser could read again and again: the text that it looks at for each piece is bounded."""

import re
from collections.abc import Iterator

import pytest

from quire.server.tools.output_parser import OutputParser
from quire.text.tool_formats.table import REASONING_FORMATS, TOOL_FORMATS
from quire.text.tool_formats.tool_format import ToolFormat

LENGTH = 8_000  # characters
PIECE = 16
MOST = 2_048  # characters of a piece with what was held back: names of 128, keys of 256, runs of 32 blanks
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {"type": "object"}}}}}]


def hostile(row: ToolFormat) -> Iterator[str]:
    """Yield outputs of what a format's calls begin with, over and over, or once with a long rest."""
    head = re.split(r"\{(?:arguments|parameters|calls?|list)\}", row.section[0] + row.call)[0].replace("{name}", "f")
    parameter = re.sub(r"\{(?:key|type)\}", "a", row.parameter.partition("{value}")[0])
    for begun in (head, head + parameter, head + "{", head + "[", head + '{"name": "f", "arguments": {"a": "'):
        yield begun
        for piece in (
            begun,
            *{text[:-1] for text in row.marker_texts if len(text) > 1},
            " ",
            "<",
            "{",
            "[",
            '"',
            "a",
            "\\",
        ):
            yield begun + piece * (LENGTH // max(1, len(piece)))


@pytest.mark.parametrize("row", TOOL_FORMATS, ids=lambda row: row.name)
def test_work_is_linear_in_the_output(row: ToolFormat) -> None:
    """Patterns see the buffer of the reader, at each piece once for each of the events."""
    highest = 0
    for output in hostile(row):
        parser = OutputParser(row, TOOLS, reasoning=REASONING_FORMATS[-1])
        for start in range(0, min(len(output), LENGTH), PIECE):
            parser.feed(output[start : start + PIECE])
            highest = max(highest, len(parser._reader.buffer) - parser._reader.at)
        parser.finish()
    assert highest <= MOST
