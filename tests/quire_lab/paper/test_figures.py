"""Figures: what they compare, and where a system's rate is read off its curve."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from quire.core.errors import ConfigError
from quire.core.plan import StepPlan
from quire_lab.paper import pictures, serving
from quire_lab.paper.figures import FIGURES, Comparison, Result, Settings, chosen
from quire_lab.paper.runs import Point, PointOutcome
from quire_lab.paper.serving import sustained_rate
from quire_lab.sim.models import set_up

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
    result = Result([{"a": 1.0}, {"a": 2.0}, {"b": "x", "c": 3.0}], [])
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


def test_recomputing_costs_what_it_adds_to_a_step_that_runs_anyway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SIZES", (16,))
    [told] = [row for row in serving.swap(SETTINGS).rows if row["way"] == "recompute" and "ms for 512 tokens" in row]
    cost = set_up("OPT-13B").cost_model()
    alone = StepPlan(rows=[0], starts=[40], counts=[1])
    both = StepPlan(rows=[0, 1], starts=[40, 0], counts=[1, 512], sample_rows=[1])
    assert told["ms for 512 tokens"] == pytest.approx(1e3 * (cost.step_s(both) - cost.step_s(alone)), rel=0.01)


def test_sharing_is_measured_on_as_many_requests_of_both_workloads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[Point]()

    def note(points: Sequence[Point], *, watches: bool) -> list[PointOutcome]:
        asked.extend(points)
        return [PointOutcome() for _ in points]

    monkeypatch.setattr(serving, "run_all", note)
    serving.sharing(Settings())
    assert {point.workload for point in asked} == {"alpaca", "sharegpt"}
    assert {round(point.rate * point.trace_s) for point in asked} == {360}
