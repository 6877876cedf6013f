"""`quire paper`: tables, files, and one report of everything that opens without a network."""

import gzip
import json
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quire.core.arrays import Array, address
from quire.kernels.choice import choose_back_end
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec
from quire_lab.paper import measured, paper_command, pictures, runs, serving
from quire_lab.paper.figures import FIGURES, Result, Settings, made
from quire_lab.paper.paper_command import NAMES
from quire_lab.sim.datasets import DATASETS, workload
from quire_lab.sim.workloads import WorkItem

Run = Callable[..., Any]


def in_this_process(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What `map_processes` does, without the time that processes take to start."""
    return [function(item) for item in items]


def test_an_unknown_figure_is_one_line_with_the_list(run: Run) -> None:
    ran = run("paper", "99")
    assert ran.code == 1
    assert re.fullmatch(r"quire: figure must be all or one of layout.*latency.*measured.*, got '99'\n", ran.err)
    assert set(NAMES) == set(FIGURES), "--help names all figures"


def test_a_bad_file_of_lengths_is_named_with_its_line(run: Run, tmp_path: Path) -> None:
    with gzip.open(tmp_path / "alpaca_lengths.csv.gz", "wt") as file:
        file.write("prompt_plain_tokens,output_tokens\n5,6\n7\n")
    ran = run("paper", "lengths", "--data", tmp_path, "--output", tmp_path)
    assert ran.code == 1
    assert "alpaca_lengths.csv.gz, line 3: output_tokens must be an integer, got None" in ran.err


@pytest.mark.parametrize("has_data", [True, False])
def test_fits_of_lengths_are_told_in_title_record_and_plot(run: Run, tmp_path: Path, has_data: bool) -> None:
    folder = () if has_data else ("--data", tmp_path)
    ran = run("paper", "lengths", *folder, "--output", tmp_path)
    assert ran.code == 0, ran.err
    record = json.loads((tmp_path / "lengths.json").read_text(encoding="utf-8"))
    fit = f"log-normal fit (no sharegpt_sample_turns.csv.gz and no alpaca_lengths.csv.gz in {tmp_path})"
    title = "Lengths of requests" if has_data else f"Lengths of requests; lengths: {fit}"
    assert (record["lengths"], record["title"]) == ("data" if has_data else fit, title)
    assert f"figure 11: {title}" in " ".join(ran.out.split())
    drawn = (tmp_path / "lengths.svg").read_text(encoding="utf-8")
    assert ("log-normal fit" in drawn) != has_data, "a comment in the SVG has the text of its glyphs"


def test_a_figure_is_a_table_a_record_and_two_plots(run: Run, tmp_path: Path) -> None:
    ran = run("paper", "tables", "--output", str(tmp_path))
    assert ran.code == 0, ran.err
    assert "four beams: blocks in use" in ran.out
    record = json.loads((tmp_path / "tables.json").read_text(encoding="utf-8"))
    assert (record["number"], record["paper"][1]["ours"]) == ("6 to 9", 9)
    assert (tmp_path / "tables.png").read_bytes().startswith(b"\x89PNG")
    assert b"<svg" in (tmp_path / "tables.svg").read_bytes()


def test_no_way_of_figure_18a_finds_what_another_has_read(monkeypatch: pytest.MonkeyPatch) -> None:
    back_end, seen = choose_back_end("cpu", head_dim=measured.HEAD_DIM), set[int]()

    def attend(
        spec: AttentionSpec, query: Array, keys: Array, values: Array, metadata: AttentionMetadata
    ) -> Array:
        seen.add(address(keys))
        return back_end.paged_attention(spec, query, keys, values, metadata)

    monkeypatch.setattr(measured, "choose_back_end", lambda *_, **__: replace(back_end, paged_attention=attend))
    measured._measure(128, rounds=2, seed=0)
    assert len(seen) == 2


def test_all_figures_make_one_report(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn_from = defaultdict[str, set[str]](set)

    def tracked(name: str, settings: Settings) -> Result:
        def recorded(workload_name: str, *arguments: object, **others: object) -> list[WorkItem]:
            drawn_from[name].add(DATASETS[workload_name].file)
            return workload(workload_name, *arguments, **others)  # type: ignore[arg-type]

        for module in (runs, pictures, measured):
            monkeypatch.setattr(module, "workload", recorded)
        return made(name, settings)

    monkeypatch.setattr(paper_command, "made", tracked)
    monkeypatch.setattr(serving, "GRID", [0.1, 1.0])
    monkeypatch.setattr(serving, "SIZES", (16,))
    monkeypatch.setattr(runs, "map_processes", in_this_process)
    monkeypatch.setattr(serving, "map_processes", in_this_process)
    monkeypatch.setattr(measured, "NUM_PASSES", 1)
    monkeypatch.setattr(measured, "CONTEXTS", (128,))
    ran = run("paper", "all", "--trace-s", "1", "--data", str(tmp_path), "--output", str(tmp_path / "out"))
    assert ran.code == 0, ran.err
    report = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    declared = {name: {DATASETS[each].file for each in spec.datasets} for name, spec in FIGURES.items()}
    assert {name: files for name, files in declared.items() if files} == drawn_from
    assert report.count("<svg") == len(FIGURES)
    assert all(f'id="{name}"' in report for name in FIGURES)
    outside = set(re.findall(r'(?:src|href)="(?!#)[^"]*"', report)) | set(re.findall(r"url\((?!#)[^)]*\)", report))
    assert not outside, "the report asks for something outside of itself"
