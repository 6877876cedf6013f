"""The report: every figure with its plot, its table and the paper's numbers, in one HTML file that needs no network."""

import platform
from collections.abc import Mapping
from datetime import UTC, datetime

from jinja2 import PackageLoader
from jinja2.sandbox import ImmutableSandboxedEnvironment
from markupsafe import Markup

from quire.core.version import __version__
from quire_lab.paper.figures import FIGURES, Result, title_of


def html(results: Mapping[str, Result], plots: Mapping[str, bytes], how: str) -> str:
    """Return the report. `plots`: SVG by the figure's name; `how`: the command that made it."""
    environment = ImmutableSandboxedEnvironment(loader=PackageLoader("quire_lab.paper"), autoescape=True)
    environment.filters["number"] = lambda value: f"{value:.4g}" if isinstance(value, float) else value
    made = f"{how}; Quire {__version__}, {datetime.now(UTC):%Y-%m-%d}, {platform.platform()}"
    titles = {name: title_of(name, result) for name, result in results.items()}
    drawn = {name: Markup(plot[plot.index(b"<svg") :].decode()) for name, plot in plots.items()}  # noqa: S704 (our own)
    template = environment.get_template("report.html")
    return template.render(figures=FIGURES, titles=titles, results=results, plots=drawn, made=made)
