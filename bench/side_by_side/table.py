"""The README's table from turns: medians over turns with their extremes, and ratios within one turn."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from quire_lab.sim.statistics import Spread, spread
from side_by_side.contest import ContestRecord, Run
from side_by_side.roster import OURS, OURS_UNCACHED, OURS_UNQUANTIZED

MIB = 1 << 20


class Figure(NamedTuple):
    """Figure by which a workload is judged."""

    title: str
    of_run: Callable[[Run], float]
    more_is_better: bool = False


class Row(NamedTuple):
    """One line: an engine's values, one per turn."""

    model: str
    workload: str
    figure: str
    values: Mapping[str, Sequence[float]]
    more_is_better: bool
    aim: str


FIGURES = {
    "decode1": Figure("ms per token", lambda run: run.latencies["tpot_s"]["p50"] * 1e3),
    "prefill": Figure("s to the first token", lambda run: run.wall_s),
    "http32": Figure("output tokens/s", lambda run: run.num_output_tokens / run.wall_s, more_is_better=True),
}
WALL = Figure("s for all", lambda run: run.wall_s)
CPU = Figure("CPU s for all", lambda run: run.cpu_s)
AIMS = {
    ("bench-0.5b", "decode1"): "<= 0.88",
    ("bench-0.5b", "prefill"): "<= 0.4",
    ("bench-0.5b", "offline64"): "<= 0.65",
    ("bench-0.5b", "chat32"): "<= 0.7",
    ("bench-0.5b", "prefix"): "<= 0.6",
    ("bench-0.5b", "http32"): ">= 1.5",
    ("bench-0.5b", "start"): "ours under 3 s",
    ("bench-1b", "decode1"): "<= 0.95",
    ("bench-1b", "prefill"): "<= 0.4",
}
MEMORY_AIM = "weights + KV cache + 700 MB"


def markdown(rows: Sequence[Row]) -> str:
    """Return the table: a column per engine, then ours over the best peer's, turn by turn, and the aim."""
    titles = list(dict.fromkeys(title for row in rows for title in row.values))
    lines = [_line(["model", "workload", "figure", *titles, "Quire / best peer", "aim"])]
    lines.append("| " + "--- | " * (len(titles) + 5))
    for row in rows:
        cells = [_cell(row.values[title]) if row.values.get(title) else "-" for title in titles]
        lines.append(_line([row.model, row.workload, row.figure, *cells, _ratio_cell(row), row.aim]))
    return "\n".join(line.rstrip() for line in lines) + "\n"


def workload_rows(model: str, record: ContestRecord, *, by_cpu: bool = False) -> Iterator[Row]:
    """Yield a row per workload, and one of what was computed where a prefix cache helped. `by_cpu`: CPU time alone."""
    for workload in dict.fromkeys(turn.workload for turn in record.turns):
        figure = CPU if by_cpu else FIGURES.get(workload, WALL)
        runs_of = {
            title: [turn.runs[title] for turn in record.turns if turn.workload == workload and title in turn.runs]
            for title in record.engines
        }
        values = {title: [figure.of_run(run) for run in runs] for title, runs in runs_of.items()}
        yield Row(model, workload, figure.title, values, figure.more_is_better, AIMS.get((model, workload), ""))
        counted = {title: [run for run in runs if run.num_cached_tokens is not None] for title, runs in runs_of.items()}
        found = [run for runs in counted.values() for run in runs if run.num_cached_tokens]
        if found:
            computed = {
                title: [run.num_prompt_tokens - (run.num_cached_tokens or 0) for run in runs]
                for title, runs in counted.items()
            }
            figure_title = f"prompt tokens computed, at least {found[0].least_to_compute}"
            yield Row(model, workload, figure_title, computed, False, "")


def rows(model: str, record: ContestRecord) -> Iterator[Row]:
    """Yield what engines cost beside their work: the start, and memory at its peak."""
    engines = record.engines.items()
    loads = {title: engine.load_s for title, engine in engines}
    yield Row(model, "start", "s to the first token", loads, False, AIMS.get((model, "start"), ""))
    peaks = {title: [engine.peak_rss_bytes / MIB] for title, engine in engines if engine.peak_rss_bytes}
    yield Row(model, "memory", "MiB at the peak", peaks, False, MEMORY_AIM)


def best_peer(row: Row) -> str | None:
    """Return the peer with the best median, if any has one."""
    ours = (OURS, OURS_UNCACHED, OURS_UNQUANTIZED)
    peers = {title: values for title, values in row.values.items() if values and title not in ours}
    medians = {title: spread(values).median for title, values in peers.items()}
    return (max if row.more_is_better else min)(medians, key=lambda title: medians[title], default=None)


def ratio(row: Row) -> Spread | None:
    """Return ours over the best peer's, each ratio within one turn."""
    peer = best_peer(row)
    ours = row.values.get(OURS, ())
    if peer is None or not ours:
        return None
    return spread([our / their for our, their in zip(ours, row.values[peer], strict=False)])  # one may have failed


def _ratio_cell(row: Row) -> str:
    ratios = ratio(row)
    return "-" if ratios is None else f"{_spread_text(ratios)}, {best_peer(row)}"


def _cell(values: Sequence[float]) -> str:
    return _spread_text(spread(values))


def _spread_text(values: Spread) -> str:
    median, low, high = (_short(number) for number in values)
    return median if low == high else f"{median} ({low} to {high})"


def _short(number: float) -> str:
    return f"{number:.0f}" if number >= 100 else f"{number:.3g}"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
