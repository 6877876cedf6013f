"""GGUF container: what a file says is what is read, and every broken file ends in an error that names the place."""

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quire.core.errors import ModelError
from quire.core.model_files import is_gguf
from quire.formats.gguf import gguf_file as gguf
from quire.formats.gguf.gguf_file import GGUFFile
from support.gguf_files import Stored, write_gguf

METADATA: dict[str, Any] = {
    "general.architecture": "llama",
    "general.alignment": 32,
    "a.flag": True,
    "a.number": 1e-5,
    "a.text": "été\n",
    "tokens": ["a", "", "日本"],
    "scores": [-1.5, 0.0, 3e38],
    "kinds": [1, 3, 1],
}
TENSORS: dict[str, Stored] = {
    "first": ("F32", (2, 3), struct.pack("<6f", *range(6))),
    "second": ("Q8_0", (1, 64), bytes(68)),
    "third": ("BF16", (5,), bytes(10)),
}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "model.gguf", METADATA, TENSORS)


@pytest.mark.parametrize("version", [2, 3])
def test_metadata_and_tensors_are_those_that_were_written(tmp_path: Path, version: int) -> None:
    file = GGUFFile(write_gguf(tmp_path / "model.gguf", METADATA, TENSORS, version))
    scalars = {key: value for key, value in METADATA.items() if not isinstance(value, list)}
    assert {key: file.metadata[key] for key in scalars} == scalars  # also 1e-5, which the file has in float32
    assert file.strings("tokens") == METADATA["tokens"]
    first, *others = METADATA["tokens"]
    assert file.places("tokens", [first, "nothing", *others]) == {
        text: place for place, text in enumerate(METADATA["tokens"])
    }
    assert file.numbers("kinds") == (1, 3, 1)
    assert file.numbers("scores") == tuple(map(float, np.float32(METADATA["scores"])))
    for name, (kind, shape, stored) in TENSORS.items():
        entry = file.tensors[name]
        assert (entry.type.name, entry.shape, entry.num_bytes) == (kind, shape, len(stored))
        assert file.map[entry.offset : entry.offset + entry.num_bytes] == stored


