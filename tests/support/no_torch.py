"""Skips of what needs PyTorch where it is not installed: modules and tests that import it, or a library over it.

Only tests and the modules of `quire` that are for GPUs, or are references, may need it: an import by any other is an
error, as everywhere.
"""

from collections.abc import Generator
from importlib.util import find_spec
from pathlib import Path

import pytest

LIBRARIES = ("torch", "transformers", "peft", "accelerate", "triton", "ray")
TESTS, SOURCE = Path(__file__).parents[1], "/quire"  # folders of a checkout, or of what is installed
MAY_NEED_IT = (
    "kernels/reference/", "kernels/torch_arrays.py", "kernels/quantized.py", "kernels/triton/", "kernels/cuda/",
    "execution/cuda/", "engine/transformers_model/", "engine/parallel/",
)  # fmt: skip


def is_missing() -> bool:
    """Return whether PyTorch is not installed."""
    return find_spec("torch") is None


def reason_of(error: BaseException | None) -> str | None:
    """Return the reason to skip what has raised an error, or None if it is none of a missing library."""
    while error is not None and not isinstance(error, ModuleNotFoundError):
        error = error.__cause__ or error.__context__
    library = (error.name or "").partition(".")[0] if error is not None else ""
    if error is None or library not in LIBRARIES:
        return None
    importer = _importer(error)
    is_allowed = importer.is_relative_to(TESTS) or any(f"{SOURCE}/{part}" in str(importer) for part in MAY_NEED_IT)
    return f"needs {library}" if is_allowed else None


def _importer(error: BaseException) -> Path:
    """Return the file with the import that failed."""
    file, at = "", error.__traceback__
    while at is not None:
        file = at.tb_frame.f_code.co_filename if "importlib" not in at.tb_frame.f_code.co_filename else file
        at = at.tb_next
    return Path(file)


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skip a module whose import needs it."""
    report = yield
    if report.failed and (reason := reason_of(_error(report))):
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, f"Skipped: {reason}")
    return report


def _error(report: pytest.CollectReport) -> BaseException | None:
    call = getattr(report, "call", None)
    return call.excinfo.value if call is not None and call.excinfo else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Skip a test that needs it while it runs."""
    report = yield
    if report.failed and call.excinfo is not None and (reason := reason_of(call.excinfo.value)):
        report.outcome, report.longrepr = "skipped", (str(item.path), 0, f"Skipped: {reason}")
    return report
