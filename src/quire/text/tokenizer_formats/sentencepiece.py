"""SentencePiece models (Kudo and Richardson 2018) from tokenizer.model: Llama and Mistral without tokenizer.json.

The file is a protobuf message, of which few fields matter: pieces with scores and kinds, the algorithm, how a text is
normalized. BPE keeps no list of merges: two pieces merge if the result is a piece, the highest score first.
"""

import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from quire.core.errors import ModelError
from quire.core.model_files import read_bytes
from quire.text.text_settings import SENTENCEPIECE_FILE
from quire.text.tokenizer_formats.piece_merges import MAX_PIECES, piece_merges

MAX_PIECE_CHARS = 128  # pieces are tried at every cut; SentencePiece's own default is 16
UNIGRAM, BPE = 1, 2                          # TrainerSpec.model_type
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # SentencePiece.type
ADDED = (UNKNOWN, CONTROL, USER_DEFINED)
SPACE = "▁"
MergeFinder = Callable[[Sequence[str], Sequence[float], NDArray[np.bool_]], list[tuple[str, str]]]


@dataclass(slots=True)
class SentencePieceModel:
    """The fields of a ModelProto that make a tokenizer; the defaults are the format's."""

    texts: list[str] = field(default_factory=list)  # texts of the pieces
    scores: list[float] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    algorithm: int = UNIGRAM
    has_byte_fallback: bool = False
    unknown_id: int = 0
    charsmap: bytes = b""
    adds_space: bool = True
    joins_spaces: bool = True
    unsupported: str | None = None  # a setting that places spaces otherwise

    @classmethod
    def parse(cls, message: bytes) -> "SentencePieceModel":
        """Read a ModelProto. Raises ValueError, IndexError, KeyError or struct.error for anything else."""
        model = cls()
        for number, value in _fields(message):
            if number == 1 and isinstance(value, bytes):
                piece = dict(_fields(value))
                model.texts.append(_bytes(piece[1]).decode())
                model.scores.append(struct.unpack("<f", _bytes(piece.get(2, b"\0\0\0\0")))[0])
                model.kinds.append(int(piece.get(3, NORMAL)))
            elif number == 2 and isinstance(value, bytes):
                trainer = dict(_fields(value))
                model.algorithm = int(trainer.get(3, UNIGRAM))
                model.has_byte_fallback = bool(trainer.get(35, 0))
                model.unknown_id = int(trainer.get(40, 0))
                if trainer.get(24, 0):
                    model.unsupported = "treat_whitespace_as_suffix true"
            elif number == 3 and isinstance(value, bytes):
                normalizer = dict(_fields(value))
                model.charsmap = _bytes(normalizer.get(2, b""))
                model.adds_space, model.joins_spaces = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))
                if not normalizer.get(5, 1):
                    model.unsupported = "escape_whitespaces false"
        return model


