"""A folder and a tokenizer for each name, made once for all tests of this layer."""

from pathlib import Path

import pytest

from quire.text.tokenizer import Tokenizer
from support.text_tokenizers import write_folder


@pytest.fixture(scope="session")
def tokenizer_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model folder with the tokenizer that the test names as its parameter."""
    return write_folder(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="session")
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Return the tokenizer that the test names as its parameter."""
    return Tokenizer.from_folder(write_folder(request.param, tmp_path_factory.mktemp(request.param)))
