"""Tokenizers of folders without tokenizer.json, against transformers' and against the same model's tokenizer.json."""

import json
import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.engine.formats import load_tokenizer
from quire.text.text_settings import SENTENCEPIECE_FILE
from quire.text.tokenizer_formats.sentencepiece import SentencePieceModel
from support import small_tokenizers
from support.text_tokenizers import DATA, expected_ids, write_folder

TEXTS = [
    "Hello world",
    " leading, trailing  ",
    "naïve café 日本語 😀👩\u200d👩\u200d👧 e\u0301",
    "def f(x):\n\treturn x**2  # ok\n\n",
    "</s>spelled </s> <|endoftext|> a\r\nb 12345",
    "",
]


def as_vocab_and_merges(source: Path, folder: Path, **config: Any) -> Path:  # noqa: ANN401
    """Write the two files of a tokenizer.json's BPE, and a configuration."""
    model = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"]
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def assert_equal_to_transformers(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # warnings of libraries that transformers imports
        from transformers import AutoTokenizer

        theirs = AutoTokenizer.from_pretrained(folder)
    ours = load_tokenizer(folder)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.eos_token_id == theirs.eos_token_id


GPT2 = {"tokenizer_class": "GPT2Tokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "</s>"}


@pytest.mark.parametrize(
    "config",
    [
        GPT2,
        GPT2 | {"add_prefix_space": True},
        GPT2 | {"bos_token": "</s>", "pad_token": "<pad>", "add_bos_token": True},  # OPT's
    ],
    ids=["gpt2", "with a space", "opt"],
)
def test_vocab_and_merges_make_the_tokenizer_of_transformers(tmp_path: Path, config: dict[str, Any]) -> None:
    source = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path / "json")
    assert_equal_to_transformers(as_vocab_and_merges(source, tmp_path / "old", **config))


def test_vocab_and_merges_of_opt_begin_with_its_bos(tmp_path: Path) -> None:
    source = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path / "json")
    config = GPT2 | {"bos_token": "</s>", "add_bos_token": True}
    ours = load_tokenizer(as_vocab_and_merges(source, tmp_path / "old", **config))
    theirs = load_tokenizer(source)
    assert ours.encode("the stop") == [1, *theirs.encode("the stop")]
    assert ours.decode(ours.encode("the stop")) == "the stop"


def test_gpt2_and_qwen2_from_vocab_and_merges_give_the_ids_of_their_tokenizer_json(tmp_path: Path) -> None:
    known = expected_ids()
    for name, tokenizer_class in (("gpt2", "GPT2Tokenizer"), ("qwen2", "Qwen2Tokenizer")):
        (tmp_path / name).mkdir()
        source = write_folder(name, tmp_path / name)
        folder = as_vocab_and_merges(source, tmp_path / f"{name}-old", tokenizer_class=tokenizer_class)
        ours = load_tokenizer(folder)
        for key, text in known["texts"].items():
            assert ours.encode(text) == known[name][key]
        whole = load_tokenizer(source)
        for text in TEXTS[:4]:
            assert ours.encode(text) == whole.encode(text)


def test_added_tokens_get_the_ids_that_are_declared(tmp_path: Path) -> None:
    source = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path / "json")
    size = len(json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"])
    folder = as_vocab_and_merges(
        source, tmp_path / "old", **GPT2,
        added_tokens_decoder={
            str(size): {"content": "<|im_start|>", "special": True},
            str(size + 1): {"content": "<tool>", "special": False},
        },
    )  # fmt: skip
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("<|im_start|><tool>") == [size, size + 1]
    assert tokenizer.decode([size, size + 1]) == "<tool>"
    (folder / "added_tokens.json").write_text(json.dumps({"<far>": size + 9}))
    with pytest.raises(ModelError, match=rf"added token '<far>' has id {size + 2} after .* with id {size + 9}"):
        load_tokenizer(folder)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("vocab.json", '{"a": "b"}', "vocab.json: 'a' must have a token id, got 'b'"),
        ("vocab.json", "[]", "vocab.json: expected a JSON object"),
        ("merges.txt", "a b c\n", "merges.txt, line 1: expected two tokens, got 'a b c'"),
        ("merges.txt", "#version\nzz yy\n", "vocab.json is not a tokenizer that can be loaded"),
    ],
)
def test_broken_files_are_named(tmp_path: Path, name: str, content: str, told: str) -> None:
    source = small_tokenizers.save(small_tokenizers.byte_level(), tmp_path / "json")
    folder = as_vocab_and_merges(source, tmp_path / "old", **GPT2)
    (folder / name).write_text(content)
    with pytest.raises(ModelError, match=told):
        load_tokenizer(folder)


# --- SentencePiece ----------------------------------------------------------------------------------------------------


def sentencepiece_folder(source: Path, folder: Path, **config: Any) -> Path:  # noqa: ANN401
    folder.mkdir()
    shutil.copy(source / SENTENCEPIECE_FILE, folder)
    named = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named | config))
    return folder


def test_ids_of_mistral_are_those_of_sentencepiece(tmp_path: Path) -> None:
    known = expected_ids()
    tokenizer = load_tokenizer(sentencepiece_folder(DATA / "tokenizers/mistral_v1", tmp_path / "model"))
    assert tokenizer.vocab_size == 32_000
    assert tokenizer.eos_token_id == 2
    for key, text in known["texts"].items():
        assert tokenizer.encode(text, add_special_tokens=False) == known["mistral_v1"][key]
        assert tokenizer.encode(text) == [1, *known["mistral_v1"][key]]
        assert tokenizer.decode(known["mistral_v1"][key]) == text


