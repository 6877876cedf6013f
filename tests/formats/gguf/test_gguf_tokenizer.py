"""Tokenizers of GGUF files, against those of the folders that the files were made from."""

import time
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ModelError
from quire.engine.formats import load_tokenizer
from quire.formats.gguf import gguf_tokenizer
from quire.formats.gguf.gguf_file import GGUFFile
from quire.formats.gguf.gguf_tokenizer import WORD_RULES, read_gguf_tokenizer
from quire.text.tokenizer import Tokenizer
from support import small_tokenizers
from support.gguf_files import tokenizer_metadata, write_gguf
from support.text_tokenizers import expected_ids, write_folder

TEXTS = [
    "Hello world, it's 12345 o'clock; WE'LL see\r\n\r\n  indented\t\ttabs   ",
    " leading, trailing  ",
    "naïve café 日本語 😀👩\u200d👩\u200d👧 e\u0301 \u00a0\u3000x",
    "def f(x):\n\treturn x**2  # ok\n\n",
    "</s>spelled </s> <|endoftext|> <s> a\r\nb <|im_start|>user\n",
    "١٢٣ ½ Ⅷ ,,,!!! ...a",
    "",
    " ",
    "▁low ▁▁line <0x41>",
]
PRE = {"byte_level": "gpt-2", "gpt2": "gpt-2", "qwen2": "qwen2", "byte_fallback": "", "stories260K": "",
       "mistral_v1": ""}  # fmt: skip
LARGE = ("qwen2", "mistral_v1")


def as_file(folder: Path, path: Path, pre: str, **changes: Any) -> Path:  # noqa: ANN401
    metadata = tokenizer_metadata(folder, pre) | {f"tokenizer.{key}": value for key, value in changes.items()}
    return write_gguf(path, {key: value for key, value in metadata.items() if value is not None}, {})


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.matrix] if name in LARGE else []) for name in PRE]
)
def test_tokenizer_equals_that_of_the_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = write_folder(name, tmp_path / "model")
    joins_spaces = True if name == "stories260K" else None  # its SentencePiece model makes one space of several
    file = as_file(folder, tmp_path / "a.gguf", PRE[name], **{"ggml.remove_extra_whitespaces": joins_spaces})
    theirs, ours = Tokenizer.from_folder(folder), load_tokenizer(file)
    # "</s>" is a normal token of Qwen2's folder; in a file its text makes it a special one, as in llama.cpp.
    by_text = {theirs.token_id("</s>")} if name == "qwen2" else set()
    texts = [text.replace("</s>", "") if by_text else text for text in TEXTS]
    more = [] if name in ("byte_level", "byte_fallback") else list(expected_ids()["texts"].values())
    for text in (*texts, *more):
        for special in (True, False):
            ids = theirs.encode(text, add_special_tokens=special)
            assert ours.encode(text, add_special_tokens=special) == ids
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(ids, skip_special_tokens=special)
    assert ours.special_token_ids == theirs.special_token_ids | by_text
    assert ours.eos_token_id == theirs.eos_token_id
    assert ours.vocab_size >= theirs.vocab_size


