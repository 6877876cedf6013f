"""Tokenizer, special tokens and chat template from the metadata of a GGUF file.

Three kinds of vocabulary are read: byte-level BPE ("gpt2": tokens, merges, and the name of the rule by which a text is
cut into words, "pre"), SentencePiece's BPE ("llama": pieces with scores), and its pieces with merges ("gemma4"). A file
may also have a whole tokenizer.json. Token types are SentencePiece's: special tokens are of type control, unknown or
user-defined, or have a text that is known to be one of a special token.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.core.arrays import address
from quire.extension.isas import usable_isas
from quire.formats.gguf.gguf_config import CONTROL_TEXTS
from quire.formats.gguf.gguf_file import GGUFFile
from quire.text.text_settings import DEFAULT_TEMPLATE, TOOL_TEMPLATE, TextSettings, default_and_tool_template
from quire.text.tokenizer_formats.folder_tokenizer import put_around
from quire.text.tokenizer_formats.piece_merges import QWEN2_SPLIT, merges_in_order, piece_merges, score_ranks
from quire.text.tokenizer_formats.sentencepiece import (
    ADDED,
    BPE,
    CONTROL,
    NORMAL,
    SentencePieceModel,
    added_tokens,
    make_sentencepiece,
)

MODEL_KEY, PRE_KEY = "tokenizer.ggml.model", "tokenizer.ggml.pre"
TOKENS_KEY, TYPES_KEY = "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"
SCORES_KEY, MERGES_KEY = "tokenizer.ggml.scores", "tokenizer.ggml.merges"
JSON_KEY, TEMPLATE_KEY = "tokenizer.huggingface.json", "tokenizer.chat_template"
MAX_ADDED_TOKENS = 1 << 16  # Llama 3 has 256
_NO_VOCABULARY = (None, "none", "no_vocab")
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "sep_token": "seperator",
          "pad_token": "padding", "mask_token": "mask"}  # fmt: skip
_SENTENCEPIECE_IDS = {"unknown": 0, "bos": 1, "eos": 2}  # where the metadata has none
_LLAMA3_SPLIT = QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|")
_TEKKEN_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|"
    r"\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_GPT4O_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_FALCON_SPLITS = (
    r"[\p{P}$+<=>^~|`]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"[0-9][0-9][0-9]",
)


class WordRule(NamedTuple):
    """Rule by which byte-level BPE cuts a text into words, by one pattern after the other; GPT-2's if there is none."""

    splits: tuple[str, ...] = ()
    splits_digits: bool = False
    composes: bool = False        # normalizes to NFC first
    keeps_words: bool = False     # a word that is a token is not merged from its parts
    adds_bos: bool = False


_GPT2, _DIGITS = WordRule(), WordRule(splits_digits=True)
_QWEN2 = WordRule((QWEN2_SPLIT,), composes=True)
_LLAMA3_WORDS = WordRule((_LLAMA3_SPLIT,))
_LLAMA3 = WordRule((_LLAMA3_SPLIT,), keeps_words=True, adds_bos=True)
WORD_RULES = {
    "gpt-2": _GPT2, "phi-2": _GPT2, "olmo": _GPT2, "mpt": _GPT2,
    "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2, "megrez": _QWEN2,
    "llama-bpe": _LLAMA3, "llama3": _LLAMA3, "llama-v3": _LLAMA3, "falcon3": _LLAMA3,
    "dbrx": _LLAMA3_WORDS, "smaug-bpe": _LLAMA3_WORDS, "glm4": _LLAMA3_WORDS, "chatglm-bpe": _LLAMA3_WORDS,
    "smollm": _DIGITS, "starcoder": _DIGITS, "refact": _DIGITS, "codeshell": _DIGITS,
    "stablelm2": WordRule((QWEN2_SPLIT,)), "falcon": WordRule(_FALCON_SPLITS),
    "command-r": WordRule(splits_digits=True, composes=True), "gpt-4o": WordRule((_GPT4O_SPLIT,)),
    "tekken": WordRule((_TEKKEN_SPLIT,), keeps_words=True, adds_bos=True),
}  # fmt: skip
_RULE_OF_ARCHITECTURE = {"gpt2": "gpt-2", "qwen2": "qwen2", "qwen3": "qwen2"}  # for older files, which name none


