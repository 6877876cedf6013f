"""Where the conversation is seen: a person's terminal, or a pipe that takes answers alone."""

import io
import sys
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import ClassVar, Literal

from rich.console import Console

Tone = Literal["plain", "faint", "error"]

_STYLES: dict[Tone, str | None] = {"plain": None, "faint": "dim", "error": "red"}
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}


class Screen(ABC):
    """Takes messages in and shows answers. Looks at `sys.stdin` and `sys.stdout` when they are needed."""

    is_interactive: ClassVar[bool]  # a person sees what went wrong and goes on; a pipe ends with the error

    def read(self) -> str:
        """Return the next message; a line that ends with a backslash goes on in the next one. EOFError at the end."""
        lines = [self._read_line("> ")]
        with suppress(EOFError):
            while lines[-1].endswith("\\"):
                lines[-1] = lines[-1].removesuffix("\\")
                lines.append(self._read_line(". "))
        return "\n".join(lines)

    def write(self, text: str) -> None:
        """Show the printable part of a piece of an answer at once."""
        sys.stdout.write(printable(text))
        sys.stdout.flush()

    @abstractmethod
    def show(self, text: str, tone: Tone = "plain") -> None:
        """Show a line that is no answer."""

    @abstractmethod
    def _read_line(self, prompt: str) -> str:
        """Return a line without its end. EOFError when there is none."""


class Terminal(Screen):
    """A person who types. Lines can be edited and called back where Python has readline."""

    is_interactive = True

    def __init__(self) -> None:
        self._console = Console(highlight=False)
        _load_line_editing()

    def show(self, text: str, tone: Tone = "plain") -> None:
        """Write in a style that tells it from an answer."""
        self._console.print(printable(text), style=_STYLES[tone], markup=False, emoji=False, soft_wrap=True)

    def _read_line(self, prompt: str) -> str:
        return input(prompt)


class Pipe(Screen):
    """Messages line by line from standard input, answers to standard output and nothing else there."""

    is_interactive = False

    def show(self, text: str, tone: Tone = "plain") -> None:
        """Write to standard error what a command was asked for; the rest is for people."""
        if tone == "plain":
            sys.stderr.write(printable(text) + "\n")

    def _read_line(self, prompt: str) -> str:
        line = sys.stdin.readline()
        if not line:
            raise EOFError
        return line.removesuffix("\n")


def printable(text: str) -> str:
    """Return the text without control characters but newline and tab: others could drive the terminal."""
    return text.translate(_CONTROLS)


def open_screen() -> Screen:
    """Return the terminal if a person sits at both ends, else the pipe. Neither fails at a character it cannot hold."""
    for stream in (sys.stdin, sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    return Terminal() if sys.stdin.isatty() and sys.stdout.isatty() else Pipe()


def _load_line_editing() -> None:
    """Let `input` edit lines, remember them, and take a paste of several lines as one message."""
    with suppress(ImportError):
        import readline  # noqa: PLC0415 (optional, and only for a terminal, to which loading it may write)

        readline.parse_and_bind("set enable-bracketed-paste on")
