"""Files that `make real` fetches; a test is skipped where those that it needs are absent."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_files import FOLDER, REAL_FILES
from support.llama_cpp import LlamaCpp

MODELS = ("smollm2", "gemma3")


def real_file(name: str) -> Path:
    """Return the path of a file, or skip the test."""
    path = Path(os.environ.get("QUIRE_REAL_FILES", FOLDER), REAL_FILES[name].path)
    if not path.exists():
        pytest.skip(f"{path} is absent: `make real` fetches it")
    return path


@pytest.fixture(scope="session", params=MODELS)
def model(request: pytest.FixtureRequest) -> Path:
    """Return the path of each of the GGUF files of decoders, in turn."""
    return real_file(request.param)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Return the path of the chat model."""
    return real_file("smollm2")


@pytest.fixture(scope="session")
def minilm() -> Path:
    """Return the folder of the embedder."""
    return real_file("minilm")


@pytest.fixture(scope="session")
def llama_cpp(model: Path) -> Iterator[LlamaCpp]:
    """Return llama.cpp with the model loaded."""
    with LlamaCpp(real_file("llama.cpp"), model) as loaded:
        yield loaded
