"""Packed positions read as they were written, however they were appended, and take 16 bytes a candidate."""

import random

import msgspec
import pytest

from quire.core.logprob_table import CANDIDATE_BYTES, LogprobBuffer, LogprobTable, Position


def position(rng: random.Random, count: int) -> Position:
    ids = [rng.randrange(1 << 31) for _ in range(count)]
    return ids, [-rng.random() * 50 for _ in ids], [rng.randrange(1, 1 << 31) for _ in ids]


@pytest.mark.parametrize("kind", [LogprobTable, LogprobBuffer])
@pytest.mark.parametrize("seed", range(20))
def test_any_slice_is_what_was_appended(kind: type[LogprobTable | LogprobBuffer], seed: int) -> None:
    rng = random.Random(seed)
    table, known = kind(), list[Position]()
    for _ in range(rng.randint(0, 8)):
        added = [position(rng, rng.randint(1, 5)) for _ in range(rng.randint(0, 9))]
        table.extend(added)
        known += added
        assert len(table) == len(known)
        assert table.num_candidates == sum(len(ids) for ids, _, _ in known)
        start = rng.randint(0, len(known))
        stop = rng.randint(start, len(known) + 3)
        assert table.positions(start, stop) == known[start:stop]
    assert table.positions(0, len(known)) == known


def test_tables_cross_the_process_boundary() -> None:
    table = LogprobTable.of([position(random.Random(1), 21) for _ in range(50)])
    raw = msgspec.msgpack.encode(table)
    assert msgspec.msgpack.decode(raw, type=LogprobTable) == table
    assert len(raw) < CANDIDATE_BYTES * table.num_candidates + 8 * len(table) + 64
