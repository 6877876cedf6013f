"""Token ids of GGUF tokenizers, which are llama.cpp's for the same file."""

from pathlib import Path

import pytest

from quire.engine.formats import load_tokenizer
from quire.text.tokenizer import Tokenizer
from support.llama_cpp import LlamaCpp
from support.scripts import SCRIPTS, texts

pytestmark = pytest.mark.real


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    """Return our tokenizer of the file."""
    loaded = load_tokenizer(model)
    assert loaded is not None
    return loaded


@pytest.mark.parametrize("script", SCRIPTS)
def test_ids_are_llama_cpps(script: str, tokenizer: Tokenizer, llama_cpp: LlamaCpp) -> None:
    different = {}
    for text in texts(script, 100):
        ours, theirs = tokenizer.encode(text), llama_cpp.encode(text)
        if ours != theirs:
            different[text] = (ours, theirs)
    assert not different