def read_sentencepiece(folder: Path, config: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer of tokenizer.model; `config` is tokenizer_config.json's object.

    Raises ModelError for a file that is no such model, one of whole words or single characters, and one with spaces
    behind words or without low lines for them.
    """
    path = folder / SENTENCEPIECE_FILE
    try:
        model = SentencePieceModel.parse(read_bytes(folder, SENTENCEPIECE_FILE))
    except (ValueError, IndexError, KeyError, struct.error) as error:
        raise ModelError(f"{path}: not a SentencePiece model: {error!r:.200}") from error
    return make_sentencepiece(model, str(path), is_legacy=config.get("legacy") is not False)


def make_sentencepiece(
    model: SentencePieceModel, place: str, *, is_legacy: bool, find_merges: MergeFinder = piece_merges,
    ids: dict[str, int] | None = None,
) -> Tokenizer:  # fmt: skip
    """Return the tokenizer of a model. `place` is what errors call it; `is_legacy` as in `_set_normalizer`.

    `find_merges` returns what `piece_merges` does, or a part that gives every text the same pieces. `ids`: of the
    pieces by their texts, if they are there already. Raises ModelError for a model without the unknown token, with
    too long pieces, or of another algorithm.
    """
    if not model.unknown_id < len(model.texts):
        raise ModelError(f"{place}: not a SentencePiece model: no piece {model.unknown_id}, the unknown one")
    if len(model.texts) > MAX_PIECES:
        raise ModelError(f"{place}: has {len(model.texts)} pieces, the limit is {MAX_PIECES}")
    if model.algorithm not in (UNIGRAM, BPE):
        raise ModelError(f"{place}: of SentencePiece's algorithms only BPE and Unigram are supported")
    if model.unsupported:
        raise ModelError(f"{place}: SentencePiece's {model.unsupported} is not supported")
    if max(map(len, model.texts)) > MAX_PIECE_CHARS:
        raise ModelError(f"{place}: has a piece of more than {MAX_PIECE_CHARS} characters")
    tokenizer = Tokenizer(_bpe(model, find_merges, ids) if model.algorithm == BPE else _unigram(model))
    tokenizer.add_tokens(added_tokens(zip(model.texts, model.kinds, strict=True)))
    _set_normalizer(tokenizer, model, is_legacy=is_legacy)
    tokenizer.decoder = _decoder(model)
    return tokenizer


def added_tokens(tokens: Iterable[tuple[str, float]]) -> list[AddedToken]:
    """Return the tokens, given with their kinds, that are found in a text before it is cut into words.

    The library takes time for all of them whenever some are added: they come in one list.
    """
    return [
        AddedToken(text, normalized=False, special=kind != USER_DEFINED) for text, kind in tokens if kind in ADDED
    ]


def _bpe(model: SentencePieceModel, find_merges: MergeFinder, ids: dict[str, int] | None) -> models.BPE:
    merges = find_merges(model.texts, model.scores, np.isin(model.kinds, (NORMAL, USER_DEFINED)))
    vocabulary = dict(zip(model.texts, range(len(model.texts)), strict=True)) if ids is None else ids
    unknown = model.texts[model.unknown_id]
    return models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=model.has_byte_fallback)


def _unigram(model: SentencePieceModel) -> models.Unigram:
    scores = list(zip(model.texts, model.scores, strict=True))
    return models.Unigram(scores, unk_id=model.unknown_id, byte_fallback=model.has_byte_fallback)


def _set_normalizer(tokenizer: Tokenizer, model: SentencePieceModel, *, is_legacy: bool) -> None:
    """Let spaces become low lines, with one before the text; if not legacy, none after a special token."""
    parts: list[normalizers.Normalizer] = []
    if model.charsmap:
        parts.append(normalizers.Precompiled(model.charsmap))
    if model.joins_spaces:
        parts += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    if is_legacy:
        parts += [normalizers.Prepend(SPACE)] if model.adds_space else []
        parts.append(normalizers.Replace(" ", SPACE))
    else:
        scheme = "first" if model.adds_space else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(SPACE, prepend_scheme=scheme, split=False)
    if parts:
        tokenizer.normalizer = normalizers.Sequence(parts)


def _decoder(model: SentencePieceModel) -> decoders.Decoder:
    fallback = [decoders.ByteFallback()] if model.has_byte_fallback else []
    strip = [decoders.Strip(" ", 1, 0)] if model.adds_space else []
    return decoders.Sequence([decoders.Replace(SPACE, " "), *fallback, decoders.Fuse(), *strip])


def _fields(message: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yield number and value of each field of a protobuf message: bytes, or an integer for a varint."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind} at byte {at}")
        size, at = _varint(message, at) if kind == 2 else ({1: 8, 5: 4}[kind], at)
        if at + size > len(message):
            raise ValueError(f"a field of {size} bytes at byte {at} of {len(message)}")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, at
    raise ValueError(f"an integer of more than 10 bytes before byte {at}")


def _bytes(value: bytes | int) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError(f"expected bytes, got {value}")
    return value
