"""Answers of /v1/chat/completions."""

from collections.abc import Iterator, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from quire.core.outputs import CompletionOutput, FinishReason
from quire.server.openai.answer_format import AnswerFormat, Call, Envelope
from quire.server.openai.logprobs import ChatLogprobs, TokenNames, chat_logprobs
from quire.text.tokenizer import Tokenizer

ROLE = "assistant"


class Message(msgspec.Struct):
    """What the model says."""

    content: str
    role: str = ROLE
    refusal: None = None


class Delta(msgspec.Struct):
    """What is new of a message. The first one carries the role."""

    role: str | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """A whole message, and how it ended."""

    index: int
    message: Message
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | None
    token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """The newest piece of a message."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None
    finish_reason: FinishReason | None
    stop_reason: int | str | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET


class ChatFormat(AnswerFormat):
    """One conversation, n messages. The role comes with the first words: a chunk of its own would feign a token.

    Messages begin in order, because openai's helper that gathers a stream counts on it. So one whose first characters
    are not complete yet begins without words where a later one has some.
    """

    OBJECT = "chat.completion"
    CHUNK_OBJECT = "chat.completion.chunk"

    def __init__(self, call: Call, tokenizer: Tokenizer | None) -> None:
        super().__init__(call)
        self._names = TokenNames(tokenizer)
        self._num_begun = 0                      # messages whose role has been told

    def _choice(self, prompt_index: int, output: CompletionOutput) -> ChatChoice:
        choice = ChatChoice(
            output.index, Message(output.text), self._logprobs(output), output.finish_reason, output.stop_reason
        )
        if self.call.return_token_ids:
            choice.token_ids = output.token_ids
        return choice

    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Sequence[ChatChunkChoice]:
        if not self._is_worth_a_chunk(piece):
            return ()
        is_first = piece.index >= self._num_begun
        delta = _delta(piece, is_first=is_first)
        choice = ChatChunkChoice(piece.index, delta, self._logprobs(piece), piece.finish_reason)
        if piece.finish_reason is not None:
            choice.stop_reason = piece.stop_reason
        if self.call.return_token_ids:
            choice.token_ids = piece.token_ids
        return (*self._begin_up_to(piece.index), choice) if is_first else (choice,)

    def _begin_up_to(self, index: int) -> Iterator[ChatChunkChoice]:
        """Yield an empty piece of each message before one that begins now."""
        for earlier in range(self._num_begun, index):
            yield ChatChunkChoice(earlier, Delta(ROLE, ""), None, None)
        self._num_begun = index + 1

    def _logprobs(self, piece: CompletionOutput) -> ChatLogprobs | None:
        if piece.logprobs is None:
            return None
        return chat_logprobs(self._names, piece.token_ids, piece.logprobs, self.call.params.logprobs or 0)

    def _about_prompt(self, envelope: Envelope) -> Envelope:
        if self.call.return_token_ids:
            envelope.prompt_token_ids = self.call.requests[0].prompt.token_ids
        if self.call.return_prompt_logprobs:
            envelope.prompt_logprobs = self._prompt_logprobs[0]
        return envelope


def _delta(piece: CompletionOutput, *, is_first: bool) -> Delta:
    if is_first:
        return Delta(ROLE, piece.text)
    return Delta(content=piece.text) if piece.text else Delta()
