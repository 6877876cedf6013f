"""Figures: what they compare, and where a system's rate is read off its curve."""

from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.paper import pictures, serving
from quire.paper.figures import FIGURES, Comparison, Result, Settings, chosen
from quire.paper.serving import sustained_rate

SETTINGS = Settings(trace_s=2.0, data=Path("no such folder"))


@pytest.mark.parametrize(
    ("ours", "low", "high", "ratio"),
    [(2.0, 1.7, 2.7, 1.0), (3.0, 1.0, 2.0, 1.5), (1.0, 2.0, 4.0, 0.5), (3.0, 4.0, 4.0, 0.75)],
)
def test_a_ratio_is_one_within_the_papers_range(ours: float, low: float, high: float, ratio: float) -> None:
    assert Comparison("rate", ours, low, high).ratio == ratio


def test_an_unknown_figure_is_refused_with_the_list() -> None:
    with pytest.raises(ConfigError, match=r"figure must be all or one of .*layout.*got 'latencies'"):
        chosen(["layout", "latencies"])
    assert set(chosen(["all"])) == set(FIGURES)


def test_rows_with_the_same_columns_are_one_table() -> None:
    result = Result([{"a": 1.0}, {"a": 2.0}, {"b": "x", "c": 3.0}], draw=pytest.fail)
    assert [(columns, len(rows)) for columns, rows in result.tables] == [(("a",), 2), (("b", "c"), 1)]


def test_a_rate_is_read_where_the_curve_passes_the_limit() -> None:
    assert sustained_rate([(1.0, 0.1), (2.0, 0.4)]) == pytest.approx(1.5)
    assert sustained_rate([(1.0, 0.1), (2.0, 0.15)]) == 2.0
    assert sustained_rate([(1.0, 3.0)]) == 1.0


def test_memory_grows_as_the_policies_reserve() -> None:
    rows = pictures.layout(SETTINGS).rows
    fit = [row["requests that fit"] for row in rows if "system" in row]
    assert fit[0] == 7
    assert fit == sorted(fit, key=float)


def test_walks_through_block_tables_are_the_papers() -> None:
    result = pictures.tables(SETTINGS)
    assert [each.ratio for each in result.comparisons] == [1.0, 1.0]
    last = [row for row in result.rows if row["scene"] == "four beams (9), one token each"]
    assert {row["block"]: row["references"] for row in last} == {0: 4, 1: 4, 3: 4, 6: 2, 7: 2, 2: 1, 4: 1, 5: 1, 8: 1}


def test_fitted_lengths_have_the_papers_means() -> None:
    for each in pictures.lengths(SETTINGS).comparisons:
        assert each.ratio == pytest.approx(1.0, abs=0.1), each.what


def test_swapping_many_small_blocks_takes_longer_and_recomputing_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SIZES", (1, 16, 256))
    rows = [row for row in serving.swap(SETTINGS).rows if "ms for 512 tokens" in row]
    swapped, again = ([row["ms for 512 tokens"] for row in rows if row["way"] == way] for way in ("swap", "recompute"))
    assert swapped == sorted(swapped, key=float, reverse=True)
    assert float(swapped[0]) > 3 * float(swapped[-1])
    assert len(set(again)) == 1
