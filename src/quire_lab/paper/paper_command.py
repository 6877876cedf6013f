"""`quire paper`: the figures of the paper, as tables, JSON and plots, and a report of all of them."""

import json
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from quire.cli.flag_groups import check_output, flag_field, with_flag_groups
from quire.core.optional_package import needs_library
from quire.core.version import __version__
from quire_lab.paper.figures import FIGURES, Result, Settings, as_json, chosen, made, title_of
from quire_lab.sim.datasets import DATA_FOLDER

NAMES = (  # the figures, in the paper's order; their modules load torch, which --help does not need
    "layout", "memory", "tables", "lengths", "latency", "batched", "measured", "decoding", "sharing", "prefix", "chat",
    "kernel", "block-size", "swap",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class PaperFlags:
    """Size of the runs, and the folder for the results."""

    full: bool = flag_field(
        False, "everything that the paper has, with its traces of an hour",
        row="all models and sizes, with the paper's traces: hours",
    )  # fmt: skip
    trace_s: float = flag_field(120.0, "seconds of each trace without --full", min=1.0)
    data: Path | None = flag_field(
        None, "with other lengths; fits serve where it has none", metavar="FOLDER", show_default="the package's",
        row="folder with files of lengths, instead of the package's; log-normal fits stand in for those that it lacks, "
        "and titles, plots and JSON say so",
    )  # fmt: skip
    seed: int = flag_field(0, "of lengths and arrivals")
    output: Path = flag_field(
        Path("paper"), "for JSON, PNG and SVG; with all, report.html", metavar="FOLDER",
        row="folder for JSON, PNG, SVG and the report",
    )  # fmt: skip
    plots: bool = flag_field(
        True, "needs matplotlib", row="plots need matplotlib: `pip install 'quire[paper]'`"
    )


@with_flag_groups
def paper(
    names: Annotated[list[str], typer.Argument(help=f"all, or some of {', '.join(NAMES)}", metavar="FIGURE...")],
    flags: PaperFlags,
) -> None:
    """Make figures of the PagedAttention paper (Kwon et al. 2023) on Quire's scheduler and cache."""
    from quire_lab.paper import measured, pictures, serving  # noqa: F401, PLC0415 (registered there)
    from quire_lab.paper.plots import drawn, rendered  # noqa: PLC0415

    settings = Settings(flags.full, flags.trace_s, flags.seed, flags.data or DATA_FOLDER)
    wanted = chosen(names)
    if flags.plots:  # before the work, which may take hours
        with needs_library("a plot", "matplotlib", "'quire[paper]', or use --no-plots"):
            import matplotlib  # noqa: F401, PLC0415 (optional: is it there?)
    flags.output.mkdir(parents=True, exist_ok=True)
    check_output(flags.output / "report.html")
    results, plots = dict[str, Result](), dict[str, bytes]()
    for name in wanted:
        if len(wanted) > 1:
            Console(stderr=True).print(f"making figure {FIGURES[name].number}: {name}", highlight=False)
        result = results[name] = made(name, settings)
        _print(name, result)
        record = json.dumps(as_json(name, result), indent=2)
        (flags.output / f"{name}.json").write_text(record + "\n", encoding="utf-8")
        if flags.plots:
            plot = drawn(result.panels, result.fit_note)
            plots[name] = rendered(plot, "svg")
            (flags.output / f"{name}.svg").write_bytes(plots[name])
            (flags.output / f"{name}.png").write_bytes(rendered(plot, "png"))
    if "all" in names:
        how = "quire " + " ".join(sys.argv[1:])
        (flags.output / "report.html").write_text(_html(results, plots, how), encoding="utf-8")


def _print(name: str, result: Result) -> None:
    console = Console()
    console.print(f"figure {FIGURES[name].number}: {title_of(name, result)}", highlight=False, markup=False)
    for keys, rows in result.tables:
        table = Table(*keys)
        for row in rows:
            table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
        console.print(table)
    if result.comparisons:
        table = Table("beside the paper", "ours", "the paper", "ratio")
        for each in result.comparisons:
            table.add_row(each.what, f"{each.ours:.4g}", each.told, f"{each.ratio:.2f}")
        console.print(table)
    for note in result.notes:
        console.print(note)


def _html(results: Mapping[str, Result], plots: Mapping[str, bytes], how: str) -> str:
    """Return the report of figures, plots and tables. `plots`: SVG by figure; `how`: the command that made it."""
    from jinja2 import PackageLoader  # noqa: PLC0415 (as above: --help needs neither)
    from jinja2.sandbox import ImmutableSandboxedEnvironment  # noqa: PLC0415
    from markupsafe import Markup  # noqa: PLC0415

    environment = ImmutableSandboxedEnvironment(loader=PackageLoader("quire_lab.paper"), autoescape=True)
    environment.filters["number"] = lambda value: f"{value:.4g}" if isinstance(value, float) else value
    made = f"{how}; Quire {__version__}, {datetime.now(UTC):%Y-%m-%d}, {platform.platform()}"
    titles = {name: title_of(name, result) for name, result in results.items()}
    drawn = {name: Markup(plot[plot.index(b"<svg") :].decode()) for name, plot in plots.items()}  # noqa: S704 (our own)
    template = environment.get_template("report.html")
    return template.render(figures=FIGURES, titles=titles, results=results, plots=drawn, made=made)
