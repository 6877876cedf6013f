"""A real server, in a process of its own, for real clients: a model whose answers are known beforehand."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.reciting_model import Reciter, write_reciter
from support.server import ServerProcess, running_server
from support.small_tokenizers import byte_level

MODEL = "reciter"


@pytest.fixture(scope="session")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Reciter:
    """Return a model that recites a text, cut into bytes and pieces."""
    return write_reciter(tmp_path_factory.mktemp("reciter"), byte_level())


@pytest.fixture(scope="module")
def server(reciter: Reciter) -> Iterator[ServerProcess]:
    """Serve the model."""
    with running_server(str(reciter.folder), "--served-model-name", MODEL) as running:
        yield running


@pytest.fixture(scope="module")
def strict_server(demo_model: Path) -> Iterator[ServerProcess]:
    """Serve the demo model to those who have the key, one at a time, with one place in the queue."""
    arguments = ("--api-key", "sesame", "--max-num-seqs", "1", "--max-queued-requests", "1")
    with running_server(*arguments, "--served-model-name", MODEL) as running:
        yield running
