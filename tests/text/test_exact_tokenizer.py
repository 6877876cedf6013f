"""Tokenizers for grammars: the same tokens without what changes a text, and llguidance reads them as they decode."""

import json
import re
from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, decoders, normalizers

from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.grammars.constrained import TokenizerText, read_vocabulary
from quire.formats.gguf.gguf_file import GGUFFile
from quire.formats.gguf.gguf_tokenizer import read_gguf_tokenizer
from quire.text.token_bytes import exact_tokenizer_json
from quire.text.tokenizer import Tokenizer as ModelTokenizer
from support import small_tokenizers
from support.gguf_files import tokenizer_metadata, write_gguf
from support.grammars import Vocabulary, allowed, begin, new_row, start

TEXTS = ["def add(a, b):", "  two spaces ", "na\u00efve e\u0301 caf\u00e9", "\u65e5\u672c \U0001f600", '{"a": [1, 2]}']
NAMES = ["byte_level", "byte_fallback", "gpt2", "mistral_v1", "stories260K"]


@pytest.mark.parametrize("tokenizer", NAMES, indirect=True)
def test_library_spells_texts_by_the_same_bytes(tokenizer: ModelTokenizer) -> None:
    text = tokenizer.exact_json()
    assert text is not None
    library = read_vocabulary(TokenizerText(text, tokenizer.vocab_size), tokenizer.vocab_size + 70, frozenset({1}))
    assert library.vocab_size == tokenizer.vocab_size + 70
    assert library.eos_tokens == [1]
    table = tokenizer.token_bytes(skip_special_tokens=False)
    assert table is not None
    for each in range(tokenizer.vocab_size):
        if each not in tokenizer.special_token_ids and table[each] != b"\xff":  # the library marks special ones by it
            assert library.decode_bytes([each]) == table[each]
    for each in TEXTS:
        assert b"".join(table[token] for token in library.tokenize_str(each)) == each.encode()


def test_tokenizer_of_a_gguf_file_is_read(demo_model: Path, tmp_path: Path) -> None:
    metadata = tokenizer_metadata(demo_model, "gpt-2")
    written = {key: value for key, value in metadata.items() if value is not None}
    backend, settings = read_gguf_tokenizer(GGUFFile(write_gguf(tmp_path / "a.gguf", written, {})))
    tokenizer = ModelTokenizer(backend, settings)
    text = tokenizer.exact_json()
    assert text is not None
    library = read_vocabulary(TokenizerText(text, tokenizer.vocab_size), tokenizer.vocab_size, frozenset())
    assert library.tokenize_str("def add(a, b):") == tokenizer.encode("def add(a, b):", add_special_tokens=False)


def test_normalizers_that_change_texts_are_left_out() -> None:
    backend = small_tokenizers.byte_fallback()
    kept = json.loads(exact_tokenizer_json(backend) or "")["normalizer"]
    changing = [normalizers.NFC(), normalizers.Lowercase(), normalizers.Replace(Regex(" +"), " "), normalizers.Strip()]
    backend.normalizer = normalizers.Sequence([*changing, normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    assert json.loads(exact_tokenizer_json(backend) or "")["normalizer"] == kept
    backend.normalizer = normalizers.NFC()
    assert json.loads(exact_tokenizer_json(backend) or "")["normalizer"] is None
    assert isinstance(Tokenizer.from_str(exact_tokenizer_json(backend) or ""), Tokenizer)


@pytest.mark.parametrize("name", ["metaspace", "metaspace_alone"])
def test_metaspace_decoders_spell_tokens_as_inside_of_a_text(name: str, tmp_path: Path) -> None:
    folder = small_tokenizers.save(getattr(small_tokenizers, name)(), tmp_path)
    tokenizer = ModelTokenizer.from_folder(folder)
    vocabulary, anchor = Vocabulary(folder), tokenizer.encode("a", add_special_tokens=False)
    before = tokenizer.decode(anchor)
    for each in set(range(tokenizer.vocab_size)) - tokenizer.special_token_ids:
        text = tokenizer.decode([*anchor, each]).removeprefix(before)
        spelled = vocabulary.library.decode_bytes([each])
        assert spelled.decode(errors="replace") == text or (spelled, text) == (b"", "\ufffd")  # 0xFF marks special ones
    for text in ("the stop", " the  stops", "stop"):
        tokens = vocabulary.library.tokenize_str(text)
        assert tokenizer.decode([*anchor, *tokens]) == before + text
    rows, output = vocabulary.rows(), list[int]()
    begin(rows, new_row(0, StructuredOutputsParams(regex="(the|stop) (the|stop)  the stop")))
    for _ in range(20):
        step = start(rows, {0: output})
        output.append(max(allowed(step, vocabulary.vocab_size)[0]))
        progress = step.advance(0, output[-1:], 9)
        assert progress is not None
        assert progress.failure is None
        output += progress.forced
        if progress.has_ended:
            break
    assert re.fullmatch("a(the|stop) (the|stop)  the stop", tokenizer.decode([*anchor, *output]))


def test_tokens_written_like_bytes_that_are_text_are_not_read_as_bytes() -> None:
    backend = small_tokenizers.metaspace()
    backend.decoder = decoders.Metaspace()
    assert exact_tokenizer_json(backend) is None


@pytest.mark.parametrize("tokenizer", ["word_level"], indirect=True)
def test_tokenizer_without_bytes_of_tokens_has_none(tokenizer: ModelTokenizer) -> None:
    assert tokenizer.exact_json() is None
