"""Skips where PyTorch is missing: for what tests and references import, never for what an engine on a CPU loads."""

from pathlib import Path

import pytest

from support.no_torch import SOURCE, TESTS, reason_of


def error_in(file: Path | str, library: str) -> BaseException:
    """Return the error of an import in a file of that name."""
    with pytest.raises(ModuleNotFoundError) as caught:
        exec(compile("raise error", str(file), "exec"), {"error": ModuleNotFoundError("none", name=library)})
    return caught.value


@pytest.mark.parametrize("file", [TESTS / "model/test_any.py", f"/any{SOURCE}/kernels/reference/norm.py"])
@pytest.mark.parametrize("library", ["torch", "torch.nn", "peft.tuners"])
def test_tests_and_references_are_skipped(file: Path | str, library: str) -> None:
    assert reason_of(error_in(file, library)) == f"needs {library.partition('.')[0]}"
    wrapped = RuntimeError("a module cannot be collected")
    wrapped.__cause__ = error_in(file, library)
    assert reason_of(wrapped) == f"needs {library.partition('.')[0]}"


@pytest.mark.parametrize("part", ["engine/engine.py", "kernels/cpp/cpp_linear.py", "execution/batch.py"])
def test_an_engine_on_a_cpu_that_imports_it_fails(part: str) -> None:
    assert reason_of(error_in(f"/any{SOURCE}/{part}", "torch")) is None


def test_other_errors_and_libraries_fail() -> None:
    assert reason_of(error_in(TESTS / "model/test_any.py", "numpy")) is None
    assert reason_of(ValueError("torch")) is None