def test_pieces_with_merges_are_those_of_a_gemma(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    merges = [("l", "o"), ("lo", "w"), ("▁", "low"), ("e", "r"), ("▁low", "er"), ("h", "e"), ("▁", "▁"), ("1", "2")]
    pieces = sorted({piece for merge in merges for piece in (*merge, "".join(merge))})
    tokens = ["<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    ids = {token: index for index, token in enumerate(tokens)}
    theirs = transformers.GemmaTokenizer(vocab=ids, merges=merges, mask_token=None, extra_special_tokens=["<|turn>"])
    metadata = {
        "model": "gemma4", "tokens": tokens, "token_type": [3, 3, 3, 3, 3] + [6] * 256 + [1] * len(pieces),
        "merges": [" ".join(merge) for merge in merges], "bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3,
        "add_bos_token": True,
    }  # fmt: skip
    file = write_gguf(tmp_path / "a.gguf", {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}, {})
    ours = load_tokenizer(file)
    for text in (*TEXTS, "low lower  he\n<|turn>12"):
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text, add_special_tokens=False) == expected
        assert ours.encode(text) == [2, *expected]
        assert ours.decode(expected, skip_special_tokens=False) == theirs.decode(expected)


def test_template_for_tools_has_its_name_behind_the_key(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = write_folder("byte_level", tmp_path / "model")
    named = {"chat_template": "d", "chat_template.tool_use": "t", "chat_template.rag": "r"}
    _, settings = read_gguf_tokenizer(GGUFFile(as_file(folder, tmp_path / "a.gguf", PRE["byte_level"], **named)))
    assert settings.chat_template == {"default": "d", "tool_use": "t"}


def test_demo_tokenizer_with_template(demo_model: Path, tmp_path: Path) -> None:
    theirs = Tokenizer.from_folder(demo_model)
    ours = load_tokenizer(as_file(demo_model, tmp_path / "a.gguf", "gpt-2"))
    chat = [{"role": "user", "content": "Sort a list."}]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    for text in (*TEXTS, theirs.apply_chat_template(chat)):
        assert ours.encode(text) == theirs.encode(text)
    assert (ours.named_tokens, ours.special_token_ids) == (theirs.named_tokens, theirs.special_token_ids)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small_tokenizers.save(small_tokenizers.byte_level(), tmp_path / "model")


@pytest.fixture
def pieces(tmp_path: Path) -> Path:
    return small_tokenizers.save(small_tokenizers.byte_fallback(), tmp_path / "pieces")


@pytest.mark.parametrize("pre", WORD_RULES)
def test_every_rule_keeps_the_text(pre: str, folder: Path, tmp_path: Path) -> None:
    ours = load_tokenizer(as_file(folder, tmp_path / "a.gguf", pre, **{"ggml.add_bos_token": None}))
    for text in TEXTS[:4]:
        composed = text.replace("e\u0301", "é") if WORD_RULES[pre].composes else text
        assert ours.decode(ours.encode(text)) == composed
    assert (ours.encode("a")[0] == 0) == WORD_RULES[pre].adds_bos


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("gpt-2", ["I", "'", "LL", "Ġadd", "Ġ12345", "!", "Ċ"]),
        ("smollm", ["I", "'", "LL", "Ġadd", "Ġ", "1", "2", "3", "4", "5", "!", "Ċ"]),
        ("qwen2", ["I", "'LL", "Ġadd", "Ġ", "1", "2", "3", "4", "5", "!Ċ"]),
        ("llama-bpe", ["I", "'LL", "Ġadd", "Ġ", "123", "45", "!Ċ"]),
        ("command-r", ["I", "'", "LL", "Ġadd", "Ġ", "1", "2", "3", "4", "5", "!", "Ċ"]),
        ("glm4", ["I", "'LL", "Ġadd", "Ġ", "123", "45", "!Ċ"]),
        ("stablelm2", ["I", "'LL", "Ġadd", "Ġ", "1", "2", "3", "4", "5", "!Ċ"]),
        ("gpt-4o", ["I'LL", "Ġadd", "Ġ", "123", "45", "!Ċ"]),
        ("falcon", ["I", "'", "LL", "Ġadd", "Ġ", "123", "45", "!", "Ċ"]),
        ("tekken", ["I", "'LL", "Ġadd", "Ġ", "1", "2", "3", "4", "5", "!Ċ"]),
    ],
)
def test_rules_cut_words_as_they_say(pre: str, words: list[str], folder: Path, tmp_path: Path) -> None:
    tokenizer, _ = read_gguf_tokenizer(GGUFFile(as_file(folder, tmp_path / "a.gguf", pre)))
    found = [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str("I'LL add 12345!\n")]
    assert found == words


def test_tokens_of_falcon_are_those_of_its_tokenizer_json(tmp_path: Path) -> None:
    folder = small_tokenizers.save(small_tokenizers.falcon(), tmp_path / "model")
    theirs, ours = Tokenizer.from_folder(folder), load_tokenizer(as_file(folder, tmp_path / "a.gguf", "falcon"))
    for text in (*TEXTS, *small_tokenizers.CORPUS, "$a+b<=c 2024 1234567 x12y"):
        assert ours.encode(text) == theirs.encode(text)


def test_rule_of_older_files_is_that_of_the_architecture(folder: Path, tmp_path: Path) -> None:
    metadata = tokenizer_metadata(folder, "default")
    for architecture, pre in (("qwen2", "qwen2"), ("gpt2", "gpt-2")):
        named = write_gguf(tmp_path / "a.gguf", metadata | {"tokenizer.ggml.pre": pre}, {})
        default = write_gguf(tmp_path / "b.gguf", metadata | {"general.architecture": architecture}, {})
        ours, theirs = load_tokenizer(default), load_tokenizer(named)
        assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre 'default' is not supported; known are gpt-2"):
        load_tokenizer(write_gguf(tmp_path / "c.gguf", metadata | {"general.architecture": "llama"}, {}))


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user-defined"])
def test_text_of_a_special_token_is_one_token_whatever_its_type(kind: int, folder: Path, tmp_path: Path) -> None:
    vocabulary, texts = tokenizer_metadata(folder, "gpt-2"), ["<|im_end|>", "<|fim_prefix|>"]
    tokens = [*vocabulary["tokenizer.ggml.tokens"], *texts]
    types = [*vocabulary["tokenizer.ggml.token_type"], kind, kind]
    changes = {"ggml.tokens": tokens, "ggml.token_type": types}
    tokenizer, _ = read_gguf_tokenizer(GGUFFile(as_file(folder, tmp_path / "a.gguf", "gpt-2", **changes)))
    found = tokenizer.encode("a<|im_end|><|fim_prefix|>b", add_special_tokens=False).tokens
    assert [token for token in found if token in texts] == texts


def test_whole_tokenizer_json_wins(folder: Path, tmp_path: Path) -> None:
    theirs = Tokenizer.from_folder(folder)
    content = (folder / "tokenizer.json").read_text(encoding="utf-8")
    ours = load_tokenizer(as_file(folder, tmp_path / "a.gguf", "?", **{"huggingface.json": content}))
    assert [ours.encode(text) for text in TEXTS] == [theirs.encode(text) for text in TEXTS]


