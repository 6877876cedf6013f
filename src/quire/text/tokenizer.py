"""Tokenizer of a model, equal to transformers for the same folder, and incremental detokenization of outputs.

A thin layer over the `tokenizers` library. It reads `tokenizer.json` (other formats: `tokenizer_formats/`), makes
the tokens special that the other files of the folder declare special, and disables truncation and padding, which serve
training and would cut prompts without an error. The post-processor in `tokenizer.json` decides on a
beginning-of-sequence token; as in transformers from 5.0 on, `add_bos_token` of `tokenizer_config.json` is ignored
beside it.

The joined text equals what decoding prompt and output together shows after the prompt. A character that begins in the
prompt's last token and ends in the output belongs to the output.
"""

import re
from codecs import utf_8_decode
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from quire.core.errors import InvalidRequestError, ModelError
from quire.core.garbage import collections_paused
from quire.core.model_files import read_text
from quire.text.text_settings import TOKENIZER_FILE, TextSettings, read_text_settings
from quire.text.token_bytes import LongestToken, TokenBytesCache, decoding_rule, exact_tokenizer_json, longest_token

if TYPE_CHECKING:  # with Jinja 0.02 s to import: with the first conversation
    from quire.text.chat_template import ChatTemplate

_ANCHOR_TEXT = "a"
_SHORT_TOKENS = 4096
_PANIC = "PanicException"  # raised by the library's Rust side; its type cannot be imported


class EncodedText(dict[str, Any]):
    """Tokens in the form of transformers' tokenizers, by key or attribute: `input_ids`, `attention_mask`."""

    @property
    def input_ids(self) -> Any:  # noqa: ANN401
        """Token ids of a text, or a list of them for each of several texts."""
        return self["input_ids"]

    @property
    def attention_mask(self) -> Any:  # noqa: ANN401
        """1 for each token: nothing is padded."""
        return self["attention_mask"]