class Vocabulary(NamedTuple):
    """Tokens of a file by their ids, with their types [num_tokens]."""

    tokens: list[str]
    ids: dict[str, int]
    types: NDArray[np.int64]

    @classmethod
    def read(cls, file: GGUFFile) -> "Vocabulary":
        """Read the vocabulary. ModelError if tokens are missing or come twice, or types are of another number."""
        tokens = file.strings(TOKENS_KEY)
        types = np.full(len(tokens), NORMAL)
        if TYPES_KEY in file.metadata:
            types = np.array(file.numbers(TYPES_KEY), np.int64)
        if len(types) != len(tokens):
            raise file.error(f"{TYPES_KEY} has {len(types)} items, and {TOKENS_KEY} {len(tokens)}")
        ids = dict(zip(tokens, range(len(tokens)), strict=True))
        if len(ids) < len(tokens):
            (twice, _), = Counter(tokens).most_common(1)
            raise file.error(f"{TOKENS_KEY} has the token {twice!r:.80} twice")
        types[[ids[text] for text in CONTROL_TEXTS if text in ids]] = CONTROL
        vocabulary = cls(tokens, ids, types)
        num_added = len(vocabulary.added())
        if num_added > MAX_ADDED_TOKENS:
            raise file.error(f"{TYPES_KEY} has {num_added} special or user-defined tokens, the limit is "
                             f"{MAX_ADDED_TOKENS}")
        return vocabulary

    def added(self) -> list[tuple[str, int]]:
        """Return the special and user-defined tokens with their types."""
        return [(self.tokens[place], int(self.types[place])) for place in np.flatnonzero(np.isin(self.types, ADDED))]


def has_gguf_tokenizer(file: GGUFFile) -> bool:
    """Return whether a file has a vocabulary."""
    return file.metadata.get(MODEL_KEY) not in _NO_VOCABULARY or JSON_KEY in file.metadata


def read_gguf_tokenizer(file: GGUFFile) -> tuple[Tokenizer, TextSettings]:
    """Return the tokenizer of a file, its special tokens and its chat template.

    Raises ModelError naming the key, or what the `tokenizers` library raises for a vocabulary that it refuses.
    """
    vocabulary, kind = Vocabulary.read(file), file.metadata.get(MODEL_KEY)
    adds_bos: bool | None = None  # a tokenizer.json says it by itself
    defaults: dict[str, int] = {}
    if JSON_KEY in file.metadata:
        tokenizer = Tokenizer.from_str(_text(file, JSON_KEY))
    elif kind == "gpt2":
        rule = _word_rule(file)
        tokenizer, adds_bos = _byte_level(file, vocabulary, rule), rule.adds_bos
    elif kind == "llama":
        tokenizer, adds_bos, defaults = _sentencepiece(file, vocabulary), True, _SENTENCEPIECE_IDS
    elif kind == "gemma4":
        tokenizer, adds_bos = _pieces_with_merges(file, vocabulary), True
    else:
        raise file.error(f"{MODEL_KEY} must be gpt2, llama or gemma4, got {kind!r:.80}; --tokenizer FOLDER replaces it")
    named = _named_tokens(file, vocabulary, defaults)
    if adds_bos is not None:
        first = named.get("bos_token") if _flag(file, "add_bos_token", adds_bos) else None
        put_around(tokenizer, first, named.get("eos_token") if _flag(file, "add_eos_token", False) else None)
    return tokenizer, TextSettings(named, tuple(dict.fromkeys(named.values())), _chat_template(file))


def _chat_template(file: GGUFFile) -> str | dict[str, str] | None:
    """Return the chat template of a file; one for tools has its name behind the key."""
    keys = {DEFAULT_TEMPLATE: TEMPLATE_KEY, TOOL_TEMPLATE: f"{TEMPLATE_KEY}.{TOOL_TEMPLATE}"}
    return default_and_tool_template({name: _text(file, key) for name, key in keys.items() if key in file.metadata})


def _word_rule(file: GGUFFile) -> WordRule:
    name = file.metadata.get(PRE_KEY, "default")
    if name == "default":
        name = _RULE_OF_ARCHITECTURE.get(str(file.metadata.get("general.architecture")), name)
    if not isinstance(name, str) or name not in WORD_RULES:
        raise file.error(f"{PRE_KEY} {name!r:.80} is not supported; known are {', '.join(WORD_RULES)}; "
                         "--tokenizer FOLDER replaces it")
    return WORD_RULES[name]


