"""Conversation of a chat: questions, answers as they arrive, and the back end that gives them.

A question joins the conversation together with its answer. One that could not be answered is kept apart, to be asked
again, so that a failure never leaves the conversation in a state that no model knows.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from quire.core.errors import EngineError
from quire.text.conversation import Message


class ChatError(EngineError):
    """Something that a conversation asked for could not be done. The conversation is as it was."""


class Update(NamedTuple):
    """New text of an answer and of its reasoning, and the counts so far, where they are known."""

    text: str = ""
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    finish_reason: str | None = None
    reasoning: str = ""


class ChatBackEnd(Protocol):
    """Answers conversations, one at a time."""

    @property
    def greeting(self) -> str:
        """A line or two for the user before the first question."""

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        """Answer the last message; return at the answer's end.

        Raises ContextLengthError when the conversation does not fit, another EngineError when it cannot be answered,
        KeyboardInterrupt after Ctrl-C: then nothing runs on in the background.
        """


@dataclass(slots=True)
class ChatAnswer:
    """Answer so far. Times are seconds on one monotonic clock."""

    asked_s: float
    is_whole: bool = False                    # the back end finished; else it failed or was stopped
    _updates: list[tuple[float, Update]] = field(default_factory=list)

    def take(self, update: Update, now_s: float) -> None:
        self._updates.append((now_s, update))

    @property
    def text(self) -> str:
        """All text so far."""
        return "".join(update.text for _, update in self._updates)

    def known(self, name: str) -> Any:  # noqa: ANN401 (a field of an update)
        """Return the value in the last update that has one; None if none has."""
        told = (getattr(update, name) for _, update in reversed(self._updates))
        return next((value for value in told if value is not None), None)

    def summary(self) -> str:
        """Return counts and times in one line. Without a count of tokens, pieces of text are counted."""
        times_s = [now_s for now_s, update in self._updates if update.text]
        if not times_s:
            return "the last answer has no text"
        first_s, last_s, num_tokens = times_s[0], times_s[-1], self.known("num_tokens")
        unit, count = ("pieces", len(times_s)) if num_tokens is None else ("tokens", num_tokens)
        parts = [f"{count} {unit} in {last_s - self.asked_s:.2f} s", f"the first after {first_s - self.asked_s:.3f} s"]
        if count > 1 and last_s > first_s:
            parts.append(f"then {(count - 1) / (last_s - first_s):.1f} {unit}/s")
        if (num_prompt_tokens := self.known("num_prompt_tokens")) is not None:
            parts.append(f"prompt of {num_prompt_tokens} tokens")
        if num_tokens is None:
            parts.append("tokens were not counted")
        return ", ".join([*parts, f"ended by {self.known('finish_reason') or 'interruption'}"])


class Exchange(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


@dataclass(slots=True)
class ChatHistory:
    """The state of a chat."""

    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    unanswered: str | None = None
    images: tuple[str, ...] = ()        # data: URLs, in front of the first question

    def messages(self, question: str | None = None, *, instead_of_last: bool = False) -> list[Message]:
        """Return what was said, and `question` or else the unanswered one; perhaps in place of the last exchange."""
        said = [] if self.system is None else [("system", self.system)]
        for exchange in self.exchanges[:-1] if instead_of_last else self.exchanges:
            said += [("user", exchange.question), ("assistant", exchange.answer)]
        question = self.unanswered if question is None else question
        if question is not None:
            said.append(("user", question))
        messages: list[Message] = [{"role": role, "content": content} for role, content in said]
        first = next((number for number, (role, _) in enumerate(said) if role == "user"), None)
        if self.images and first is not None:
            parts = [{"type": "image_url", "image_url": {"url": url}} for url in self.images]
            messages[first] = {"role": "user", "content": [*parts, {"type": "text", "text": said[first][1]}]}
        return messages

    def keep(self, exchange: Exchange, *, instead_of_last: bool = False) -> None:
        """Add a question and its answer, or put them in place of the last ones."""
        if instead_of_last:
            self.exchanges.pop()
        self.exchanges.append(exchange)
        self.unanswered = None

    def reset(self) -> None:
        """Forget what was said. The system message stays, and so does a question that waits for its answer."""
        self.exchanges.clear()

    def save(self, path: Path) -> int:
        """Write the messages, one JSON object per line; return how many there are."""
        messages = self.messages()
        path.write_text("".join(json.dumps(message, ensure_ascii=False) + "\n" for message in messages), "utf-8")
        return len(messages)