class Tokenizer:
    """Encodes and decodes text. Safe to share between threads."""

    def __init__(self, backend: Backend, settings: TextSettings) -> None:
        backend.no_truncation()
        backend.no_padding()
        ids = {token: backend.token_to_id(token) for token in settings.special_tokens}
        known = {token: id_ for token, id_ in ids.items() if id_ is not None}  # the model has no rows for new ones
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
        self._backend = backend
        self.named_tokens: Mapping[str, str] = settings.named_tokens  # `bos_token`, ...: chat templates know them so
        self._others = settings.others
        self._template_source = settings.chat_template
        self._given_template: ChatTemplate | None = None  # the last one that a caller gave
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(known.values()).union(id_ for id_, token in added.items() if token.special)
        # Tokens that are special to llguidance: a grammar must name them by id. Also added tokens in angle brackets.
        bracketed = (id_ for id_, token in added.items() if re.fullmatch(r"(?s)<.*>", token.content))
        self.grammar_special_token_ids = self.special_token_ids.union(bracketed)
        self.vocab_size: int = max(backend.get_vocab_size(), 1 + max(added, default=-1))  # 1 + the highest id
        rule = decoding_rule(backend)
        self.drops_first_space = rule is not None and rule.drops_first_space  # one, from a text (SentencePiece)
        self._rule = rule
        self._token_bytes: dict[frozenset[int], TokenBytesCache] = {}         # keyed by the tokens that are hidden
        self._anchor: list[int] = backend.encode(_ANCHOR_TEXT, add_special_tokens=False).ids[-1:]
        self._anchor_text: str = backend.decode(self._anchor, skip_special_tokens=False)
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Load the tokenizer.json of a model folder. ModelError naming what is missing or broken."""
        settings = read_text_settings(folder)
        return cls.load(
            f"{folder}/{TOKENIZER_FILE}", lambda: (Backend.from_str(read_text(folder, TOKENIZER_FILE)), settings)
        )

    @classmethod
    def load(cls, place: str, read: Callable[[], tuple[Backend, TextSettings]]) -> Self:
        """Return the tokenizer that `read` returns. ModelError naming the place for one that cannot be used."""
        try:
            with collections_paused():
                tokenizer = cls(*read())
            tokenizer.encode(_ANCHOR_TEXT)  # a broken post-processor shows only when it is used
        except ModelError:
            raise
        except BaseException as error:  # the library raises Exception itself; its panics are not even that
            if isinstance(error, Exception) or type(error).__name__ == _PANIC:
                raise ModelError(f"{place} is not a tokenizer that can be loaded: {error}") from error
            raise
        return tokenizer

    def describe(self) -> dict[str, Any]:
        """Return the settings that tokenizer_config.json holds, with special tokens and chat template as they apply."""
        template = {} if self.chat_template is None else {"chat_template": self.chat_template}
        return {"tokenizer_class": "PreTrainedTokenizerFast", **self._others, **self.named_tokens, **template}

    @property
    def bos_token_id(self) -> int | None:
        """The id of the beginning-of-sequence token that the tokenizer's files name, if they name one that it has."""
        return self._named_token_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """The id of the end-of-sequence token that the tokenizer's files name, if they name one that it has."""
        return self._named_token_id("eos_token")

    def _named_token_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self.token_id(text)

    def get_vocab(self) -> dict[str, int]:
        """Return the ids of all tokens, added ones included, by their texts in the vocabulary. Built at each call."""
        vocabulary: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        return vocabulary

    # --- text to tokens and back ----------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens that are spelled out in it become themselves.

        InvalidRequestError when the text is no valid Unicode (half a surrogate pair, which JSON can smuggle in).
        """
        try:
            # `encode` would hold the interpreter lock; `encode_batch_fast` releases it.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequestError("prompt must be a valid Unicode string", param="prompt") from error
        ids: list[int] = encoding.ids
        return ids

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> EncodedText:
        """Return the tokens of a text, or of each of several, as transformers' tokenizers do. Errors as `encode`."""
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens)
            return EncodedText(input_ids=ids, attention_mask=[1] * len(ids))
        all_ids = [self.encode(each, add_special_tokens) for each in text]
        return EncodedText(input_ids=all_ids, attention_mask=[[1] * len(ids) for ids in all_ids])

    def encode_truncated(
        self, text: str, num_tokens: int, *, keeps_last: bool, add_special_tokens: bool = True
    ) -> tuple[list[int], bool]:
        """Return at most `num_tokens` ids of a text, its last or its first ones, and whether it has more.

        Special tokens that are added are among them, at their places. InvalidRequestError as `encode`.
        """
        try:
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=False)
        except TypeError as error:
            raise InvalidRequestError("prompt must be a valid Unicode string", param="prompt") from error
        num_added = self._backend.num_special_tokens_to_add(is_pair=False) if add_special_tokens else 0
        is_cut = len(encoding.ids) + num_added > num_tokens
        encoding.truncate(max(0, num_tokens - num_added), direction="left" if keeps_last else "right")
        ids: list[int] = self._backend.post_process(encoding, add_special_tokens=add_special_tokens).ids
        return ids[:num_tokens], is_cut

    def encode_pair(self, first: str, second: str, num_tokens: int, *, keeps_last: bool) -> tuple[list[int], int]:
        """Return the ids of two texts with the special tokens of a pair, and where the second type begins; 0: nowhere.

        At most `num_tokens` ids (0: any number): the longer text is cut first, then both, as transformers does.
        InvalidRequestError as `encode`.
        """
        try:
            one, two = self._backend.encode_batch_fast([first, second], add_special_tokens=False)
        except TypeError as error:
            raise InvalidRequestError("prompt must be a valid Unicode string", param="prompt") from error
        if num_tokens:
            most = num_tokens - int(self._backend.num_special_tokens_to_add(is_pair=True))
            if most < 2:
                least = num_tokens - most + 2
                message = f"truncate_prompt_tokens must be at least {least} for a pair, got {num_tokens}"
                raise InvalidRequestError(message, param="truncate_prompt_tokens")
            lengths = _cut_longest_first(len(one.ids), len(two.ids), most)
            for encoding, length in zip((one, two), lengths, strict=True):
                encoding.truncate(length, direction="left" if keeps_last else "right")
        joined = self._backend.post_process(one, two, add_special_tokens=True)
        ids, types = list(joined.ids), list(joined.type_ids)
        return ids, types.index(1) if 1 in types else 0

    def cut(self, text: str, max_tokens: int) -> str:
        """Return the longest beginning of a text that has at most so many tokens, special tokens not counted.

        A text that ends between two tokens of the whole may have other tokens, so it is cut until they are few enough.
        """
        while text:
            try:
                (encoding,) = self._backend.encode_batch([text], add_special_tokens=False)
            except TypeError as error:
                raise InvalidRequestError("prompt must be a valid Unicode string", param="prompt") from error
            if len(encoding.ids) <= max_tokens:
                break
            offsets: list[tuple[int, int]] = encoding.offsets
            text = text[: min(offsets[max_tokens - 1][1], offsets[max_tokens][0], len(text) - 1)]
        return text

    def token_id(self, token: str) -> int | None:
        """Return the id of a token of the vocabulary, by its text there; None if there is none."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def min_num_tokens(self, text: str) -> int:
        """Return a lower bound of the number of tokens from the length of the text; 0 if none is known."""
        return 0 if self._longest_token is None else self._longest_token.min_num_tokens(text)

    @cached_property
    def _longest_token(self) -> LongestToken | None:
        return longest_token(self._backend)

    def decode(self, token_ids: Sequence[int] | int, skip_special_tokens: bool = True) -> str:
        """Return the text of token ids, or of one. Bytes that are no UTF-8 become U+FFFD, unknown ids nothing."""
        if isinstance(token_ids, int):
            token_ids = [token_ids]
        if len(token_ids) <= _SHORT_TOKENS:
            text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
        else:  # `decode` would hold the interpreter lock
            (text,) = self._backend.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Return the text of one token as it reads inside a text: with its space, special tokens spelled out.

        A token that is only a part of a character reads U+FFFD.
        """
        text = self._token_texts.get(token_id)
        if text is None:
            text = self.decode([*self._anchor, token_id], skip_special_tokens=False).removeprefix(self._anchor_text)
            self._token_texts[token_id] = text
        return text

    def token_piece(self, token_id: int) -> str:
        """Return a token as the vocabulary spells it; empty for an id that it lacks."""
        piece: str | None = self._backend.id_to_token(token_id)
        return piece or ""

    def token_bytes(
        self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()
    ) -> Mapping[int, bytes] | None:
        """Return the bytes of every token id, or None if this tokenizer's tokens cannot be decoded one by one.

        With `skip_special_tokens` special tokens have none, except those that are `kept`; a table is held for each.
        """
        if self._rule is None:
            return None
        hidden = self.hidden_token_ids(skip_special_tokens, kept)
        table = self._token_bytes.get(hidden)
        if table is None:
            table = self._token_bytes[hidden] = TokenBytesCache(self._backend, self._rule.to_bytes, hidden)
        return table

    def hidden_token_ids(self, skip_special_tokens: bool, kept: frozenset[int] = frozenset()) -> frozenset[int]:
        """Return the tokens that are left out of texts."""
        return self.special_token_ids - kept if skip_special_tokens else frozenset()

    def exact_json(self) -> str | None:
        """Return the text of a tokenizer.json that spells texts exactly behind a prompt, for grammars.

        None if this tokenizer's tokens cannot be decoded one by one there.
        """
        return exact_tokenizer_json(self._backend)

    # --- chat -----------------------------------------------------------------------------------------------------

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template, if it has one; of several the default."""
        return None if self._chat_template is None else self._chat_template.source

    @property
    def chat_templates(self) -> Mapping[str, str]:
        """Sources of the model's chat templates by their names, `default` and `tool_use`; empty if it has none."""
        return {} if self._chat_template is None else self._chat_template.sources

    def use_chat_template(self, source: str) -> None:
        """Render conversations with this template instead of the model's from now on; for the start of a process."""
        self._chat_template = self._template(source)

    @cached_property
    def _chat_template(self) -> "ChatTemplate | None":
        return None if self._template_source is None else self._template(self._template_source)

    def _template(self, source: str | Mapping[str, str]) -> "ChatTemplate":
        from quire.text.chat_template import ChatTemplate  # noqa: PLC0415

        return ChatTemplate(source, tokens=self.named_tokens)

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        *,
        chat_template: str | None = None,
        **kwargs: Any,  # noqa: ANN401 (tools, and variables of the template: documents, switches)
    ) -> str:
        """Return a conversation rendered with a chat template (default: the model's), which writes special tokens.

        InvalidRequestError when there is no template, or when it or the engine refuses the messages or the tools.
        """
        template = self._chat_template
        if chat_template is not None:
            if self._given_template is None or self._given_template.source != chat_template:
                self._given_template = self._template(chat_template)
            template = self._given_template
        if template is None:
            raise InvalidRequestError("the model has no chat template", param="messages")
        variables = {**self.named_tokens, **kwargs}
        return template.render(messages, add_generation_prompt=add_generation_prompt, **variables)


def _cut_longest_first(first: int, second: int, most: int) -> tuple[int, int]:
    """Return how many tokens of two texts are kept, `most` in all: of the longer one less, until both are as long."""
    short, long = min(first, second), max(first, second)
    if short + long > most:
        long = max(most - short, most - most // 2)
        short = min(short, most - long)
    return (short, long) if first <= second else (long, short)


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
        return self._decode(b"".join(map(self._token_bytes.__getitem__, token_ids)), is_end=False)

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
