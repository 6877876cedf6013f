"""Display of a conversation: a terminal, or a pipe that gets answers alone."""

import io
import sys
from contextlib import suppress
from typing import Literal

from rich.console import Console

Tone = Literal["plain", "faint", "error"]

_STYLES: dict[Tone, str | None] = {"plain": None, "faint": "dim", "error": "red"}
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Screen:
    """Input of messages and display of answers; `sys.stdin` and `sys.stdout` are looked up when they are needed.

    `is_interactive`: both ends are terminals; errors are shown and the chat continues, and lines can be edited and
    recalled where Python has readline; a pipe ends with the error. Neither fails at a character that it cannot hold.
    """

    def __init__(self) -> None:
        for stream in (sys.stdin, sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")
        self.is_interactive = sys.stdin.isatty() and sys.stdout.isatty()
        if self.is_interactive:
            with suppress(ImportError):
                import readline  # noqa: PLC0415 (optional, and only for a terminal, to which loading it may write)

                readline.parse_and_bind("set enable-bracketed-paste on")  # several lines are one message

    def read(self) -> str:
        """Return the next message; a line that ends with a backslash continues in the next one. EOFError at the end."""
        lines = [self._read_line("> ")]
        with suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(self._read_line(". "))
        return "\n".join(lines)

    def write(self, text: str) -> None:
        """Show the printable part of a piece of an answer at once."""
        sys.stdout.write(_printable(text))
        sys.stdout.flush()

    def write_aside(self, text: str) -> None:
        """Show a piece of what is no answer, such as reasoning, at once; in a pipe not at all."""
        if self.is_interactive and text:
            console = Console(highlight=False)
            console.print(_printable(text), style="dim", end="", markup=False, emoji=False, soft_wrap=True)

    def show(self, text: str, tone: Tone = "plain") -> None:
        """Show a line that is no answer, in the style of its tone; in a pipe, on standard error."""
        if self.is_interactive:
            console = Console(highlight=False)
            console.print(_printable(text), style=_STYLES[tone], markup=False, emoji=False, soft_wrap=True)
        elif tone == "plain":
            sys.stderr.write(_printable(text) + "\n")

    def _read_line(self, prompt: str) -> str:
        """Return a line without its end. EOFError when there is none."""
        if self.is_interactive:
            return input(prompt)
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def _printable(text: str) -> str:
    """Return the text without control characters but newline and tab: the rest could drive the terminal."""
    return text.translate(_CONTROLS)
