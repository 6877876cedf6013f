"""Figure: a table, the paper's numbers beside ours, sentences on the differences, and panels of a plot."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from quire.core.errors import ConfigError
from quire_lab.paper.plots import Panel
from quire_lab.sim.datasets import DATA_FOLDER, fit_note

Row = dict[str, str | float]
Make = Callable[["Settings"], "Result"]


@dataclass(frozen=True, slots=True)
class Settings:
    """Size of the runs. `full`: everything that the paper has, with its traces."""

    full: bool = False
    trace_s: float = 120.0
    seed: int = 0
    data: Path = DATA_FOLDER


class Comparison(NamedTuple):
    """A number of ours beside the paper's, which may be a range."""

    what: str
    ours: float
    low: float
    high: float

    @property
    def ratio(self) -> float:
        """Ours over the paper's: 1 within its range, else over its nearer end."""
        return self.ours / min(max(self.ours, self.low), self.high)

    @property
    def told(self) -> str:
        """The paper's, as text."""
        return f"{self.low:g}" if self.low == self.high else f"{self.low:g} to {self.high:g}"


@dataclass(slots=True)
class Result:
    """A figure that has been made. `fit_note` says of which lengths there is no data, only a fit."""

    rows: list[Row]
    panels: Sequence[Panel]
    comparisons: list[Comparison] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    fit_note: str = ""

    @property
    def tables(self) -> list[tuple[tuple[str, ...], list[Row]]]:
        """The rows, in groups with the same columns."""
        return [(tuple(keys.split("|")), list(rows)) for keys, rows in groupby(self.rows, "|".join)]


class FigureSpec(NamedTuple):
    """A figure that can be made, and the data sets with the lengths of its requests."""

    number: str
    title: str
    make: Make
    datasets: tuple[str, ...]


FIGURES: dict[str, FigureSpec] = {}


def figure(name: str, number: str, title: str, *datasets: str) -> Callable[[Make], Make]:
    """Make a function one of the figures, under a name, with the paper's number for it and its data sets."""

    def register(make: Make) -> Make:
        FIGURES[name] = FigureSpec(number, title, make, datasets)
        return make

    return register


def made(name: str, settings: Settings) -> Result:
    """Return a figure, with a note where fits stand in for lengths."""
    spec = FIGURES[name]
    result = spec.make(settings)
    result.fit_note = fit_note(spec.datasets, settings.data)
    return result


def title_of(name: str, result: Result) -> str:
    """Return what a figure shows, and of which lengths there is only a fit."""
    return FIGURES[name].title + (f"; {result.fit_note}" if result.fit_note else "")


def chosen(names: Sequence[str]) -> list[str]:
    """Return the names; of `all` every one. ConfigError with the list for a name that is none."""
    known = sorted(FIGURES, key=lambda name: int(re.findall(r"\d+", FIGURES[name].number)[0]))
    if "all" in names:
        return known
    if unknown := [name for name in names if name not in FIGURES]:
        raise ConfigError(f"figure must be all or one of {', '.join(known)}, got {unknown[0]!r}")
    return list(names)


def as_json(name: str, result: Result) -> dict[str, Any]:
    """Return a figure's content as plain data."""
    compared = [each._asdict() | {"ratio": each.ratio} for each in result.comparisons]
    return {
        "figure": name, "number": FIGURES[name].number, "title": title_of(name, result), "rows": result.rows,
        "paper": compared, "notes": result.notes, "lengths": result.fit_note.removeprefix("lengths: ") or "data",
    }  # fmt: skip
