"""Code blocks of README and docs, as a reader finds them: Python, commands, and blocks with a reason not to be run.

Python stands between ```python fences; commands, and nothing else, are indented, or stand between ```sh fences. A block
of commands with lines that begin with `$ ` is a session: the other lines are what the command before them prints, with
`...` for any lines. What cannot run or is no code has its reason before it, `<!-- not run: needs a GPU -->`.
"""

import re
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
REASON = re.compile(r"<!-- not run: (\S.*?) -->")
KINDS: dict[str, Literal["python", "commands"]] = {"": "commands", "sh": "commands", "python": "python"}


@dataclass(frozen=True, slots=True)
class Block:
    """One code block. `line` is that of its text, from 1; `reason` why it is not run, or None."""

    page: Path
    line: int
    language: str | None  # language of a fence; None: indented
    text: str
    reason: str | None

    @property
    def kind(self) -> Literal["python", "commands"] | None:
        """Way to run the block; None for a language that is not run."""
        return KINDS.get(self.language or "")

    @property
    def is_session(self) -> bool:
        """Return whether the block shows what its commands print."""
        return self.kind == "commands" and self.reason is None and self.text.startswith("$ ")

    @property
    def place(self) -> str:
        """Page and line."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


@dataclass(slots=True)
class Command:
    """One command of a block, several lines of it joined, and in a session the lines that it prints."""

    text: str
    output: list[str] | None = None


def blocks_of(page: Path) -> list[Block]:
    """Return the blocks of a page in their order."""
    blocks, reason = list[Block](), None
    for token in MarkdownIt().enable("table").parse(page.read_text(encoding="utf-8")):
        if token.type in ("fence", "code_block"):
            assert token.map is not None
            is_fence = token.type == "fence"
            language = token.info.strip() if is_fence else None
            blocks.append(Block(page, token.map[0] + 1 + is_fence, language, token.content, reason))
        found = REASON.search(token.content) if token.type == "html_block" else None
        reason = found[1] if found else reason if token.type == "html_block" else None
    return blocks


def commands_of(block: Block) -> Iterator[Command]:
    """Yield the commands of a block: a line, or as many as bash needs. Raises ValueError for one without an end."""
    lines, is_session = block.text.splitlines(), block.is_session
    current, pending = None, ""
    for line in lines:
        if not pending and not is_session and not line.strip():
            continue
        if is_session and not pending and not line.startswith("$ "):
            assert current is not None
            assert current.output is not None
            current.output.append(line)
            continue
        pending += line.removeprefix("$ ") if is_session and not pending else line
        if not _is_complete(pending):
            pending += "\n"
            continue
        if current is not None:
            yield current
        current, pending = Command(pending, [] if is_session else None), ""
    if pending:
        raise ValueError(f"{block.place}: no end of the command {pending!r}")
    if current is not None:
        yield current


def _is_complete(text: str) -> bool:
    return not text.endswith("\\") and not subprocess.run(
        ["bash", "-n", "-c", text], check=False, capture_output=True
    ).returncode


def printed_as(expected: list[str], printed: str) -> bool:
    """Return whether a command has printed these lines, `...` among them for any; blanks at the ends do not count."""
    pattern = r"\n".join(r"(?:.*\n)*?.*" if line.strip() == "..." else re.escape(line.rstrip()) for line in expected)
    return re.fullmatch(pattern, "\n".join(line.rstrip() for line in printed.strip("\n").splitlines())) is not None
