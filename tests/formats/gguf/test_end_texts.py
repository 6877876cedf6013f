"""Ends of answers of GGUF models, by name and by text."""

from pathlib import Path

import pytest

from quire.core.errors import ModelError
from quire.formats.gguf.gguf_config import gguf_eos_token_ids
from quire.formats.gguf.gguf_file import GGUFFile
from support.gguf_files import write_gguf

ENDS = (  # llama.cpp's
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>",
    "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~[", "<|fim_pad|>", "<fim-pad>", "<fim_pad>",
    "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>", "<|file_sep|>",
)  # fmt: skip


def ends(folder: Path, tokens: list[str], kind: int = 3, **named: int) -> set[str]:
    """Return the texts of the tokens that end an answer, of a vocabulary with these tokens in it."""
    texts = ["a", "b", *tokens, "c"]
    metadata = {"tokenizer.ggml.tokens": texts, "tokenizer.ggml.token_type": [kind] * len(texts)}
    named = {f"tokenizer.ggml.{key}_token_id": value for key, value in named.items()}
    found = gguf_eos_token_ids(GGUFFile(write_gguf(folder / "a.gguf", metadata | named, {})), len(texts))
    return {texts[index] for index in found}


@pytest.mark.parametrize("kind", [1, 3, 4], ids=["normal", "control", "user-defined"])
def test_text_ends_an_answer_whatever_the_type_of_its_token(kind: int, tmp_path: Path) -> None:
    for text in ENDS:
        assert ends(tmp_path, [text, "<|im_start|>", "<|im_end"], kind) == {text}


def test_named_tokens_end_an_answer_beside_those_with_known_texts(tmp_path: Path) -> None:
    assert ends(tmp_path, ["<|im_end|>", "x"], eos=0, eot=1) == {"a", "b", "<|im_end|>"}
    assert ends(tmp_path, [], eos=0, eom=1) == {"a", "b"}
    assert ends(tmp_path, []) == set()
    assert ends(tmp_path, ["<PAD>", "<|file_sep|>"], fim_pad=4) == {"c", "<|file_sep|>"}  # another padding token
    with pytest.raises(ModelError, match="eos_token_id must be an integer from 0 to 2, got 3"):
        ends(tmp_path, [], eos=3)


def test_file_without_a_vocabulary_has_the_ends_that_it_names(tmp_path: Path) -> None:
    file = GGUFFile(write_gguf(tmp_path / "a.gguf", {"tokenizer.ggml.eos_token_id": 2}, {}))
    assert gguf_eos_token_ids(file, 5) == {2}


@pytest.mark.parametrize(
    ("tokens", "without"),
    [
        (["<|end|>", "<|return|>", "<|call|>"], "<|end|>"),
        (["<|end|>", "<|flush|>", "<|calls|>"], "<|end|>"),
        (["<|end|>", "<|return|>"], None),
        (["<|end|>", "<|flush|>"], None),
        (["</s>", "<|tool_response>", "<turn|>"], "</s>"),
        (["</s>", "<turn|>"], None),
    ],
    ids=["gpt-oss", "Solar Open", "half of gpt-oss", "half of Solar Open", "Gemma 4", "no Gemma 4"],
)
def test_text_that_ends_something_else_in_a_vocabulary_ends_no_answer(
    tokens: list[str], without: str | None, tmp_path: Path
) -> None:
    assert ends(tmp_path, tokens) == set(tokens) - {without}
    assert ends(tmp_path, tokens, eos=2) == set(tokens) - {without}
