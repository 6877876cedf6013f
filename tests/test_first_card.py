"""bench/first_card.py: the first run on a GPU, as far as a machine without one can try it."""

import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[1] / "bench/first_card.py"


@pytest.fixture(scope="module")
def first_card() -> Any:  # noqa: ANN401 (a script)
    spec = spec_from_file_location("first_card", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_page_has_the_steps(first_card: Any) -> None:  # noqa: ANN401
    text = first_card.PAGE.read_text()
    section = text.split(first_card.BEGIN)[1].split(first_card.END)[0]
    rows = [line.split(" | ")[:3] for line in section.splitlines() if line.startswith("| ")][2:]
    assert rows == [[f"| {step.name}", step.shows, f"{step.limit_s} s"] for step in first_card.STEPS]
    assert sum(step.limit_s for step in first_card.STEPS) <= first_card.BUDGET_S == 13 * 60


def test_results_take_the_place_of_the_last_ones(first_card: Any, tmp_path: Path) -> None:  # noqa: ANN401
    page, results = tmp_path / "page.md", {"machine": first_card.Result(0, 3.0, "a card")}
    first_card.write(page, results)
    first_card.write(page, results | {"kernels": first_card.Result(None, 160.0, "12 tests")})
    lines = page.read_text().splitlines()
    assert [line.split(" | ")[-1] for line in lines if line.startswith(("| machine", "| kernels", "| engine"))] == [
        "passed, 3 s: a card |", "**not done in time**, 160 s: 12 tests |", "no card yet |"
    ]  # fmt: skip
    assert len(lines) == len(first_card.PAGE.read_text().splitlines())


def test_answers_part_at_the_first_token_that_differs(first_card: Any) -> None:  # noqa: ANN401
    places = [{"1": -0.5, "2": -0.75}, {"3": -0.25, "4": -4.25}]
    assert first_card.gap([1, 3], places, [1, 3]) == 0
    assert first_card.gap([1, 3], places, [2, 9]) == 0.25
    assert first_card.gap([1, 3], places, [1, 4]) == 4
    assert first_card.gap([1, 3], places, [1, 9]) == float("inf")


@pytest.mark.matrix
def test_every_step_runs_on_an_imitated_card(tmp_path: Path, first_card: Any) -> None:  # noqa: ANN401
    for arguments in (["prepare"], ["run", "--imitated", "--output", str(tmp_path / "page.md")]):
        result = subprocess.run([sys.executable, str(FILE), *arguments], capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count(": passed, ") == len(first_card.STEPS)
