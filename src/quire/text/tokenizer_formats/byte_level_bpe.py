"""Byte-level BPE (Radford et al. 2019) from vocab.json and merges.txt: GPT-2, OPT and Qwen2 without tokenizer.json.

The tokenizer is the one that transformers makes of the same files.
"""

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.core.errors import ModelError
from quire.core.model_files import read_json_object, read_text
from quire.text.tokenizer_files import MERGES_FILE, VOCAB_FILE

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def read_byte_level_bpe(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of the two files, without special tokens; `config` is tokenizer_config.json's object.

    Raises ModelError for a file that is not what its name says.
    """
    model = models.BPE(_vocabulary(folder), _merges(folder))
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    adds_space = config.get("add_prefix_space") is True
    if str(config.get("tokenizer_class")).startswith("Qwen2Tokenizer"):
        tokenizer.normalizer = normalizers.NFC()
        split = pre_tokenizers.Split(Regex(QWEN2_SPLIT), behavior="isolated")
        spell = pre_tokenizers.ByteLevel(add_prefix_space=adds_space, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, spell])
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=adds_space)
    return tokenizer


def _vocabulary(folder: Path) -> dict[str, int]:
    vocabulary: dict[str, int] = {}
    for token, token_id in read_json_object(folder, VOCAB_FILE).items():
        if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < 2**32:
            raise ModelError(f"{folder / VOCAB_FILE}: {token!r:.80} must have a token id, got {token_id!r:.80}")
        vocabulary[token] = token_id
    return vocabulary


def _merges(folder: Path) -> list[tuple[str, str]]:
    merges = []
    for number, line in enumerate(read_text(folder, MERGES_FILE).split("\n"), 1):
        if not line.strip() or (number == 1 and line.startswith("#version")):
            continue
        first, _, second = line.rstrip("\r").partition(" ")
        if not first or not second or " " in second:
            raise ModelError(f"{folder / MERGES_FILE}, line {number}: expected two tokens, got {line!r:.80}")
        merges.append((first, second))
    return merges
