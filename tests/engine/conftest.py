"""Time for engines to end by themselves, for ranks to give a sign, and for reads: a busy machine may hold all up."""

import pytest


@pytest.fixture(autouse=True)
def _engines_may_take_their_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("quire.engine.launcher.STOP_TIMEOUT_S", 60.0)
    monkeypatch.setattr("quire.engine.parallel.rank_set.SILENCE_SHARE", 60.0)   # of a stall limit of 10 s
    monkeypatch.setattr("quire.engine.kv_reads.READ_LIMIT_S", 120.0)
