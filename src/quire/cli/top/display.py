"""Display of a snapshot in the terminal: one screen, in ASCII, so that it is the same in every terminal and pipe."""

from collections.abc import Mapping, Sequence

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from quire.cli.top.reading import Quantiles, Snapshot, View

MAX_OWNERS, MAX_ENGINES = 8, 32  # rows
NUM_REASONS = 3
NAMED = "ABCDEFGH"               # letters of the owners in the bar
CACHED, FREE = "=", "."
_STYLES = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
NONE = "-"
SORTS = ("engine", "running", "out/s", "TTFT p99", "KV")  # columns
KEYS = "q quit   p pause   s sort   e engine"


def screen(shown: Snapshot, width: int, *, engine: str | None = None, sort: str = "engine", note: str = "") -> Group:
    """Return the screen of a snapshot: of all engines, or of one; engines in the order of one of SORTS."""
    view = next((each for each in shown.engines if each.engine == engine), shown.all)
    parts: list[RenderableType] = [_title(shown, view), _figures(shown, view), "", _bar(view, width), *_owners(view)]
    if len(shown.engines) > 1:
        parts += ["", _engines(shown, sort)]
    return Group(*parts, *([Text(note, style="dim")] if note else []))


def _title(shown: Snapshot, view: View) -> Text:
    parts = [", ".join(shown.models) or NONE, shown.url]
    if shown.up_s is not None:
        parts.append(f"up {duration(shown.up_s)}")
    if len(shown.engines) > 1:
        parts.append(f"{len(shown.engines)} engines" if view.engine == "all" else f"engine {view.engine}")
    if shown.seconds is not None:
        parts.append(f"last {shown.seconds:.0f} s")
    return Text("   ".join(parts), style="bold", no_wrap=True, overflow="ellipsis")


def _figures(shown: Snapshot, view: View) -> Table:
    rates = _grid()
    rates.add_row("tokens/s", f"in {number(view.tokens_in)}", f"out {number(view.tokens_out)}")
    waiting = f"waiting {sum(view.waiting.values()):,}"
    rates.add_row("requests", f"running {view.running:,}", waiting, f"swapped {view.swapped:,}")
    rates.add_row("waiting for", *[f"{why} {count:,}" for why, count in view.waiting.items() if why][:NUM_REASONS])
    refused = None if shown.refused is None else sum(shown.refused.values())
    rates.add_row(
        "per second", f"finished {number(view.finished)}", f"preempted {number(view.preempted)}",
        f"refused {number(refused)}",
    )  # fmt: skip
    for name, values in (("TTFT", view.ttft_s), ("gap", view.gap_s), ("step", view.step_s)):
        rates.add_row(name, f"p50 {_time(values, 0)}", f"p99 {_time(values, 1)}")
    rates.add_row("shares", f"prefix hits {percent(view.hit_rate)}", f"on target {percent(view.on_target)}")
    return rates


def _bar(view: View, width: int) -> Text:
    """Return the blocks as a bar: those in use by owner, then those with content that can be found, then free ones."""
    cells = max(width - 12, 10)
    blocks = view.kv_blocks
    total = sum(blocks.values())
    line = Text("KV blocks   ", no_wrap=True)
    if not total:
        full = round(view.kv_usage * cells)
        return line.append(NAMED[0] * full, style=_STYLES[0]).append(FREE * (cells - full), style="dim")
    used = divided([blocks.get("used", 0), blocks.get("cached", 0), blocks.get("free", 0)], cells)
    owners = _by_size(view.kv_owners)
    for at, part in enumerate(divided([count for _, count in owners], used[0])):
        line.append(NAMED[at] * part, style=_STYLES[at])
    return line.append(CACHED * used[1]).append(FREE * used[2], style="dim")


