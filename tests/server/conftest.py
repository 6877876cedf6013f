"""The demo model behind HTTP, for all tests of this folder."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.engine.options import EngineOptions
from support.openai_server import OpenAIServer, openai_server


@pytest.fixture(scope="session")
def running_server(demo_model: Path) -> Iterator[OpenAIServer]:
    """Return a server that takes few requests at once, so that others wait."""
    engine = EngineOptions(model=str(demo_model), max_num_seqs=8, max_model_len=1024, num_kv_blocks=512)
    with openai_server(engine, max_queued_requests=20, max_n=8, allow_client_priority=True) as server:
        yield server


@pytest.fixture
def server(running_server: OpenAIServer) -> Iterator[OpenAIServer]:
    """Return the server; whatever a test does to it, nothing of it is left behind."""
    yield running_server
    running_server.wait_until(running_server.is_idle)