def test_model_file_gives_what_the_same_models_tokenizer_json_gives(stories260k: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(sentencepiece_folder(stories260k, tmp_path / "model"))
    theirs = load_tokenizer(stories260k)
    assert ours.special_token_ids == theirs.special_token_ids
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
            assert ours.token_bytes(special) is not None, "decodes token by token"


def test_bos_and_eos_are_added_as_configured(stories260k: Path, tmp_path: Path) -> None:
    settings = {"add_bos_token": False, "add_eos_token": True}
    tokenizer = load_tokenizer(sentencepiece_folder(stories260k, tmp_path / "model", **settings))
    assert tokenizer.encode("Once") == [*tokenizer.encode("Once", add_special_tokens=False), 2]


def test_no_low_line_follows_a_special_token_unless_legacy(stories260k: Path, tmp_path: Path) -> None:
    new = load_tokenizer(sentencepiece_folder(stories260k, tmp_path / "new", legacy=False))
    old = load_tokenizer(sentencepiece_folder(stories260k, tmp_path / "old", legacy=True))
    assert new.encode("Once upon") == old.encode("Once upon")
    assert new.encode("</s>Once") != old.encode("</s>Once")


def unigram_model(pieces: list[tuple[str, float, int]]) -> bytes:
    """Spell a ModelProto with Unigram and byte fallback, as protobuf does."""
    import struct

    def block(number: int, content: bytes) -> bytes:
        assert len(content) < 128
        return bytes([number << 3 | 2, len(content)]) + content

    spelled = b"".join(
        block(1, block(1, text.encode()) + b"\x15" + struct.pack("<f", score) + bytes([0x18, kind]))
        for text, score, kind in pieces
    )
    return spelled + block(2, b"\x18\x01\x98\x02\x01") + block(3, b"\x18\x01\x20\x00")


def test_unigram_model_is_read(tmp_path: Path) -> None:
    pieces = [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3)]
    pieces += [(f"<0x{byte:02X}>", 0.0, 6) for byte in range(256)]
    pieces += [("▁", -3.0, 1), ("a", -3.0, 1), ("b", -3.0, 1), ("ab", -2.0, 1), ("▁ab", -1.0, 1), ("<user>", 0.0, 4)]
    (tmp_path / SENTENCEPIECE_FILE).write_bytes(unigram_model(pieces))
    parsed = SentencePieceModel.parse((tmp_path / SENTENCEPIECE_FILE).read_bytes())
    assert (parsed.algorithm, parsed.has_byte_fallback) == (1, True)
    assert (parsed.adds_space, parsed.joins_spaces) == (True, False)
    assert parsed.texts == [text for text, *_ in pieces]
    tokenizer, ids = load_tokenizer(tmp_path), {text: index for index, (text, *_) in enumerate(pieces)}
    assert tokenizer.encode("abb") == [ids["<s>"], ids["▁ab"], ids["b"]]
    assert tokenizer.encode("ab é")[2:] == [ids["▁"], ids["<0xC3>"], ids["<0xA9>"]]
    assert tokenizer.encode("<user>", add_special_tokens=False)[-1] == ids["<user>"]
    assert tokenizer.decode(tokenizer.encode("ab é")) == "ab é"


@pytest.mark.parametrize(
    ("setting", "told"),
    [(b"\x12\x03\xc0\x01\x01", "treat_whitespace_as_suffix true"), (b"\x1a\x02\x28\x00", "escape_whitespaces false")],
    ids=["suffix", "escapes"],
)
def test_models_that_place_spaces_otherwise_are_refused(tmp_path: Path, setting: bytes, told: str) -> None:
    """Messages of a protobuf are merged: the setting behind the model is one more of its trainer, or normalizer."""
    model = unigram_model([("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("▁", -3.0, 1), ("a", -3.0, 1)])
    (tmp_path / SENTENCEPIECE_FILE).write_bytes(model)
    load_tokenizer(tmp_path)
    (tmp_path / SENTENCEPIECE_FILE).write_bytes(model + setting)
    with pytest.raises(ModelError, match=f"tokenizer.model: SentencePiece's {told} is not supported"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "content", [b"", b"\xff" * 40, b"\x0a\x05abc", b"\x0a\x02\x08\x01", bytes(range(256)), b"\x0b"], ids=str
)
def test_files_that_are_no_model_are_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / SENTENCEPIECE_FILE).write_bytes(content)
    with pytest.raises(ModelError, match=r"tokenizer.model: not a SentencePiece model"):
        load_tokenizer(tmp_path)


# --- none -------------------------------------------------------------------------------------------------------------


def test_folder_without_a_tokenizer_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "merges.txt").write_text("")
    (tmp_path / "qwen.tiktoken").write_text("")
    with caplog.at_level(logging.WARNING, logger="quire"):
        assert load_tokenizer(tmp_path) is None
    assert "prompts must be token ids, chats and texts are refused: " in caplog.text
    assert "found only merges.txt, qwen.tiktoken" in caplog.text
    assert "save_pretrained" in caplog.text
