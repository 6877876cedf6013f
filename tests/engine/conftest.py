"""Time for engines to end by themselves: how they end is looked at, and a busy machine may hold them up."""

import pytest


@pytest.fixture(autouse=True)
def _engines_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.launcher.STOP_TIMEOUT_S", 60.0)
