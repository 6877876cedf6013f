"""Logprobs as the two routes write them: parallel lists for completions, one object per token for chats."""

from collections.abc import Mapping, Sequence

import msgspec

from quire.core.outputs import Logprob
from quire.text.detokenizer import REPLACEMENT, IncrementalDetokenizer, incremental_detokenizer
from quire.text.tokenizer import Tokenizer

Candidates = Mapping[int, Logprob]  # of one position, the token that stands there first


class CompletionLogprobs(msgspec.Struct):
    """Of a piece of a completion: one entry per token in each list. `text_offset` counts characters of the text."""

    text_offset: list[int]
    token_logprobs: list[float | None]
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]

    def __add__(self, other: "CompletionLogprobs") -> "CompletionLogprobs":
        """Return both pieces as one."""
        return CompletionLogprobs(
            self.text_offset + other.text_offset,
            self.token_logprobs + other.token_logprobs,
            self.tokens + other.tokens,
            self.top_logprobs + other.top_logprobs,
        )


class ChatTopLogprob(msgspec.Struct):
    """One of the most likely tokens at a position. `bytes` is null where the tokenizer cannot tell."""

    token: str
    logprob: float
    bytes: list[int] | None


class ChatTokenLogprob(ChatTopLogprob):
    """A token of a message, and the most likely ones in its place."""

    top_logprobs: list[ChatTopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Of a piece of a message."""

    content: list[ChatTokenLogprob]
    refusal: None = None


class TokenNames:
    """How single tokens are written. A token may be a part of a character, which no text can show."""

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = None if tokenizer is None else tokenizer.token_bytes(skip_special_tokens=False)

    def text(self, token_id: int) -> str:
        """Return a token as it reads: U+FFFD for a part of a character, its id for a model without a tokenizer."""
        return f"token_id:{token_id}" if self._tokenizer is None else self._tokenizer.token_text(token_id)

    def key(self, token_id: int) -> str:
        r"""Return a token as OpenAI's completions write it: `bytes:\xe6\x97` for a part of a character."""
        text = self.text(token_id)
        if self._bytes is None or REPLACEMENT not in text:
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in self._bytes[token_id])

    def raw(self, token_id: int) -> list[int] | None:
        """Return the bytes of a token, or None if they are not known."""
        if self._bytes is not None:
            return list(self._bytes[token_id])
        text = self.text(token_id)
        return None if self._tokenizer is None or REPLACEMENT in text else list(text.encode())


class CompletionLogprobsWriter:
    """Writes the logprobs of one choice as its tokens come.

    `start`: where its text begins, in characters; below 0 if what its first tokens stand for is not shown.
    """

    def __init__(
        self, tokenizer: Tokenizer | None, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool, start: int
    ) -> None:
        self._names = TokenNames(tokenizer)
        self._end = start
        self._detokenizer: IncrementalDetokenizer | None = None
        if tokenizer is not None:
            self._detokenizer = incremental_detokenizer(tokenizer, prompt_token_ids, skip_special_tokens)

    def write(self, token_ids: Sequence[int], positions: Sequence[Candidates | None]) -> CompletionLogprobs:
        """Return the logprobs of the next tokens.

        A token's offset is that of the first character it has a part in. What a stop string cut off had offsets too.
        """
        written = CompletionLogprobs([], [], [], [])
        for token_id, candidates in zip(token_ids, positions, strict=True):
            written.text_offset.append(max(0, self._end))
            if self._detokenizer is not None:
                self._end += len(self._detokenizer.append([token_id]))
            key = self._names.key(token_id)
            written.tokens.append(key)
            if candidates is None:  # the first token of a prompt: nothing stands before it
                written.token_logprobs.append(None)
                written.top_logprobs.append(None)
                continue
            chosen = candidates[token_id].logprob
            top = {self._names.key(other): candidate.logprob for other, candidate in candidates.items()}
            written.token_logprobs.append(chosen)
            written.top_logprobs.append(top | {key: chosen})  # two tokens may read the same
        return written


def chat_logprobs(
    names: TokenNames, token_ids: Sequence[int], positions: Sequence[Candidates], num_top: int
) -> ChatLogprobs:
    """Return the logprobs of tokens with the `num_top` most likely in their place, the likeliest first."""
    content = []
    for token_id, candidates in zip(token_ids, positions, strict=True):
        likeliest = sorted(candidates.items(), key=lambda item: item[1].rank)[:num_top]
        top = [ChatTopLogprob(names.text(other), entry.logprob, names.raw(other)) for other, entry in likeliest]
        text, raw = names.text(token_id), names.raw(token_id)
        content.append(ChatTokenLogprob(text, candidates[token_id].logprob, raw, top))
    return ChatLogprobs(content)
