"""Time for servers to answer: a busy machine may hold them up, and figures of theirs would be missing."""

import pytest


@pytest.fixture(autouse=True)
def _metrics_may_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire_lab.bench.server._TIMEOUT_S", 120.0)
    monkeypatch.setattr("quire_lab.bench.http_load._CONNECT_S", 120.0)
