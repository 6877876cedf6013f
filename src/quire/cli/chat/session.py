"""Session of a chat: a line is a command or a question, and a question is sent to the back end.

A failed command or question changes nothing else: a terminal shows the error and continues, a pipe ends with it. A pipe
gets answers alone.
"""

import io
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Literal

from rich.console import Console

from quire.cli.chat.chat_history import ChatAnswer, ChatBackEnd, ChatError, ChatHistory, Exchange, Update
from quire.core.errors import ContextLengthError, EngineError

Tone = Literal["plain", "faint", "error"]

_STYLES: dict[Tone, str | None] = {"plain": None, "faint": "dim", "error": "red"}
_CONTROLS = {code: None for code in (*range(0x20), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
HELP = """\
/help          this list
/reset         forget what was said; the system message stays
/system TEXT   set the system message; without TEXT, remove it
/retry         ask the last question again
/save FILE     write the messages, one JSON object per line
/stats         tokens and times of the last answer
/exit, /quit   leave; so does Ctrl-D
A line that ends with a backslash goes on in the next one; // begins a message that starts with /.
Ctrl-C stops an answer, which keeps what it has, or clears the line; twice leaves."""


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


class ChatSession:
    """One conversation, from the first line to the last."""

    def __init__(self, back_end: ChatBackEnd, screen: Screen, conversation: ChatHistory) -> None:
        self.conversation = conversation
        self._back_end = back_end
        self._screen = screen
        self._last_answer: ChatAnswer | None = None
        self._commands: dict[str, Callable[[str], None]] = {
            "/help": lambda _: self._screen.show(HELP),
            "/reset": self._reset,
            "/system": self._set_system,
            "/retry": self._retry,
            "/save": self._save,
            "/stats": self._show_stats,
            "/exit": self._leave,
            "/quit": self._leave,
        }

    def run(self) -> None:
        """Talk until the input ends or the user leaves."""
        self._screen.show(self._back_end.greeting, "faint")
        self._screen.show("/help lists commands, Ctrl-D leaves.", "faint")
        was_interrupted = False
        while True:
            try:
                self._take(self._screen.read())
                was_interrupted = False
            except EOFError:
                return
            except KeyboardInterrupt:  # also one that was meant for an answer that ended just then
                if not self._screen.is_interactive:
                    raise
                if was_interrupted:
                    return
                was_interrupted = True
                self._screen.show("\nCtrl-C again, or Ctrl-D, leaves.", "faint")

    def _take(self, line: str) -> None:
        try:
            if line.startswith("/") and not line.startswith("//"):
                self._command(line)
            elif line.strip():
                self._ask(line.removeprefix("/") if line.startswith("//") else line)
        except (EngineError, OSError) as error:
            if not self._screen.is_interactive or isinstance(error, BrokenPipeError):
                raise
            self._screen.show(str(error), "error")

    def _command(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command = self._commands.get(name.strip())
        if command is None:
            raise ChatError(f"there is no command {name}; /help lists them, // begins a message that starts with /")
        command(argument.strip())

    # --- questions ------------------------------------------------------------------------------------------------

    def _ask(self, question: str, *, instead_of_last: bool = False) -> None:
        """Ask, show the answer as it arrives, and keep the result."""
        answer = self._last_answer = ChatAnswer(time.monotonic())

        is_reasoning = False

        def take(update: Update) -> None:
            nonlocal is_reasoning
            answer.take(update, time.monotonic())
            self._screen.write_aside(update.reasoning)
            if update.text and is_reasoning:
                self._screen.write_aside("\n")
            is_reasoning = bool(update.reasoning) or (is_reasoning and not update.text)
            self._screen.write(update.text)

        try:
            self._back_end.answer(self.conversation.messages(question, instead_of_last=instead_of_last), take)
            answer.is_whole = True
        except ContextLengthError as error:
            raise ChatError(
                f"the conversation no longer fits: {str(error).rstrip('.')}. Nothing is lost: /save FILE keeps it, "
                "/reset makes room, and then /retry asks this question again"
            ) from error
        except KeyboardInterrupt:
            if not self._screen.is_interactive:
                raise
        finally:
            self._keep(question, answer, instead_of_last)
        if not answer.is_whole:
            self._screen.show("(stopped)", "faint")
        elif answer.known("finish_reason") == "length":
            self._screen.show("(cut off: no more tokens were allowed, or no more fit)", "faint")

    def _keep(self, question: str, answer: ChatAnswer, instead_of_last: bool) -> None:
        """Add what there is of an answer to the conversation; without any, let the question wait for /retry."""
        if answer.text or answer.is_whole:
            self._screen.write("\n")
            self.conversation.keep(Exchange(question, answer.text), instead_of_last=instead_of_last)
        elif not instead_of_last:
            self.conversation.unanswered = question

    # --- commands -------------------------------------------------------------------------------------------------

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self._screen.show("The conversation is empty.", "faint")

    def _set_system(self, text: str) -> None:
        self.conversation.system = text or None
        self._screen.show("The system message is set." if text else "There is no system message.", "faint")

    def _retry(self, _: str) -> None:
        if self.conversation.unanswered is not None:
            self._ask(self.conversation.unanswered)
        elif self.conversation.exchanges:
            self._ask(self.conversation.exchanges[-1].question, instead_of_last=True)
        else:
            raise ChatError("/retry needs a question that was asked before")

    def _save(self, name: str) -> None:
        if not name:
            raise ChatError("/save needs the name of a file")
        count = self.conversation.save(Path(name).expanduser())
        self._screen.show(f"{count} messages are in {name}.", "faint")

    def _show_stats(self, _: str) -> None:
        if self._last_answer is None:
            raise ChatError("/stats needs an answer")
        self._screen.show(self._last_answer.summary())

    def _leave(self, _: str) -> None:
        raise EOFError
