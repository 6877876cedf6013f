"""Plots in one house style. matplotlib is an extra: it is loaded here, and nowhere else."""

from collections.abc import Mapping, Sequence
from io import BytesIO
from typing import TYPE_CHECKING, Any

from quire.core.errors import ConfigError
from quire.paper.runs import FASTER_TRANSFORMER, MAX, ORACLE, PAGED, POW2, QUIRE

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
Series = Mapping[str, Sequence[tuple[float, float]]]


def new_figure(columns: int, rows: int = 1, height: float = 3.2) -> "tuple[Figure, list[Axes]]":
    """Return a figure and its panels, row by row. ConfigError where matplotlib is not installed."""
    try:
        import matplotlib as mpl  # noqa: PLC0415 (an optional package)
        from matplotlib.figure import Figure  # noqa: PLC0415
    except ImportError:
        raise ConfigError("plots need matplotlib: pip install 'quire[paper]', or --no-plots") from None
    mpl.rcParams.update(STYLE)
    figure = Figure(figsize=(max(4.6, 4.0 * columns), height * rows))
    return figure, list(figure.subplots(rows, columns, squeeze=False).flat)


def lines(axes: "Axes", series: Series, title: str, x_label: str, y_label: str, top: float | None = None) -> None:
    """Draw a curve with markers for each of the series; above `top` nothing is shown."""
    for number, (label, points) in enumerate(series.items()):
        color = COLORS.get(label, CYCLE[number % len(CYCLE)])
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, linewidth=1.5, label=label, color=color)
    axes.set(title=title, xlabel=x_label, ylabel=y_label, ylim=(0, top))
    axes.set_xlim(left=0)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2)


def bars(
    axes: "Axes", groups: Sequence[str], series: Mapping[str, Sequence[float]], title: str, y_label: str,
    *, is_stacked: bool = False,
) -> None:  # fmt: skip
    """Draw a bar in every group for each of the series, side by side, or one on the other; their values beside them."""
    below, width = [0.0] * len(groups), 0.8 if is_stacked else 0.8 / len(series)
    for number, (label, values) in enumerate(series.items()):
        shift = 0.0 if is_stacked else (number - (len(series) - 1) / 2) * width
        drawn = axes.bar([place + shift for place in range(len(groups))], values, width, below if is_stacked else 0.0,
                         label=label, color=COLORS.get(label, CYCLE[number % len(CYCLE)]))
        total = sum(map(max, series.values()))
        labels = [f"{value:.3g}" if not is_stacked or value > total / 25 else "" for value in values]
        axes.bar_label(drawn, labels, label_type="center" if is_stacked else "edge", fontsize=7,
                       color="white" if is_stacked else "black", padding=0 if is_stacked else 1)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set(title=title, ylabel=y_label)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(visible=False, axis="x")
    axes.margins(y=0.12)
    if len(series) > 1:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=2)


def rendered(figure: "Figure", kind: str) -> bytes:
    """Return the figure as a file: svg or png."""
    buffer = BytesIO()
    figure.savefig(buffer, format=kind, metadata={"Date": None} if kind == "svg" else None)
    figure.set_layout_engine("none")  # what has been laid out stays as it is, in the next file too
    return buffer.getvalue()