def test_tokens_around_a_text_are_those_asked_for(folder: Path, pieces: Path, tmp_path: Path) -> None:
    def ids(source: Path, **flags: bool | None) -> list[int]:
        changes = {f"ggml.{name}": value for name, value in flags.items()}
        ours = load_tokenizer(as_file(source, tmp_path / "a.gguf", "gpt-2", **changes))
        encoded = ours.encode("the")
        return [token for token in (encoded[0], encoded[-1]) if token < 2]

    assert ids(folder) == []
    assert ids(folder, add_bos_token=True) == [0]
    assert ids(folder, add_bos_token=True, add_eos_token=True) == [0, 1]
    assert ids(pieces, add_bos_token=None) == [0]
    assert ids(pieces, add_bos_token=False, add_eos_token=True) == [1]


def test_space_before_a_text_is_added_unless_the_file_says_no(pieces: Path, tmp_path: Path) -> None:
    spaced, plain = (
        load_tokenizer(as_file(pieces, tmp_path / f"{flag}.gguf", "", **{"ggml.add_space_prefix": flag}))
        for flag in (True, False)
    )
    assert spaced.encode(" the") != plain.encode(" the") == spaced.encode("the")
    assert plain.decode(plain.encode(" the")) == " the"
    assert spaced.decode(spaced.encode("the")) == "the"


def test_file_without_a_vocabulary_takes_token_ids(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for metadata in ({}, {"tokenizer.ggml.model": "none"}):
        assert load_tokenizer(write_gguf(tmp_path / "a.gguf", metadata, {})) is None
    assert "has no tokenizer" in caplog.text


def test_thousands_of_special_tokens_take_no_time_each(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata = tokenizer_metadata(folder, "gpt-2")
    num_tokens = len(metadata["tokenizer.ggml.tokens"])
    more = {
        "tokenizer.ggml.tokens": metadata["tokenizer.ggml.tokens"] + [f"<|{number}|>" for number in range(20_000)],
        "tokenizer.ggml.token_type": metadata["tokenizer.ggml.token_type"] + [3, 4] * 10_000,
    }
    path, start = write_gguf(tmp_path / "a.gguf", metadata | more, {}), time.process_time()
    ours = load_tokenizer(path)
    assert time.process_time() - start < 30  # for what takes 0.5 s; one list for each token would take minutes
    assert ours.encode("<|0|><|19999|>") == [num_tokens, num_tokens + 19_999]
    assert num_tokens in ours.special_token_ids
    assert num_tokens + 1 not in ours.special_token_ids
    monkeypatch.setattr(gguf_tokenizer, "MAX_ADDED_TOKENS", 20_002)
    with pytest.raises(ModelError, match="token_type has 20003 special or user-defined tokens, the limit is 20002"):
        load_tokenizer(path)


BROKEN: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"ggml.model": "bert"}, "tokenizer.ggml.model must be gpt2, llama or gemma4, got 'bert'; --tokenizer"),
    "rule": ({"ggml.pre": "viking"}, "tokenizer.ggml.pre 'viking' is not supported; known are gpt-2, "),
    "no tokens": ({"ggml.tokens": None}, "tokenizer.ggml.tokens must be an array of strings, it is missing"),
    "no merges": ({"ggml.merges": None}, "tokenizer.ggml.merges must be an array of strings, it is missing"),
    "merges": ({"ggml.merges": ["ab"]}, "tokenizer.ggml.merges 0: expected two tokens, got 'ab'"),
    "merge to no token": ({"ggml.merges": ["! $"]}, "is not a tokenizer that can be loaded"),
    "types": ({"ggml.token_type": [1, 1]}, "tokenizer.ggml.token_type has 2 items, and tokenizer.ggml.tokens"),
    "twice": ({"ggml.tokens": ["a"] * 2, "ggml.token_type": [1] * 2}, "tokenizer.ggml.tokens has the token 'a' twice"),
    "no such id": ({"ggml.bos_token_id": 10**6}, "tokenizer.ggml.bos_token_id must be a token id from 0 to"),
    "no flag": ({"ggml.add_bos_token": "yes"}, "tokenizer.ggml.add_bos_token must be true or false, got 'yes'"),
    "template": ({"chat_template": 3}, "tokenizer.chat_template must be a string, got 3"),
    "scores": ({"ggml.model": "llama", "ggml.scores": [0.0]}, "tokenizer.ggml.scores has 1 items, and tokenizer.ggml"),
    "no scores": ({"ggml.model": "llama"}, "tokenizer.ggml.scores must be an array of numbers, it is missing"),
    "json": ({"huggingface.json": "{"}, "is not a tokenizer that can be loaded"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_vocabulary_is_refused_by_key(kind: str, folder: Path, tmp_path: Path) -> None:
    changes, words = BROKEN[kind]
    path = as_file(folder, tmp_path / "a.gguf", "gpt-2", **changes)
    with pytest.raises(ModelError, match=words) as error:
        load_tokenizer(path)
    assert str(path) in str(error.value)
