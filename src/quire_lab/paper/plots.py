"""Plots: a panel is plain data, drawn here in one style.

matplotlib is an extra: it is loaded here, and nowhere else.
"""

from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import zip_longest
from textwrap import fill
from typing import TYPE_CHECKING, Any, NamedTuple

from quire_lab.paper.runs import FASTER_TRANSFORMER, MAX, ORACLE, PAGED, POW2, QUIRE

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLORS = {
    FASTER_TRANSFORMER: "#8c8c8c", MAX: "#c9a227", POW2: "#d9793d",
    ORACLE: "#a8438f", PAGED: "#2f6db5", QUIRE: "#178a6b",
}  # fmt: skip
CYCLE = ("#2f6db5", "#d9793d", "#178a6b", "#a8438f", "#c9a227", "#8c8c8c")
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans", "font.size": 9, "axes.titlesize": 10, "axes.spines.top": False,
    "axes.spines.right": False, "axes.grid": True, "grid.color": "#e4e4e4", "axes.axisbelow": True,
    "legend.frameon": False, "legend.fontsize": 8, "figure.constrained_layout.use": True, "savefig.dpi": 150,
}  # fmt: skip
MAX_COLUMNS = 3
HEIGHT, BLOCKS_HEIGHT = 3.6, 1.9  # inches of a panel
Grid = dict[int, tuple[int, int, str]]  # per block in use: slots filled, references, owner and column


class Lines(NamedTuple):
    """Curves with markers, the first the thickest: equal ones show behind each other. Above `top` nothing is shown."""

    title: str
    x_label: str
    y_label: str
    series: Mapping[str, Sequence[tuple[float, float]]]
    top: float | None = None
    log2: str = ""  # axes on which each power of two is as far from the next: "", "x" or "xy"

    def draw(self, axes: "Axes") -> None:
        """Draw the panel."""
        for number, (label, points) in enumerate(self.series.items()):
            width = 1.2 + 0.4 * (len(self.series) - 1 - number)
            axes.plot(*zip(*points, strict=True), marker="o", markersize=width + 2, linewidth=width, label=label,
                      color=_color(label, number))  # fmt: skip
        axes.set(title=self.title, xlabel=self.x_label, ylabel=self.y_label)
        for name, limit in (("x", None), ("y", self.top)):
            if name in self.log2:
                getattr(axes, f"set_{name}scale")("log", base=2)
                getattr(axes, f"{name}axis").set_major_formatter("{x:g}")
            else:
                axes.set(**{f"{name}lim": (0, limit)})
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


class Bars(NamedTuple):
    """Groups with a bar for each of the series, side by side, or one on the other; values beside them."""

    title: str
    groups: Sequence[str]
    y_label: str
    series: Mapping[str, Sequence[float]]
    is_stacked: bool = False

    def draw(self, axes: "Axes") -> None:
        """Draw the panel."""
        stacked, num_series = self.is_stacked, len(self.series)
        below, width = [0.0] * len(self.groups), 0.8 if stacked else 0.8 / num_series
        top = max(map(sum, zip(*self.series.values(), strict=True)))
        for number, (label, values) in enumerate(self.series.items()):
            shift = 0.0 if stacked else (number - (num_series - 1) / 2) * width
            drawn = axes.bar([place + shift for place in range(len(values))], values, width, below if stacked else 0.0,
                             label=label, color=_color(label, number))  # fmt: skip
            axes.bar_label(drawn, [_told(value) if not stacked or value > top / 25 else "" for value in values],
                           label_type="center" if stacked else "edge", fontsize=7,
                           color="white" if stacked else "black", padding=0 if stacked else 1)  # fmt: skip
            if stacked:
                below = [low + value for low, value in zip(below, values, strict=True)]
        names = [name.replace(" (", "\n(").replace("rTrans", "r-\nTrans-\n") for name in self.groups]
        axes.set(title=self.title, ylabel=self.y_label)
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=False, axis="x")
        axes.margins(y=0 if stacked else 0.12)
        if num_series > 1:
            num_lines = 1 + max(name.count("\n") for name in names)
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.06 - 0.06 * num_lines),
                        ncols=3 if num_series == 3 else 2)  # fmt: skip


class LengthHistogram(NamedTuple):
    """Histogram of requests by their tokens, up to `longest`."""

    title: str
    samples: Mapping[str, Sequence[int]]
    longest: int

    def draw(self, axes: "Axes") -> None:
        """Draw the panel."""
        for (label, sample), color in zip(self.samples.items(), CYCLE, strict=False):
            axes.hist(sample, bins=40, range=(0, self.longest), alpha=0.6, label=label, color=color)
        axes.set(title=self.title, xlabel="tokens", ylabel="requests")
        axes.legend()


class Blocks(NamedTuple):
    """A pool of 16 blocks: a box for each slot, filled from the left, and the columns that hold each block."""

    title: str
    grid: Grid

    def draw(self, axes: "Axes") -> None:
        """Draw the panel."""
        xs, ys, colors = list[float](), list[float](), list[str]()
        for block in range(16):
            filled, references, owner = self.grid.get(block, (0, 0, ""))
            x, y = block % 4 * 5.0, -(block // 4) * 2.2
            xs += [x + slot for slot in range(4)]
            ys += [y] * 4
            colors += [CYCLE[references > 1]] * filled + ["white"] * (4 - filled)
            axes.text(x - 0.4, y - 0.7, f"{block}: {owner}" if owner else str(block), fontsize=6.5, va="top")
        axes.scatter(xs, ys, s=62, marker="s", c=colors, edgecolors="#9a9a9a", linewidths=0.6)
        axes.set(title=self.title, xlim=(-1, 19.5), ylim=(-8.6, 1))
        axes.axis("off")


Panel = Lines | Bars | LengthHistogram | Blocks


def drawn(panels: Sequence[Panel], note: str = "") -> "Figure":
    """Return a plot of all panels, row by row, with a note above."""
    import matplotlib as mpl  # noqa: PLC0415 (an optional library)
    from matplotlib.figure import Figure  # noqa: PLC0415

    mpl.rcParams.update(STYLE)
    columns = min(MAX_COLUMNS, len(panels))
    rows = -(-len(panels) // columns)
    height = BLOCKS_HEIGHT if isinstance(panels[0], Blocks) else HEIGHT
    plot = Figure(figsize=(max(4.6, 4.0 * columns), height * rows))
    for axes, panel in zip_longest(plot.subplots(rows, columns, squeeze=False).flat, panels):
        if panel is None:
            axes.remove()
        else:
            panel.draw(axes)
    if note:
        plot.suptitle(fill(note, 20 * columns + 30), fontsize=8)
    return plot


def rendered(plot: "Figure", kind: str) -> bytes:
    """Return the plot as a file: svg or png."""
    buffer = BytesIO()
    plot.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    plot.set_layout_engine("none")  # what has been laid out stays as it is, in the next file too
    return buffer.getvalue()


def _told(value: float) -> str:
    """Return three digits of a number, or all before the point."""
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _color(label: str, number: int) -> str:
    return COLORS.get(label, CYCLE[number % len(CYCLE)])
