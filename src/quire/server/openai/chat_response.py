"""Responses of /v1/chat/completions."""

from collections.abc import Iterator, Sequence

from quire.core.outputs import CompletionOutput
from quire.server.api.json_encoding import JsonStream
from quire.server.openai.logprobs import TokenNames, WholeChatLogprobs, chat_logprobs, prompt_logprobs
from quire.server.openai.response_builder import Json, OpenAIRequest, OpenAIResponseBuilder
from quire.text.tokenizer import Tokenizer

ROLE = "assistant"


class ChatResponseBuilder(OpenAIResponseBuilder):
    """Builder for n messages. The role is sent with the first text: clients would count a chunk of its own as a token.

    Messages start in order, since openai's helper for streams relies on it: a message with an incomplete first
    character starts without text when a later one has some.
    """

    OBJECT = "chat.completion"
    CHUNK_OBJECT = "chat.completion.chunk"

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer | None) -> None:
        super().__init__(request)
        self._names = TokenNames(tokenizer)
        self._num_begun = 0                      # messages with a role sent

    def _choice(self, prompt_index: int, output: CompletionOutput) -> Json:
        return {
            "index": output.index,
            "message": {"content": output.text, "role": ROLE, "refusal": None},
            "logprobs": self._logprobs(output),
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
        } | self._tokens(output)

    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Sequence[Json]:
        if not self._is_shown(piece):
            return ()
        is_first = piece.index >= self._num_begun
        delta = {"content": piece.text} if is_first or piece.text else {}
        choice = _chunk(piece.index, {"role": ROLE} | delta if is_first else delta)
        choice |= {"logprobs": self._logprobs(piece), "finish_reason": piece.finish_reason}
        if piece.finish_reason is not None:
            choice["stop_reason"] = piece.stop_reason
        choice |= self._tokens(piece)
        return (*self._start_messages(piece.index), choice) if is_first else (choice,)

    def _start_messages(self, index: int) -> Iterator[Json]:
        """Yield an empty piece of each message that must start before `index`."""
        for earlier in range(self._num_begun, index):
            yield _chunk(earlier, {"role": ROLE, "content": ""})
        self._num_begun = index + 1

    def _logprobs(self, piece: CompletionOutput) -> JsonStream | WholeChatLogprobs | None:
        if piece.packed_logprobs is None:
            return None
        return chat_logprobs(self._names, piece.packed_logprobs, self.request.params.logprobs or 0)

    def _prompt_fields(self) -> Json:
        fields: Json = {}
        if self.request.body.return_token_ids:
            fields["prompt_token_ids"] = self.request.requests[0].prompt.token_ids.tolist()
        if self.request.body.prompt_logprobs is not None:
            table = self._prompt_logprobs[0]
            fields["prompt_logprobs"] = None if table is None else prompt_logprobs(self._names, table)
        return fields


def _chunk(index: int, delta: Json) -> Json:
    """Return a piece of a message. The first one has the role."""
    return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