def test_file_of_the_gguf_package_reads_the_same(tmp_path: Path) -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    writer = package.GGUFWriter(tmp_path / "theirs.gguf", "llama")
    writer.add_float32("a.number", 1e-5)
    writer.add_int64("a.long", -(2**40))
    writer.add_array("tokens", METADATA["tokens"])
    writer.add_custom_alignment(64)
    values = np.arange(512, dtype=np.float32).reshape(2, 256) / 100
    writer.add_tensor("dense", values)
    blocks = package.quants.quantize(values, package.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blocks", blocks, raw_dtype=package.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "theirs.gguf")
    assert file.metadata["a.number"] == 1e-5
    assert file.metadata["a.long"] == -(2**40)
    assert file.strings("tokens") == METADATA["tokens"]
    dense, quantized = file.tensors["dense"], file.tensors["blocks"]
    assert dense.shape == quantized.shape == (2, 256)
    assert dense.offset % 64 == quantized.offset % 64 == 0
    assert file.map[dense.offset : dense.offset + dense.num_bytes] == values.tobytes()
    assert file.map[quantized.offset : quantized.offset + quantized.num_bytes] == blocks.tobytes()


def test_types_are_those_of_the_gguf_package() -> None:
    package = pytest.importorskip("gguf", reason="the gguf package is not installed")
    for type_id, kind in gguf.GGML_TYPES.items():
        theirs = package.GGMLQuantizationType(type_id)
        assert (theirs.name, package.GGML_QUANT_SIZES[theirs]) == (kind.name, kind[1:])


def test_is_gguf_by_the_first_bytes_or_the_suffix(whole: Path, tmp_path: Path) -> None:
    renamed = whole.rename(tmp_path / "model.bin")
    assert is_gguf(renamed)
    (tmp_path / "empty.gguf").touch()
    assert is_gguf(tmp_path / "empty.gguf")
    (tmp_path / "text").write_text("GGU")
    assert not is_gguf(tmp_path / "text")
    assert not is_gguf(tmp_path)
    assert not is_gguf(tmp_path / "nothing.gguf")


def replaced(old: bytes, new: bytes) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        assert content.count(old) == 1
        return content.replace(old, new)

    return change


def name(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


HUGE = struct.pack("<Q", 2**63)
BROKEN: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "empty": (lambda content: b"", "is no GGUF file"),
    "magic alone": (lambda content: content[:4], "the version at byte 4 takes 4 bytes, and the file has 4"),
    "version 1": (replaced(b"GGUF\3\0\0\0", b"GGUF\1\0\0\0"), "GGUF version 1 is not supported: supported are 2 and 3"),
    "big-endian": (replaced(b"GGUF\3\0\0\0", b"GGUF\0\0\0\3"), "the file is big-endian"),
    "many tensors": (lambda content: content[:8] + HUGE + content[16:], "the number of tensors is 9223372036854775808"),
    "many keys": (lambda content: content[:16] + HUGE + content[24:], "the number of metadata keys is 92233720368547"),
    "long key": (replaced(name("a.flag"), HUGE + b"a.flag"), "the length of metadata key 2 is 9223372036854775808"),
    "long text": (
        replaced(struct.pack("<Q", 6) + "été\n".encode(), struct.pack("<Q", 2**25) + "été\n".encode()),
        r"a.text at byte \d+ takes 33554432 bytes, and the file has",
    ),
    "no UTF-8": (replaced("日本".encode(), b"\xff" * 6), "tokens item 2 is not valid UTF-8"),
    "many items": (
        replaced(name("tokens") + struct.pack("<IIQ", 9, 8, 3), name("tokens") + struct.pack("<IIQ", 9, 8, 2**40)),
        "the number of items of tokens is 1099511627776, the limit is 2097152",
    ),
    "items beyond the end": (
        replaced(name("scores") + struct.pack("<IIQ", 9, 6, 3), name("scores") + struct.pack("<IIQ", 9, 6, 10**6)),
        r"scores at byte \d+ takes 4000000 bytes",
    ),
    "strings beyond the end": (
        replaced(name("tokens") + struct.pack("<IIQ", 9, 8, 3), name("tokens") + struct.pack("<IIQ", 9, 8, 10**6)),
        "tokens ends after the file",
    ),
    "nested array": (
        replaced(name("kinds") + struct.pack("<II", 9, 5), name("kinds") + struct.pack("<II", 9, 9)),
        "kinds is an array of arrays",
    ),
    "unknown type of value": (
        replaced(name("a.flag") + struct.pack("<I", 7), name("a.flag") + struct.pack("<I", 13)),
        "the type of a.flag is 13, the limit is 12",
    ),
    "key twice": (replaced(name("a.flag"), name("a.text")), "metadata key 'a.text' comes twice"),
    "alignment": (
        replaced(name("general.alignment") + struct.pack("<II", 4, 32),
                 name("general.alignment") + struct.pack("<II", 4, 33)),
        "general.alignment must be a power of two from 8 to 65536, got 33",
    ),
    "tensor twice": (replaced(name("third"), name("first")), "tensor 'first' comes twice"),
    "unknown type of tensor": (
        replaced(struct.pack("<IQI", 1, 5, 30), struct.pack("<IQI", 1, 5, 99)), "tensor 'third' has the unknown type 99"
    ),
    "no dimensions": (
        replaced(name("third") + struct.pack("<I", 1), name("third") + struct.pack("<I", 0)), "tensor 'third'"
    ),
    "five dimensions": (
        replaced(name("third") + struct.pack("<I", 1), name("third") + struct.pack("<I", 5)),
        "the number of dimensions of tensor 'third' is 5, the limit is 4",
    ),
    "large dimension": (
        replaced(struct.pack("<IQQI", 2, 3, 2, 0), struct.pack("<IQQI", 2, 3, 2**60, 0)),
        "a dimension of tensor 'first' is 1152921504606846976",
    ),
    "many elements": (
        replaced(struct.pack("<IQQI", 2, 3, 2, 0), struct.pack("<IQQI", 2, 2**30, 2**30, 0)),
        r"tensor 'first' must have 1 to 1099511627776 elements in all",
    ),
    "zero rows": (
        replaced(struct.pack("<IQQI", 2, 3, 2, 0), struct.pack("<IQQI", 2, 3, 0, 0)), r"has the shape \[0, 3\]"
    ),
    "part of a block": (
        replaced(struct.pack("<IQQI", 2, 64, 1, 8), struct.pack("<IQQI", 2, 65, 1, 8)),
        "tensor 'second' has rows of 65 elements, which are no whole Q8_0 blocks of 32",
    ),
    "offset between alignments": (
        replaced(struct.pack("<IQIQ", 1, 5, 30, 128), struct.pack("<IQIQ", 1, 5, 30, 129)),
        "tensor 'third' has the offset 129, which is not a multiple of the alignment 32",
    ),
    "offset beyond the end": (
        replaced(struct.pack("<IQIQ", 1, 5, 30, 128), struct.pack("<IQIQ", 1, 5, 30, 2**63)),
        "tensor 'third' of 10 bytes at byte 92233720368547.* ends after the file",
    ),
    "cut": (lambda content: content[:-40], "tensor 'third' of 10 bytes at byte .* is the file complete"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_file_is_refused_by_name(whole: Path, kind: str) -> None:
    change, words = BROKEN[kind]
    whole.write_bytes(change(whole.read_bytes()))
    with pytest.raises(ModelError, match=words) as error:
        GGUFFile(whole).strings("tokens")
    assert str(whole) in str(error.value)


def test_arrays_of_another_type_are_refused(whole: Path) -> None:
    file = GGUFFile(whole)
    with pytest.raises(ModelError, match=r"a\.text must be an array of strings, got 'été"):
        file.strings("a.text")
    with pytest.raises(ModelError, match="tokens must be an array of numbers, got an array of 3 items"):
        file.numbers("tokens")
    with pytest.raises(ModelError, match="nothing must be an array of numbers, it is missing"):
        file.numbers("nothing")
