"""Who answers: the one method that a conversation needs, and what comes out of it piece by piece."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from quire.core.errors import EngineError
from quire.text.chat_template import Message


class ChatError(EngineError):
    """Something that a conversation asked for could not be done. The conversation is as it was."""


class Update(NamedTuple):
    """New text of an answer, and the counts so far, where they are known."""

    text: str = ""
    num_prompt_tokens: int | None = None
    num_tokens: int | None = None
    finish_reason: str | None = None


class BackEnd(Protocol):
    """Answers conversations, one at a time."""

    @property
    def greeting(self) -> str:
        """What a user should know before the first question, in a line or two."""

    def answer(self, messages: Sequence[Message], on_update: Callable[[Update], None]) -> None:
        """Answer the last message; return at the answer's end.

        Raises ContextLengthError when the conversation does not fit, another EngineError when it cannot be answered,
        KeyboardInterrupt after Ctrl-C: then nothing goes on in the background.
        """
