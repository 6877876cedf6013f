"""Tokenizers by name: real ones from ../shared/data, small ones made on the spot."""

import gzip
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

from support import small_tokenizers

DATA = Path(__file__).parents[2] / "../shared/data"
SMALL = {
    "byte_level": small_tokenizers.byte_level,
    "byte_fallback": small_tokenizers.byte_fallback,
    "metaspace": small_tokenizers.metaspace,
    "word_level": small_tokenizers.word_level,
}
UNPACKED = ("gpt2", "gpt_neox_20b", "dolma2", "qwen2")
REAL = (*UNPACKED, "mistral_v1", "stories260K")


def write_folder(name: str, folder: Path) -> Path:
    """Return a model folder with the tokenizer of that name; `folder` if it had to be written. Skips without data."""
    if name in SMALL:
        return small_tokenizers.save(SMALL[name](), folder)
    if not DATA.is_dir():
        pytest.skip("../shared/data is not here")
    if name == "stories260K":
        return (DATA / "models/stories260K").resolve()
    source = DATA / "tokenizers" / name
    if name == "mistral_v1":
        return small_tokenizers.save(from_sentencepiece((source / "tokenizer.model").read_bytes()), folder)
    (folder / "tokenizer.json").write_bytes(gzip.decompress((source / "tokenizer.json.gz").read_bytes()))
    (folder / "tokenizer_config.json").write_bytes((source / "tokenizer_config.json").read_bytes())
    return folder


def expected_ids() -> dict[str, dict[str, list[int]]]:
    """Return the ids of three texts for each real tokenizer, and the texts under the name `texts`."""
    if not DATA.is_dir():
        pytest.skip("../shared/data is not here")
    expected = json.loads((DATA / "tokenizers/expected.json").read_text(encoding="utf-8"))
    return {"texts": expected["texts"], **expected["token_ids"]}


def from_sentencepiece(model: bytes) -> Tokenizer:
    """Make the fast tokenizer of a SentencePiece BPE model: merges in the order of their pieces' scores."""
    pieces = list(_pieces(model))
    vocab = {text: index for index, (text, _) in enumerate(pieces)}
    ranked = []
    for text, score in pieces:
        splits = ((text[:cut], text[cut:]) for cut in range(1, len(text)))
        ranked += [(-score, vocab[a], vocab[b], a, b) for a, b in splits if a in vocab and b in vocab]
    merges = [(a, b) for *_, a, b in sorted(ranked)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(name, normalized=False) for name in ("<unk>", "<s>", "</s>")])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


def _pieces(model: bytes) -> Iterator[tuple[str, float]]:
    """Yield text and score of each piece: fields 1 and 2 of the messages in field 1 of the model's protobuf."""
    for number, value in _fields(model):
        if number == 1:
            piece = dict(_fields(value))
            yield piece[1].decode(), struct.unpack("<f", piece[2])[0]


def _fields(message: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield (field number, raw value) of a protobuf message; integers are passed over."""
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        kind = key & 7
        size = {1: 8, 5: 4}.get(kind)
        if kind == 0:
            _, at = _varint(message, at)
            continue
        if size is None:
            size, at = _varint(message, at)
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        at += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, at
