"""The model's tokenizer: text to token ids and back, as transformers would do it for the same folder.

A thin layer over the `tokenizers` library. It reads `tokenizer.json`, makes the tokens special that the other files
of the folder call special, and switches truncation and padding off: they serve training, and would cut prompts in
silence. Whether a beginning-of-sequence token is added is the post-processor's business, written in `tokenizer.json`;
like transformers from 5.0 on, `add_bos_token` of `tokenizer_config.json` is not looked at beside it.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from tokenizers import AddedToken, decoders, normalizers
from tokenizers import Tokenizer as Backend

from quire.core.errors import InvalidRequestError, ModelError
from quire.text.chat_template import ChatTemplate
from quire.text.model_folder import TOKENIZER_FILE, TextSettings, read_text_settings, text_if_any
from quire.text.token_bytes import TokenBytes, decoding_rule, has_every_byte

_ANCHOR_TEXT = "a"
_MOST_COMPOSED = 3  # bytes of a text that become one by NFC: three Korean letters of three bytes each, one syllable
_SPLITS_THAT_KEEP_ALL = {b"ByteLevel", b"Sequence", b"Split", b"Digits", b"Isolated"}
_PANIC = "PanicException"  # of the library's Rust side; its type cannot be imported


class MissingTokenizerError(ModelError):
    """The folder has no tokenizer. Its model can still be used with token ids."""


class Tokenizer:
    """Encodes and decodes text. Safe to share between threads."""

    def __init__(self, backend: Backend, settings: TextSettings) -> None:
        backend.no_truncation()
        backend.no_padding()
        ids = {token: backend.token_to_id(token) for token in settings.special_tokens}
        known = {token: id_ for token, id_ in ids.items() if id_ is not None}  # the model has no rows for new ones
        backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in known])
        self._backend = backend
        self._named_tokens = settings.named_tokens
        self._chat_template = None if settings.chat_template is None else ChatTemplate(settings.chat_template)
        added = backend.get_added_tokens_decoder()
        self.special_token_ids = frozenset(known.values()).union(id_ for id_, token in added.items() if token.special)
        self.vocab_size: int = max(backend.get_vocab_size(), 1 + max(added, default=-1))  # 1 + the highest id
        self._rule = decoding_rule(backend)
        self._token_bytes = self._make_token_bytes()
        self._anchor: list[int] = backend.encode(_ANCHOR_TEXT, add_special_tokens=False).ids[-1:]
        self._anchor_text: str = backend.decode(self._anchor, skip_special_tokens=False)
        self._token_texts: dict[int, str] = {}

    @classmethod
    def from_folder(cls, folder: Path) -> Self:
        """Load the tokenizer of a model folder.

        MissingTokenizerError when it has no `tokenizer.json`, ModelError naming the file when one is broken.
        """
        text = text_if_any(Path(folder), TOKENIZER_FILE)
        if text is None:
            raise MissingTokenizerError(f"{folder} has no {TOKENIZER_FILE}: only token ids can be used with this model")
        settings = read_text_settings(Path(folder))
        try:
            tokenizer = cls(Backend.from_str(text), settings)
            tokenizer.encode(_ANCHOR_TEXT)  # a broken post-processor shows only when it is used
        except BaseException as error:  # the library raises Exception itself; its panics are not even that
            if isinstance(error, Exception) or type(error).__name__ == _PANIC:
                raise ModelError(f"{folder}/{TOKENIZER_FILE} is not a tokenizer that can be loaded: {error}") from error
            raise
        return tokenizer

    @classmethod
    def from_folder_if_any(cls, folder: Path) -> Self | None:
        """Load the tokenizer of a model folder, or return None when it has none. ModelError when it is broken."""
        try:
            return cls.from_folder(folder)
        except MissingTokenizerError:
            return None

    # --- special tokens -------------------------------------------------------------------------------------------

    @property
    def bos_token(self) -> str | None:
        """Text of the token that begins a sequence."""
        return self._named_tokens.get("bos_token")

    @property
    def eos_token(self) -> str | None:
        """Text of the token that ends a sequence."""
        return self._named_tokens.get("eos_token")

    @property
    def bos_token_id(self) -> int | None:
        """Id of `bos_token`, or None if the vocabulary has no such token."""
        return None if self.bos_token is None else self._backend.token_to_id(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        """Id of `eos_token`, or None if the vocabulary has no such token."""
        return None if self.eos_token is None else self._backend.token_to_id(self.eos_token)

    # --- text to tokens and back ----------------------------------------------------------------------------------

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the token ids of a text. Special tokens that are spelled out in it become themselves.

        InvalidRequestError when the text is no valid Unicode (half a surrogate pair, which JSON can smuggle in).
        """
        try:
            # For one text the library has `encode`, which keeps all other threads of Python from running meanwhile.
            (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise InvalidRequestError("prompt must be a valid Unicode string", param="prompt") from error
        ids: list[int] = encoding.ids
        return ids

    def least_tokens(self, text: str) -> int:
        """Return how many tokens a text has at least, as far as its length alone tells; 0 where it tells nothing."""
        longest = self._longest_token_bytes
        return 0 if longest is None else len(text.encode(errors="replace")) // (longest * _MOST_COMPOSED)

    @cached_property
    def _longest_token_bytes(self) -> int | None:
        """The bytes of the longest token, where every byte of a text lands in a token; None where some may not.

        Byte-level tokenizers with a token for every byte lose nothing, unless what comes before cuts something off: a
        normalizer other than NFC, a way to split that drops what it finds, an added token that takes spaces in.
        """
        backend = self._backend
        split = b"" if backend.pre_tokenizer is None else backend.pre_tokenizer.__getstate__()
        splits = set(re.findall(rb'"(?:type|behavior)": ?"(\w+)"', split))
        takes_spaces = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
        vocabulary = backend.get_vocab()
        is_byte_level = isinstance(backend.decoder, decoders.ByteLevel) and has_every_byte(vocabulary)
        if not is_byte_level or takes_spaces or not splits <= _SPLITS_THAT_KEEP_ALL:
            return None
        if backend.normalizer is not None and not isinstance(backend.normalizer, normalizers.NFC):
            return None
        return max(len(token.encode()) for token in vocabulary)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids. Bytes that are no UTF-8 become U+FFFD, ids out of the vocabulary nothing."""
        text: str = self._backend.decode(token_ids, skip_special_tokens=skip_special_tokens)
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

    # --- for the detokenizer --------------------------------------------------------------------------------------

    @property
    def drops_first_space(self) -> bool:
        """Whether a text loses one space from its beginning when it is decoded (SentencePiece). With `token_bytes`."""
        return self._rule is not None and self._rule.drops_first_space

    def token_bytes(self, skip_special_tokens: bool) -> Mapping[int, bytes] | None:
        """Return the bytes of every token id, or None if this tokenizer's tokens cannot be decoded one by one."""
        return None if self._token_bytes is None else self._token_bytes[skip_special_tokens]

    def _make_token_bytes(self) -> tuple[TokenBytes, TokenBytes] | None:
        """Return the tables with special tokens shown, and with special tokens skipped."""
        if self._rule is None:
            return None
        shown = TokenBytes(self._backend, self._rule.to_bytes, hidden=frozenset())
        return shown, TokenBytes(self._backend, self._rule.to_bytes, hidden=self.special_token_ids)

    # --- chat -----------------------------------------------------------------------------------------------------

    @property
    def named_tokens(self) -> Mapping[str, str]:
        """Texts of the special tokens that have a name (`bos_token`, ...): chat templates know them by it."""
        return self._named_tokens

    @property
    def chat_template(self) -> str | None:
        """Source of the model's chat template, if it has one."""
        return None if self._chat_template is None else self._chat_template.source

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        **kwargs: Any,  # noqa: ANN401 (whatever the template knows: tools, documents, switches)
    ) -> str:
        """Return a conversation as the model's chat template writes it. It names its special tokens itself.

        InvalidRequestError when there is no template, or when it or the engine refuses the messages.
        """
        if self._chat_template is None:
            raise InvalidRequestError("the model has no chat template", param="messages")
        variables = self._named_tokens | kwargs
        return self._chat_template.render(messages, add_generation_prompt=add_generation_prompt, **variables)
