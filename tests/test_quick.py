"""The selection of `make test-quick`: arguments of pytest, one a line, in `tests/quick.txt`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CHOSEN = [line for line in (ROOT / "tests/quick.txt").read_text().splitlines() if not line.startswith("--")]


@pytest.mark.parametrize("package", sorted(path.parent.name for path in (ROOT / "src/quire").glob("*/__init__.py")))
def test_each_package_is_covered(package: str) -> None:
    assert any(name.startswith(f"tests/{package}") for name in CHOSEN)


@pytest.mark.parametrize("name", CHOSEN)
def test_each_name_exists(name: str) -> None:
    file, _, test = name.partition("::")
    assert (ROOT / file).exists()
    assert re.search(rf"^def {test.partition('[')[0]}\(", (ROOT / file).read_text(), re.MULTILINE) if test else True


def test_best_instruction_set_is_the_only_one() -> None:
    """The tests that are chosen are of the best one, and there are fewer of them than without the option."""
    pytest.importorskip("quire.kernels.cpp._kernels", reason="the C++ kernels were not built")
    file = "tests/kernels/cpp/test_norm.py"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-p", "no:cacheprovider", file]
    every, best = (
        subprocess.run([*command, *option], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True).stdout
        for option in ((), ("--best-isa",))
    )
    from quire.kernels.cpp.back_end import usable_isas

    chosen, *others = usable_isas()
    assert chosen in best
    assert not any(f"[{isa}-" in best or f"-{isa}]" in best for isa in others)
    assert all(f"[{isa}-" in every or f"-{isa}]" in every for isa in others)
