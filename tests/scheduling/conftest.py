"""Time for reads of blocks: a busy machine may hold up the thread of a disk or of a connection."""

import pytest


@pytest.fixture(autouse=True)
def _reads_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.kv_reads.READ_LIMIT_S", 120.0)
