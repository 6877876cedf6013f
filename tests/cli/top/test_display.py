"""Screens of `quire top`: golden ones, at two widths, without colour; and how bars are divided."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from quire.cli.top.display import MAX_ENGINES, MAX_OWNERS, SORTS, divided, duration, number, percent, screen, text_of
from quire.cli.top.reading import Quantiles, Snapshot, View

ENGINES = [
    View(
        engine="0", running=12, waiting={"capacity": 2, "deferred": 1}, swapped=1, tokens_in=1234.4, tokens_out=567.0,
        finished=3.21, preempted=0.0, ttft_s=Quantiles(0.045, 12.5), gap_s=Quantiles(0.0042, 0.084),
        step_s=Quantiles(0.02, 0.06), hit_rate=0.634, on_target=None, kv_usage=0.75,
        kv_blocks={"free": 100, "cached": 150, "used": 750}, kv_pinned=3, kv_owners={"key-1": 500, "other": 250},
    ),
    View(
        engine="1", running=1, waiting={"capacity": 0, "deferred": 0}, swapped=0, tokens_in=0.0, tokens_out=900.0,
        finished=0.0, preempted=None, ttft_s=None, gap_s=None, step_s=None, hit_rate=None, on_target=1.0, kv_usage=0.0,
        kv_blocks={"free": 1000, "cached": 0, "used": 0}, kv_pinned=0, kv_owners={"other": 0},
    ),
]  # fmt: skip
SNAPSHOT = Snapshot(
    url="http://127.0.0.1:8000", models=["demo"], up_s=90061.0, seconds=10.2,
    refused={"server_overloaded": 1.5, "key_limit": 0.0}, all=msgspec.structs.replace(ENGINES[0], engine="all"),
    engines=ENGINES,
)  # fmt: skip
SCREENS = Path(__file__).parent / "screens"


@pytest.mark.parametrize("width", [80, 200])
def test_screen(width: int) -> None:
    text = text_of(SNAPSHOT, width)
    assert text == (SCREENS / f"{width}.txt").read_text()
    assert max(map(len, text.splitlines())) <= width
    assert text.isascii()


def drawn(shown: Snapshot, width: int = 80, **chosen: str) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(screen(shown, width, **chosen))
    return capture.get()


def test_one_engine_can_be_chosen() -> None:
    assert "engine 1   last 10 s" in drawn(SNAPSHOT, engine="1")
    assert "used 0   cached 0   free 1,000" in drawn(SNAPSHOT, engine="1")
    assert "2 engines" in drawn(SNAPSHOT, engine="7")  # gone since


@pytest.mark.parametrize(
    ("sort", "first"), [("engine", "0"), ("running", "0"), ("out/s", "1"), ("TTFT p99", "0"), ("KV", "0")]
)
def test_engines_are_sorted(sort: str, first: str) -> None:
    lines = drawn(SNAPSHOT, sort=sort).splitlines()
    at = next(number for number, line in enumerate(lines) if line.lstrip().startswith("engine"))
    assert f"{sort}*" in lines[at]
    assert lines[at + 1].split()[0] == first
    assert sort in SORTS


def test_server_without_figures_of_its_blocks_shows_their_use() -> None:
    view = msgspec.structs.replace(ENGINES[0], kv_blocks={}, kv_owners={}, waiting={"": 3}, engine="all")
    lines = text_of(msgspec.structs.replace(SNAPSHOT, all=view, engines=[view]), 80).splitlines()
    (bar,) = [line for line in lines if line.startswith("KV blocks")]
    assert (bar.count("A"), bar.count(".")) == (51, 17)
    assert "            in use 75 %" in lines


def test_many_owners_and_engines_are_cut() -> None:
    view = msgspec.structs.replace(ENGINES[0], kv_owners={f"key-{number}": 100 - number for number in range(40)})
    engines = [msgspec.structs.replace(view, engine=str(number)) for number in range(50)]
    text = drawn(msgspec.structs.replace(SNAPSHOT, all=view, engines=engines), 200)
    assert f"{40 - MAX_OWNERS + 1} others" in text
    assert f"and {50 - MAX_ENGINES} more" in text


@given(st.lists(st.integers(0, 10**7), max_size=9), st.integers(0, 200))
def test_bars_are_full_and_show_each_part(counts: list[int], num_cells: int) -> None:
    cells = divided(counts, num_cells)
    assert len(cells) == len(counts)
    assert sum(cells) == (num_cells if counts else 0)
    if sum(counts):
        assert all(not part for part, count in zip(cells, counts, strict=True) if not count)
        assert num_cells < len(counts) or all(part for part, count in zip(cells, counts, strict=True) if count)


def test_numbers_in_words() -> None:
    assert [number(value) for value in (None, 0.0, 9.96, 12.4, 12345.6)] == ["-", "0", "10.0", "12", "12,346"]
    assert (percent(None), percent(0.995)) == ("-", "100 %")
    assert (duration(59.9), duration(3600 * 49)) == ("0:00:59", "2 d 1:00:00")
