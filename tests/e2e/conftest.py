"""A real server, in a process of its own, for real clients: a model whose answers are known beforehand."""

from collections.abc import Iterator

import pytest

from support.clients import KEY, MODEL
from support.reciting_model import Reciter, write_reciter
from support.server import ServerProcess, running_server
from support.small_tokenizers import byte_level


@pytest.fixture(autouse=True)
def _reads_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let engines in this process wait for blocks: a busy machine may hold up the thread that reads them."""
    monkeypatch.setattr("quire.engine.kv_reads.READ_LIMIT_S", 120.0)


@pytest.fixture(scope="session")
def reciter(tmp_path_factory: pytest.TempPathFactory) -> Reciter:
    """Return a model that recites a text, cut into bytes and pieces."""
    return write_reciter(tmp_path_factory.mktemp("reciter"), byte_level())


@pytest.fixture(scope="module")
def server(reciter: Reciter) -> Iterator[ServerProcess]:
    """Serve the model to clients with the key."""
    with running_server(str(reciter.folder), "--served-model-name", MODEL, "--api-key", KEY) as running:
        yield running
