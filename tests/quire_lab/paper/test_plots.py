"""Plots: panels of data become pictures in which no text lies on another."""

from itertools import combinations

import pytest

from quire_lab.paper.plots import Bars, Blocks, LengthHistogram, Lines, Panel, drawn
from quire_lab.paper.runs import SYSTEMS

pytest.importorskip("matplotlib", reason="plots need matplotlib")
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

CURVE = [(2.0**i, 900.0 / 2**i) for i in range(9)]
PANELS: dict[str, Panel] = {
    "systems": Bars("title", list(SYSTEMS), "unit", {"": [1234.0, 0.0365, 7.0, 9.81, 132.4, 2.0]}),
    "pairs": Bars("title", ["Orca (Max)", "Orca (Pow2)", "Orca (Oracle)", "paged"], "unit",
                  {"ours": [2.65, 22.7, 7.0, 30.4], "the paper": [2.65, 22.8, 7.0, 132.0]}),
    "groups": Bars("title", [f"alpaca,\n{i}" for i in range(4)], "unit", {f"{i} answer": [12.3] * 4 for i in range(3)}),
    "stacked": Bars("title", list(SYSTEMS)[:4], "unit", {f"part {i}": [24.0, 26.0, 25.0, 0.1] for i in range(4)}, True),
    "curves": Lines("title", "rate", "latency", dict.fromkeys(SYSTEMS, CURVE), 0.5),
    "block sizes": Lines("title", "block size", "latency", {"recompute": CURVE, "swap": CURVE}, log2="xy"),
    "lengths": LengthHistogram("title", {"prompt": [3, 5, 8], "output": [100, 200]}, 300),
    "blocks": Blocks("title\ncaption", {0: (4, 4, "A0 B0 C0 D0"), 1: (2, 1, "A1")}),
}  # fmt: skip


@pytest.mark.parametrize("panel", PANELS.values(), ids=PANELS)
def test_no_text_lies_on_another(panel: Panel) -> None:
    plot = drawn([panel])
    FigureCanvasAgg(plot).draw()
    beyond = {  # labels of ticks outside of an axis are texts, but are not drawn
        tick.label1
        for axes in plot.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in axis.get_major_ticks()
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    }
    texts = [text for text in plot.findobj(Text) if isinstance(text, Text) and text.get_text() and text not in beyond]
    inside = {text: text.get_window_extent() for text in texts if text.get_visible()}
    meeting = [(a.get_text(), b.get_text()) for a, b in combinations(inside, 2) if inside[a].overlaps(inside[b])]
    assert inside
    assert not meeting


def test_thousands_are_told_as_people_write_them() -> None:
    texts = [text.get_text() for text in drawn([PANELS["systems"]]).findobj(Text) if isinstance(text, Text)]
    assert {"1,234", "0.0365", "9.81", "132"} <= set(texts)


def test_panels_stand_in_rows_of_three_and_leave_no_empty_axes() -> None:
    assert len(drawn([PANELS["curves"]] * 4).axes) == 4
    assert len(drawn([PANELS["blocks"]] * 6).axes) == 6
