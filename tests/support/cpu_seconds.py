"""CPU seconds of the tests, per folder and of the slowest, printed at the end of a run.

CPU time, not wall time: beside other work the same test takes as many CPU seconds. The processes that a test starts
count once they have ended.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest

NUM_SLOWEST = 20
PROPERTY = "cpu_seconds"
BEGIN = pytest.StashKey[float]()
REPORTED: list[float] = []  # spent by processes that have ended and were no children (support/forked_engines.py)


def cpu_seconds() -> float:
    """Return the CPU seconds of this process, and of the processes of its tests that have ended."""
    return sum(os.times()[:4]) + sum(REPORTED)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Note the CPU seconds before a test and the set-up of its fixtures."""
    item.stash[BEGIN] = cpu_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    """Write the seconds into the report, which xdist sends from its workers to the process that prints."""
    report = yield
    if call.when == "teardown":
        report.user_properties.append((PROPERTY, cpu_seconds() - item.stash[BEGIN]))
    return report


class Summary:
    """The sums of one run, in the process that prints: alone, or the one that xdist's workers report to."""

    def __init__(self) -> None:
        self.by_test: Counter[str] = Counter()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Add the seconds of a test that has ended."""
        if report.when == "teardown":
            self.by_test[report.nodeid] += dict(report.user_properties).get(PROPERTY, 0.0)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print the seconds of each folder and the slowest tests."""
        if len(self.by_test) <= NUM_SLOWEST:
            return
        folders: Counter[str] = Counter()
        for name, seconds in self.by_test.items():
            folders["/".join(name.partition("::")[0].split("/")[:2])] += seconds
        terminalreporter.section(f"CPU seconds: {sum(folders.values()):.0f}")
        for name, seconds in (*folders.most_common(), *self.by_test.most_common(NUM_SLOWEST)):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