def _owners(view: View) -> list[Text]:
    if not view.kv_blocks:
        return [Text(f"            in use {percent(view.kv_usage)}")]
    parts = [f"{state} {view.kv_blocks.get(state, 0):,}" for state in ("used", "cached", "free")]
    lines = [Text(f"            {'   '.join(parts)}   pinned {view.kv_pinned:,}")]
    owners = [(name, count) for name, count in _by_size(view.kv_owners) if count]
    if owners:
        line = Text("            ")
        for at, (name, count) in enumerate(owners):
            line.append(f"{NAMED[at]} ", style=_STYLES[at]).append(f"{name} {count:,}   ")
        lines.append(line)
    return lines


def _by_size(owners: Mapping[str, int]) -> list[tuple[str, int]]:
    """Return the largest owners in descending order; those beyond MAX_OWNERS are added up."""
    found = sorted(owners.items(), key=lambda each: (-each[1], each[0]))
    if len(found) <= MAX_OWNERS:
        return found
    rest = found[MAX_OWNERS - 1 :]
    return [*found[: MAX_OWNERS - 1], (f"{len(rest)} others", sum(count for _, count in rest))]


def divided(counts: Sequence[int], num_cells: int) -> list[int]:
    """Return the cells of a bar that each count gets: in proportion, and one at least where there is room for all."""
    total = sum(counts)
    if not total:
        return [num_cells, *[0] * (len(counts) - 1)] if counts else []
    exact = [count * num_cells / total for count in counts]
    cells = [int(each) for each in exact]
    for at in sorted(range(len(counts)), key=lambda at: cells[at] - exact[at])[: num_cells - sum(cells)]:
        cells[at] += 1
    for at, count in enumerate(counts):
        largest = cells.index(max(cells))
        if count and not cells[at] and cells[largest] > 1:
            cells[at], cells[largest] = 1, cells[largest] - 1
    return cells


def _engines(shown: Snapshot, sort: str) -> Table:
    """Return a row for each engine."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("engine", "running", "waiting", "in/s", "out/s", "TTFT p99", "gap p99", "KV", "hits"):
        table.add_column(name + ("*" if name == sort else ""), justify="right", no_wrap=True)
    keys = {
        "running": lambda each: -each.running,
        "out/s": lambda each: -(each.tokens_out or 0.0),
        "TTFT p99": lambda each: -(each.ttft_s.p99 if each.ttft_s else 0.0),
        "KV": lambda each: -each.kv_usage,
    }
    rows = sorted(shown.engines, key=keys[sort]) if sort in keys else shown.engines
    for each in rows[:MAX_ENGINES]:
        table.add_row(
            each.engine, f"{each.running:,}", f"{sum(each.waiting.values()):,}", number(each.tokens_in),
            number(each.tokens_out), _time(each.ttft_s, 1), _time(each.gap_s, 1), percent(each.kv_usage),
            percent(each.hit_rate),
        )  # fmt: skip
    if len(rows) > MAX_ENGINES:
        table.add_row(f"and {len(rows) - MAX_ENGINES} more")
    return table


def _grid() -> Table:
    table = Table(box=None, show_header=False, padding=(0, 3, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    for _ in range(3):
        table.add_column(no_wrap=True)
    return table


def _time(values: Quantiles | None, at: int) -> str:
    if values is None:
        return NONE
    seconds = values[at]
    if seconds >= 10:
        return f"{seconds:,.1f} s"
    return f"{seconds * 1e3:.1f} ms" if seconds < 0.01 else f"{seconds * 1e3:,.0f} ms"


def number(value: float | None) -> str:
    """Return a rate: with a decimal place below ten."""
    return NONE if value is None else f"{value:.1f}" if 0 < value < 10 else f"{value:,.0f}"


def percent(share: float | None) -> str:
    """Return a share in per cent."""
    return NONE if share is None else f"{share * 100:.0f} %"


def duration(seconds: float) -> str:
    """Return hours, minutes and seconds, after days where there are any."""
    minutes, second = divmod(max(0, int(seconds)), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days} d " if days else "") + f"{hour}:{minute:02}:{second:02}"


def text_of(shown: Snapshot, width: int) -> str:
    """Return the screen as lines without colour, for a pipe."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False, highlight=False)
    with console.capture() as capture:
        console.print(screen(shown, width))
    return "".join(f"{line.rstrip()}\n" for line in capture.get().splitlines())
