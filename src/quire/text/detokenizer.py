"""Incremental detokenization: the text of a sequence, token by token, in whole characters.

The joined text equals what decoding prompt and output together shows after the prompt. A character that begins in the
prompt's last token and ends in the output belongs to the output.
"""

from codecs import utf_8_decode
from collections.abc import Mapping, Sequence

from quire.text.tokenizer import Tokenizer

REPLACEMENT = "\ufffd"        # what UTF-8 decoders write for bytes that are no character
_MAX_UNFINISHED_BYTES = 3     # a character has at most 4
_MAX_CONTEXT_TOKENS = 8
_MAX_HELD_TOKENS = 8          # more than any character needs, if every byte is a token of its own


class ByteDetokenizer:
    """For tokenizers with a byte table: joins the tokens' bytes and decodes them as UTF-8. Under 1 us per token.

    Holds back at most three bytes. Bytes that are no UTF-8 become U+FFFD at once, one for each maximal part of a
    character (the Unicode standard, section 3.9, and the byte-level decoders). For SentencePiece, `decode` differs
    there, and only there: it turns a whole run of byte tokens, good characters too, into one U+FFFD per byte when
    any of them is invalid, which is known only at the end of the run.
    """

    def __init__(
        self, token_bytes: Mapping[int, bytes], prompt_token_ids: Sequence[int], *, drops_first_space: bool
    ) -> None:
        self._token_bytes = token_bytes
        tail = b""
        for token_id in reversed(prompt_token_ids):
            tail = token_bytes[token_id] + tail
            if len(tail) >= _MAX_UNFINISHED_BYTES:
                break
        self._unfinished = tail[utf_8_decode(tail, "replace", False)[1] :]
        self._dropped_once = " " if drops_first_space and not tail else ""
        if self._unfinished:  # if invalid, the prompt's text has them: as two for a surrogate
            self._dropped_once = self._unfinished.decode(errors="replace")

    def append(self, token_ids: Sequence[int]) -> str:
        """Append tokens and return the text that they complete."""
        table = self._token_bytes
        return self._decode(b"".join([table[token_id] for token_id in token_ids]), is_end=False)

    def finish(self) -> str:
        """Return what is left: U+FFFD for the bytes of a character that was never completed."""
        return self._decode(b"", is_end=True) if self._unfinished else ""

    def _decode(self, piece: bytes, *, is_end: bool) -> str:
        joined = self._unfinished + piece
        text, num_decoded = utf_8_decode(joined, "replace", is_end)
        self._unfinished = joined[num_decoded:]
        if text and self._dropped_once:
            text, self._dropped_once = text.removeprefix(self._dropped_once), ""
        return text


class WindowDetokenizer:
    """For any other tokenizer: decodes the new tokens together with a few before them, and returns the added text.

    The tokens before are those of the last text that was given out, so the window is bounded and begins at the border
    of a character. Text that ends in U+FFFD is held back, because the next token may complete it, for at most
    `_MAX_HELD_TOKENS` tokens.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], hidden: frozenset[int]) -> None:
        self._tokenizer = tokenizer
        self._hidden = hidden
        self._context = self._first_context(self._visible(prompt_token_ids)[-_MAX_CONTEXT_TOKENS:])
        self._new: list[int] = []

    def append(self, token_ids: Sequence[int]) -> str:
        """Append tokens and return the text that they complete."""
        return "".join([self._append(token_id) for token_id in self._visible(token_ids)])

    def finish(self) -> str:
        """Return what is left: U+FFFD for the bytes of a character that was never completed."""
        return self._new_text()

    def _append(self, token_id: int) -> str:
        self._new.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._new) < _MAX_HELD_TOKENS:
            return ""
        if text:
            self._context = self._new
        else:
            self._context = (self._context + self._new)[-_MAX_CONTEXT_TOKENS:]
        self._new = []
        return text

    def _first_context(self, tail: list[int]) -> list[int]:
        """Return the shortest end of the prompt's tail that is text in whole characters, or all of it."""
        ends = (tail[-num_tokens:] for num_tokens in range(1, len(tail)))
        return next((end for end in ends if (text := self._decode(end)) and REPLACEMENT not in text), tail)

    def _new_text(self) -> str:
        """Return what the new tokens add to the text of the context."""
        before = self._decode(self._context)
        both = self._decode(self._context + self._new)
        if both.startswith(before):
            return both[len(before) :]
        changed = (i for i, (old, new) in enumerate(zip(before, both, strict=False)) if old != new)
        return both[next(changed, len(both)) :]  # the prompt ended inside a character

    def _decode(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)  # what is to be skipped has been

    def _visible(self, token_ids: Sequence[int]) -> list[int]:
        return [token_id for token_id in token_ids if token_id not in self._hidden]


IncrementalDetokenizer = ByteDetokenizer | WindowDetokenizer


def incremental_detokenizer(
    tokenizer: Tokenizer, prompt_token_ids: Sequence[int], skip_special_tokens: bool,
    kept: frozenset[int] = frozenset(),
) -> IncrementalDetokenizer:  # fmt: skip
    """Return a detokenizer for one sequence that continues the prompt. Special tokens that are `kept` remain text."""
    table = tokenizer.token_bytes(skip_special_tokens, kept)
    if table is None:
        return WindowDetokenizer(tokenizer, prompt_token_ids, tokenizer.hidden_token_ids(skip_special_tokens, kept))
    return ByteDetokenizer(table, prompt_token_ids, drops_first_space=tokenizer.drops_first_space)
