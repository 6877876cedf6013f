"""The selections of `make test-quick` and `make test-without-torch`: arguments of pytest, one a line."""

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


@pytest.mark.parametrize("name", CHOSEN + (ROOT / "tests/without_torch.txt").read_text().splitlines())
def test_each_name_exists(name: str) -> None:
    file, _, test = name.partition("::")
    assert (ROOT / file).exists()
    assert re.search(rf"^def {test.partition('[')[0]}\(", (ROOT / file).read_text(), re.MULTILINE) if test else True


def test_best_instruction_set_is_the_only_one() -> None:
    pytest.importorskip("quire.extension._kernels", reason="the C++ kernels were not built")
    from quire.extension.isas import usable_isas

    command = [sys.executable, "-m", "pytest", "--collect-only", "--best-isa", "-p", "no:cacheprovider"]
    run = subprocess.run(
        [*command, "tests/kernels/cpp/test_cpp_packing.py"], cwd=ROOT, capture_output=True, text=True, timeout=120,
        check=True,
    )  # fmt: skip
    best, *others = usable_isas()
    assert not any(re.search(rf"[\[-]{isa}[\]-]", run.stdout) for isa in others)
    assert re.search(rf"[\[-]{best}[\]-]", run.stdout)
