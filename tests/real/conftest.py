"""Files that `make real` fetches; a test is skipped where those that it needs are absent."""

import os
import platform
from collections.abc import Iterator
from pathlib import Path

import pytest

from real_files import FOLDER, REAL_FILES
from support.llama_cpp import LlamaCpp, write_floats

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
def llama_cpp_folder() -> Path:
    """Return the folder of llama.cpp's libraries."""
    if platform.machine() != "x86_64":
        pytest.skip("the prebuilt libraries of llama.cpp are for x86-64")
    return real_file("llama.cpp")


@pytest.fixture(scope="session")
def llama_cpp(model: Path, llama_cpp_folder: Path) -> Iterator[LlamaCpp]:
    """Return llama.cpp with the model loaded."""
    with LlamaCpp(llama_cpp_folder, model) as loaded:
        yield loaded


@pytest.fixture(scope="session")
def floats(smollm2: Path, llama_cpp_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the path of a file with the chat model's weights as float32, which llama.cpp has written."""
    path = write_floats(llama_cpp_folder, smollm2, tmp_path_factory.mktemp("floats") / "floats.gguf")
    yield path
    path.unlink()
