"""The replicas that an ingress knows, without a cluster: numbers for the router, and what is sent."""

import importlib.util
import pickle
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

from quire.core.deltas import Admission, SequenceDelta
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.messages import EngineState, Stepped

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")         # raised in Ray's own modules
    from quire.cluster import routing
    from quire.cluster.routing import EngineCall, ReplicaTable

NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS = 64, 4, 100


def request_of(number: int, tokens: list[int]) -> Request:
    return Request(number, pack_tokens(tokens), SamplingParams(max_tokens=8), seed=0, max_tokens=8)


def replicas(*names: str) -> list[Any]:
    return [SimpleNamespace(replica_id=name) for name in names]


def names_of(ranked: list[list[Any]]) -> list[str]:
    return [rank.replica_id for (rank,) in ranked]


def test_replica_with_the_least_work_is_first_and_all_are_ranked() -> None:
    table, both = ReplicaTable(NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, 3), replicas("a", "b")
    first = request_of(1, [1] * 40)
    assert names_of(table.rank(both, first)) == ["a", "b"]
    table.assign("a", first)  # type: ignore[arg-type]
    assert names_of(table.rank(both, request_of(2, [2] * 8))) == ["b", "a"]
    assert names_of(table.rank(both, request_of(3, [1] * 40))) == ["a", "b"]        # cached there
    finished = [SequenceDelta(1, 0, [5], finish_reason="stop")]
    table.record_step(1, Stepped(0.0, 0, [Admission(1, 0)], finished, EngineState(1, 0, 0)))
    assert names_of(table.rank(both, request_of(4, [3] * 8)))[0] == "b"             # nothing waits: fewer routed tokens


def test_replica_that_has_gone_frees_its_number_and_its_cache() -> None:
    table = ReplicaTable(NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, 2)
    first = request_of(1, [1] * 40)
    table.rank(replicas("a", "b"), first)
    table.assign("a", first)  # type: ignore[arg-type]
    assert names_of(table.rank(replicas("b", "c"), request_of(2, [1] * 40)))[0] in ("b", "c")
    table.record_step(1, Stepped(0.0, 0, [Admission(1, 0)], [], EngineState(1, 0, 0)))   # a late report
    table.forget(1)
    table._router.check()


def test_table_stays_behind_when_a_call_is_sent() -> None:
    call = EngineCall(request_of(1, [1, 2, 3]), ReplicaTable(NUM_BLOCKS, BLOCK_SIZE, MAX_NUM_SEQS, 2))
    sent = pickle.loads(pickle.dumps(call))
    assert sent.table is None
    assert (sent.request.request_id, sent.request.prompt_token_ids) == (1, pack_tokens([1, 2, 3]))


def test_age_of_a_request_is_sent_and_no_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    call = EngineCall(request_of(1, [1, 2, 3]), None)
    assert pickle.loads(pickle.dumps(call)).request.received_s is None
    call.request.received_s = 90.0
    monkeypatch.setattr(routing, "time", SimpleNamespace(monotonic=lambda: 100.0))
    sent = pickle.dumps(call)
    monkeypatch.setattr(routing, "time", SimpleNamespace(monotonic=lambda: 7.0))  # another machine's
    assert pickle.loads(sent).request.received_s == -3.0
