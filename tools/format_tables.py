"""Tables of the formats of tool calls and of reasoning in docs/tools.md, made from their rows.

    python tools/format_tables.py    # writes them into the page

A table is between `<!-- formats: NAME -->` and `<!-- end of formats -->`.
"""

import re

from page_tables import Page, table
from quire.text.tool_formats.table import REASONING_FORMATS, TOOL_FORMATS
from quire.text.tool_formats.tool_format import ReasoningFormat, ToolFormat


def code(text: str) -> str:
    """Return a text as code in a cell of a Markdown table; a line break is written as two characters."""
    return "`" + text.replace("\n", "\\n").replace("|", "\\|") + "`"


def names(row: ToolFormat | ReasoningFormat) -> str:
    """Return the names of a format."""
    return ", ".join(code(name) for name in (row.name, *row.aliases))


def call(row: ToolFormat) -> str:
    """Return the way in which one call is written."""
    text = re.sub(r"\{\?([^}]*)\}", r"\1", row.call).replace("{:index}", ":{index}")
    return code(row.section[0] + text + row.section[1])


def tool_formats() -> str:
    """Return the table of the formats of tool calls."""
    rows = sorted(TOOL_FORMATS, key=lambda row: row.name)
    return table(
        ("name", "models", "a call", "a parameter"),
        *((names(row), row.models, call(row), code(row.parameter) if row.parameter else "") for row in rows),
    )


def reasoning_formats() -> str:
    """Return the table of the formats of reasoning."""
    rows = sorted(REASONING_FORMATS, key=lambda row: row.name)
    markers = (", ".join(f"{code(start)} {code(end)}" for start, end in row.markers) for row in rows)
    return table(
        ("name", "models", "markers"),
        *((names(row), row.models, texts) for row, texts in zip(rows, markers, strict=True)),
    )


TABLES = {"tools": tool_formats, "reasoning": reasoning_formats}


PAGE = Page("tools.md", "formats", TABLES)

if __name__ == "__main__":
    PAGE.write()
