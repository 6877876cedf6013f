"""Kernels with a fault of exactness are caught by the tests of exactness, and by no others.

Each mutant is the extension built from a copy of csrc in which the order of a sum depends on what it must not, while
its results are as good as the right ones: the tests against the plain ops pass, and those that compare bits must fail.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from quire.extension import _kernels

ROOT = Path(__file__).parents[3]
TOOLS = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])  # cmake and ninja from PyPI too
NEEDED = {"cmake": ("cmake",), "a C++ compiler": ("c++", "g++", "clang++")}
MISSING = [what for what, names in NEEDED.items() if not any(shutil.which(name, path=TOOLS) for name in names)]

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(bool(MISSING), reason=f"building needs {' and '.join(MISSING)}"),
]

# Runs tests with the extension at argv[1] in place of the installed one; prints outcomes as JSON on the last line.
RUNNER = """
import importlib.util, json, sys
import torch, pytest
NAME = "quire.extension._kernels"
spec = importlib.util.spec_from_file_location(NAME, sys.argv[1])
sys.modules[NAME] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules[NAME])
outcomes = {}
class Recorder:
    def pytest_runtest_logreport(self, report):
        if report.when == "call" or report.outcome != "passed":
            outcomes[report.nodeid] = report.outcome
pytest.main(["-p", "no:cacheprovider", *sys.argv[2:]], plugins=[Recorder()])
print()
print(json.dumps(outcomes))
"""


@dataclass(frozen=True)
class Mutant:
    """A fault, as replacements (file, pattern, text), and the tests that must and must not notice it."""

    replacements: tuple[tuple[str, str, str], ...]
    caught_by: str          # a test, as file::name
    right_by: str
    chosen: str             # part of their parameters, as for pytest -k
    isas: tuple[str, ...] = ("portable", "avx2", "avx512", "avx512_vnni", "avx512_bf16", "amx")


MUTANTS = {
    "a single row is multiplied by vectors, not by the matrix unit": Mutant(
        (
            (
                "linear.cpp",
                r"return linear_by_tiles\(op\);",
                "return op.num_rows == 1 ? linear_by_vectors(op) : linear_by_tiles(op);",
            ),
        ),
        caught_by="test_cpp_linear.py::test_rows_have_the_same_bits_among_any_others",
        right_by="test_cpp_linear.py::test_layer_matches_a_plain_product",
        chosen="bfloat16 and not 1152",
        isas=("amx",),
    ),
    "rows that fill no block are summed from the last input to the first": Mutant(
        (
            (
                "products.hpp",
                r"for \(long i = first; i < end; i\+\+\)",
                r"for (long n = first; n < end; n++) if (const long i = rows == 1 ? first + end - 1 - n : n; true)",
            ),
        ),
        caught_by="test_cpp_linear.py::test_rows_have_the_same_bits_among_any_others",
        right_by="test_cpp_linear.py::test_layer_matches_a_plain_product",
        chosen="float32 and not 1152",
    ),
    "partitions begin at the first token of the chunk": Mutant(
        (
            (
                "attention.cpp",
                r"return \{std::clamp\(begin, 0L, PARTITION\), std::clamp\((.*?), 0L, PARTITION\)\};",
                r"return {std::clamp(begin, from_, to_), std::clamp(\1, from_, to_)};",
            ),
            ("attention.cpp", r"(float scale_;\n)", r"\1    long from_ = 0, to_ = PARTITION;\n"),
            (
                "attention.cpp",
                r"( +)(compute\(i, head, row, rows, block, next\);\s+merge_partials\([^;]*;)",
                r"\1const long border = std::clamp(tile_.first_position - i * PARTITION, 0L, PARTITION) / 32 * 32;\n"
                r"\1for (const auto& [from, to] : {std::pair(0L, border), std::pair(border, PARTITION)}) {\n"
                r"\1from_ = from, to_ = to;\n\1\2\n\1}\n\1from_ = 0, to_ = PARTITION;",
            ),
        ),
        caught_by="test_cpp_attention.py::test_chunking_never_changes_a_bit",
        right_by="test_cpp_attention.py::test_kernel_matches_reference",
        chosen="(14 or 24) and (None or ragged) and not float16",
    ),
    "what several threads have computed is merged from the last partition to the first": Mutant(
        (
            (
                "attention.cpp",
                r"(void merge\(.*?)for \(long i = tile_\.first_partition; i < tile_\.end_partition; i\+\+\)",
                r"\1for (long i = tile_.end_partition; i-- > tile_.first_partition;)",
            ),
        ),
        caught_by="test_cpp_attention.py::test_neighbours_and_threads_never_change_a_bit",
        right_by="test_cpp_attention.py::test_kernel_matches_reference",
        chosen="(14 or 24) and not float16",
    ),
    "lanes of a norm are added one after the other in a single row": Mutant(
        (
            (
                "elementwise.cpp",
                r"const float mean = sum_of_lanes\(squares\)",
                "float in_turn = 0;\n"
                "        for (int i = 0; i < LANES; i++) in_turn += squares[i];\n"
                "        const float mean = (op.num_rows == 1 ? in_turn : sum_of_lanes(squares))",
            ),
        ),
        caught_by="test_cpp_norm.py::test_rows_have_the_same_bits_among_any_others",
        right_by="test_cpp_norm.py::test_kernel_matches_the_plain_op",
        chosen="rms and not float16",
    ),
}


@dataclass(frozen=True)
class Workshop:
    """A copy of the sources and where it is built: what one mutant has not touched is compiled once."""

    sources: Path
    build: Path

    def make(self, folder: Path, replacements: tuple[tuple[str, str, str], ...] = ()) -> Path:
        """Build with the replacements made; return the extension, moved into `folder`, and take them back."""
        originals = {name: (self.sources / name).read_text() for name, _, _ in replacements}
        try:
            for name, pattern, text in replacements:
                source, count = re.subn(pattern, text, (self.sources / name).read_text(), flags=re.DOTALL)
                assert count == 1, f"{name} has {count} places for {pattern}: mutate what stands there now"
                (self.sources / name).write_text(source)
            _run("cmake", "--build", str(self.build), "--parallel", "2")
        finally:
            for name, source in originals.items():
                (self.sources / name).write_text(source)
        (built,) = self.build.glob("_kernels*.so")
        return Path(shutil.copy(built, folder))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Workshop:
    folder = tmp_path_factory.mktemp("mutants")
    sources = Path(shutil.copytree(ROOT / "csrc", folder / "csrc"))
    generator = ["-G", "Ninja"] if shutil.which("ninja", path=TOOLS) else []
    _run("cmake", *generator, "-S", str(sources), "-B", str(folder / "build"), f"-DPython_EXECUTABLE={sys.executable}")
    return Workshop(sources, folder / "build")


def _run(*command: str) -> None:
    result = subprocess.run(command, env=os.environ | {"PATH": TOOLS}, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def outcomes(extension: Path, test: str, chosen: str) -> dict[str, str]:
    """Run a test of this folder in a child that has the extension; return the outcome by node id."""
    command = [sys.executable, "-c", RUNNER, str(extension), str(Path(__file__).parent / test), "-k", chosen]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    found: dict[str, str] = json.loads(result.stdout.splitlines()[-1])
    assert found, result.stdout + result.stderr
    return found


@pytest.fixture
def isa() -> None:
    """Overrides the folder's fixture: here the children go through the instruction sets."""


def test_extension_without_a_fault_passes(workshop: Workshop, tmp_path: Path) -> None:
    extension = workshop.make(tmp_path)
    for mutant in MUTANTS.values():
        for test in (mutant.caught_by, mutant.right_by):
            assert set(outcomes(extension, test, mutant.chosen).values()) == {"passed"}, test


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_fault_is_caught_by_the_bits_alone(mutant: Mutant, workshop: Workshop, tmp_path: Path) -> None:
    isas = [isa for isa in mutant.isas if isa in _kernels.usable_isas()]
    if not isas:
        pytest.skip(f"this CPU does not have {' or '.join(mutant.isas)}")
    extension = workshop.make(tmp_path, mutant.replacements)
    by_bits = outcomes(extension, mutant.caught_by, mutant.chosen)
    for isa in isas:
        assert "failed" in [outcome for test, outcome in by_bits.items() if isa in test], f"{isa}: nobody noticed"
    assert set(outcomes(extension, mutant.right_by, mutant.chosen).values()) == {"passed"}
