"""What has been said: a system message, questions with their answers, and a question that has no answer yet.

A question joins the conversation together with its answer. One that could not be answered stands aside, to be asked
again, so that a failure never leaves the conversation in a state that no model knows.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from quire.text.chat_template import Message


class Exchange(NamedTuple):
    """A question and its answer."""

    question: str
    answer: str


@dataclass(slots=True)
class Conversation:
    """The state of a chat."""

    system: str | None = None
    exchanges: list[Exchange] = field(default_factory=list)
    unanswered: str | None = None

    def with_question(self, question: str, *, instead_of_last: bool = False) -> list[Message]:
        """Return the messages that ask `question` next, or anew in place of the last exchange."""
        return [*self._messages(self.exchanges[:-1] if instead_of_last else self.exchanges), _message("user", question)]

    def messages(self) -> list[Message]:
        """Return everything, an unanswered question last."""
        return self._messages(self.exchanges) if self.unanswered is None else self.with_question(self.unanswered)

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

    def _messages(self, exchanges: list[Exchange]) -> list[Message]:
        said = [] if self.system is None else [_message("system", self.system)]
        for question, answer in exchanges:
            said += [_message("user", question), _message("assistant", answer)]
        return said


def _message(role: str, content: str) -> Message:
    return {"role": role, "content": content}