def _pieces_with_merges(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    unknown = _token_id(file, "unknown", len(vocabulary.tokens), {})
    text = None if unknown is None else vocabulary.tokens[unknown]
    tokenizer = Tokenizer(
        models.BPE(vocabulary.ids, _merges(file), unk_token=text, fuse_unk=True, byte_fallback=True)
    )
    tokenizer.add_tokens(added_tokens(vocabulary.added()))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    return tokenizer


def _merges(file: GGUFFile) -> list[tuple[str, str]]:
    """Return the merges of a file, the first ones first."""
    merges = []
    for index, merge in enumerate(file.strings(MERGES_KEY)):
        first, _, second = merge.partition(" ")
        if not first or not second or " " in second:
            raise file.error(f"{MERGES_KEY} {index}: expected two tokens, got {merge!r:.80}")
        merges.append((first, second))
    return merges


def _byte_level(file: GGUFFile, vocabulary: Vocabulary, rule: WordRule) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocabulary.ids, _merges(file), ignore_merges=rule.keeps_words))
    tokenizer.add_tokens(added_tokens(vocabulary.added()))
    if rule.composes:
        tokenizer.normalizer = normalizers.NFC()
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not rule.splits)
    cuts: list[pre_tokenizers.PreTokenizer] = []
    if rule.splits_digits:
        cuts.append(pre_tokenizers.Digits(individual_digits=True))
    cuts += [pre_tokenizers.Split(Regex(split), behavior="isolated") for split in rule.splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, spell]) if cuts else spell
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece(file: GGUFFile, vocabulary: Vocabulary) -> Tokenizer:
    scores = file.numbers(SCORES_KEY)
    if len(scores) != len(vocabulary.tokens):
        raise file.error(f"{SCORES_KEY} has {len(scores)} items, and {TOKENS_KEY} {len(vocabulary.tokens)}")
    model = SentencePieceModel(
        vocabulary.tokens,
        list(scores),
        vocabulary.types.tolist(),
        algorithm=BPE,
        has_byte_fallback="<0x00>" in vocabulary.ids,
        unknown_id=_token_id(file, "unknown", len(scores), _SENTENCEPIECE_IDS) or 0,
        adds_space=_flag(file, "add_space_prefix", True),
        joins_spaces=_flag(file, "remove_extra_whitespaces", False),
    )
    return make_sentencepiece(
        model, str(file.path), is_legacy=True, find_merges=needed_merges, ids=vocabulary.ids
    )


def needed_merges(
    texts: Sequence[str], scores: Sequence[float], is_result: NDArray[np.bool_]
) -> list[tuple[str, str]]:
    """Return the pairs of `piece_merges` that some text needs: one for each piece that merges make.

    The tokenizers library takes 0.2 s less for those of 262,144 pieces, and finding them 0.3 s less. All pairs where
    the extension is missing, or cannot tell (csrc/piece_merges.hpp).
    """
    if not usable_isas():
        return piece_merges(texts, scores, is_result)
    from quire.extension import _kernels  # noqa: PLC0415 (the extension is optional)

    lengths = np.fromiter(map(len, texts), np.int64, len(texts))
    characters = np.frombuffer("".join(texts).encode("utf-32-le"), np.uint32)
    stops, ranks, results = lengths.cumsum(), score_ranks(scores), is_result.astype(np.uint8)
    first, second = np.empty((2, len(texts)), np.int32)
    if not _kernels.piece_merges(
        address(characters), address(stops), address(ranks), address(results), len(texts), address(first),
        address(second),
    ):  # fmt: skip
        return piece_merges(texts, scores, is_result)
    made = np.flatnonzero(first >= 0)
    sides = (side[made].astype(np.int64) for side in (first, second))
    return merges_in_order(texts, lengths, ranks, made, *sides)


def _named_tokens(file: GGUFFile, vocabulary: Vocabulary, defaults: dict[str, int]) -> dict[str, str]:
    """Return the texts of special tokens by the names that chat templates know."""
    ids = {name: _token_id(file, key, len(vocabulary.tokens), defaults) for name, key in _NAMED.items()}
    return {name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _token_id(file: GGUFFile, name: str, num_tokens: int, defaults: dict[str, int]) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    value = file.metadata.get(key, defaults.get(name))
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < num_tokens:
        raise file.error(f"{key} must be a token id from 0 to {num_tokens - 1}, got {value!r:.80}")
    return value


def _flag(file: GGUFFile, name: str, default: bool) -> bool:
    value = file.metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise file.error(f"tokenizer.ggml.{name} must be true or false, got {value!r:.80}")
    return value


def _text(file: GGUFFile, key: str) -> str:
    value = file.metadata[key]
    if not isinstance(value, str):
        raise file.error(f"{key} must be a string, got {value!r:.80}")
    return value
