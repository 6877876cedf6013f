"""Random texts that a grammar allows, drawn token by token from bytes and special tokens."""

import random
from collections.abc import Iterable, Sequence

from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

EOS = 256


class _Bytes:
    """A tokenizer of bytes, an end-of-sequence token, and special tokens."""

    eos_token_id = EOS
    bos_token_id = None

    def __init__(self, specials: Sequence[str]) -> None:
        self.tokens = [bytes([value]) for value in range(256)] + [text.encode() for text in ("<eos>", *specials)]
        self.special_token_ids = list(range(EOS, len(self.tokens)))

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


class GrammarWalk:
    """Draws random texts from grammars over bytes and some special tokens."""

    def __init__(self, specials: Sequence[str] = ()) -> None:
        self._tokenizer = _Bytes(specials)
        self._llguidance = LLTokenizer(TokenizerWrapper(self._tokenizer))
        self.special = {text: EOS + 1 + number for number, text in enumerate(specials)}

    def accepts(self, grammar: str, text: str) -> bool:
        """Return whether a whole text without special tokens is allowed."""
        matcher = self._matcher(grammar)
        tokens = list(text.encode())
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    def draw(
        self, grammar: str, seed: int, prefix: Iterable[str | int] = (), max_tokens: int = 3000, closing: bytes = b""
    ) -> str | None:
        """Return a random text that begins with a prefix, of texts and special tokens; None if it does not end.

        `closing`: bytes that are drawn more often than others. AssertionError where no token can follow.
        """
        matcher = self._matcher(grammar)
        generator = random.Random(seed)
        tokens = [token for part in prefix for token in (part.encode() if isinstance(part, str) else [part])]
        assert matcher.try_consume_tokens(tokens) == len(tokens), f"{prefix} is not allowed"
        while not matcher.is_stopped() and len(tokens) < max_tokens:
            mask = matcher.compute_bitmask()
            allowed = [token for token in range(len(self._tokenizer.tokens)) if mask[token // 8] >> token % 8 & 1]
            assert allowed, f"nothing can follow {bytes(token for token in tokens if token < EOS)!r}"
            preferred = [EOS] if EOS in allowed else [token for token in allowed if token < EOS and token in closing]
            token = generator.choice(preferred if preferred and generator.random() < 0.5 else allowed)
            matcher.consume_token(token)
            if token == EOS:
                break
            tokens.append(token)
        else:
            if not matcher.is_stopped():
                return None
            assert matcher.is_accepting() or matcher.stop_reason() != "NoExtensionBias", "nothing can follow"
        return b"".join(self._tokenizer.tokens[token] for token in tokens).decode()

    def _matcher(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._llguidance, grammar)
        assert not matcher.is_error(), matcher.get_error()
        return matcher
