"""The device that tests run on, and models that tests of several layers share."""

import gc
import logging
import os
import random
import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from quire.core.garbage import collections_paused, older_objects_frozen
from support import cpu_seconds, no_torch, pairwise, stdlib_guard
from support.fuzz_seeds import first_seed

# A slow machine is no failure: random tests assert what happens, never how long it takes. And what passes here passes
# everywhere: the examples are the same each time. `make fuzz` draws others.
settings.register_profile(
    "any machine", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")

# Models of tests are tiny: threads only wait for each other, beside another worker for most of the time. Tests of
# several threads set their number, and these wait as in engine processes (quire.engine.launcher). PyTorch reads both
# when it is imported, which the conftest.py of a folder does before a hook of this file is called.
if not any(argument in ("cuda", "--device=cuda") for argument in sys.argv):
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")

ROOT = Path(__file__).parents[1]
DEMO_MODEL = ROOT / "src/quire/model/demo"
STORIES_260K = ROOT / "../shared/data/models/stories260K"
LOGS = logging.getLogger(), logging.getLogger("quire")
LOG_VARIABLES = "QUIRE_LOG_LEVEL", "QUIRE_LOG_FORMAT", "QUIRE_LOG_FILE"  # quire.core.logs
# Files that take longest, or wait for most of it. `make test` lets its processes begin with them, so that none of them
# is idle at the end.
FIRST = (
    "tests/cluster/", "tests/kernels/test_triton.py", "tests/engine/parallel/", "tests/model/test_families.py",
    "tests/server/test_lifecycle.py", "tests/server/test_machine_faults.py", "tests/server/test_fleet.py",
    "tests/server/test_fleet_soak.py", "tests/server/test_ranked_engines.py", "tests/server/test_stall_watch.py",
    "tests/test_docs.py", "tests/test_hostile_folders.py", "tests/test_no_extension.py", "tests/cache/", "tests/e2e/",
)  # fmt: skip
# Folders of which `make test` runs covering tables of the products of their tests' arguments.
PAIRED = ("tests/formats/", "tests/kernels/", "tests/model/")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --device and --best-isa."""
    told = "what engines run on; but for cpu, answers compare by the margin rule, not to the bit (support/margin.py)"
    parser.addoption("--device", choices=("cpu", "cuda", "imitated"), default="cpu", help=told)
    parser.addoption("--best-isa", action="store_true", help="of the instruction sets, test the machine's best alone")


def pytest_configure(config: pytest.Config) -> None:
    """Keep tests off shared names; let auto be the device asked for, also in the processes that tests start."""
    stdlib_guard.turn_on()
    pairwise.is_without_others = "not matrix" in config.option.markexpr
    # Each client, also that of a call of `httpx.get`, would read the certificates of all authorities: 20 ms.
    for library in filter(find_spec, ("httpx", "httpx2")):  # the second is of openai and anthropic
        transport = import_module(f"{library}._transports.default")
        transport.create_ssl_context = cache(transport.create_ssl_context)  # type: ignore[attr-defined]
    config.pluginmanager.register(cpu_seconds)
    config.pluginmanager.register(cpu_seconds.Summary())
    if no_torch.is_missing():
        config.pluginmanager.register(no_torch)
    device = config.getoption("--device")
    if device != "cuda":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if device == "cpu":
        return
    if device == "imitated":
        from support import imitated_gpu

        imitated_gpu.turn_on()
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no GPU")
    from support import margin

    margin.turn_on()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Collect no garbage among the million objects of the tests while they are made, which takes 5 s.

    Hypothesis collects all of it before its first example in a process: 1.5 s later on.
    """
    given(st.none())(lambda _: None)()
    with collections_paused():
        return (yield)


def pytest_collection_finish() -> None:
    """Make what is done in each test, or in many, cheap beside a million objects of tests and all of PyTorch.

    A full collection takes a second: ten times as many objects as usual are made before there is one. To each logger
    that does not propagate, such as 40 of PyTorch, pytest adds two handlers, three times a test.
    """
    gc.set_threshold(*gc.get_threshold()[:2], 100)
    for name, log in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(log, logging.Logger):
            log.propagate = True


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest files. With --best-isa, deselect the tests of every instruction set but the best.

    Of products of back ends, dtypes, shapes and more, only rows of a covering table have no marker `matrix`.
    """
    paired = [item for item in items if isinstance(item, pytest.Function) and item.nodeid.startswith(PAIRED)]
    pairwise.leave_others_to_matrix(paired, united=("isa", "dtype"))  # a kernel is compiled for each of these
    items.sort(key=lambda item: next((n for n, name in enumerate(FIRST) if item.nodeid.startswith(name)), len(FIRST)))
    if not config.getoption("--best-isa"):
        return
    from quire.extension.isas import usable_isas

    others = usable_isas()[1:]
    unwanted = [item for item in items if isinstance(item, pytest.Function) and isa_of(item) in others]
    config.hook.pytest_deselected(items=unwanted)
    items[:] = [item for item in items if item not in unwanted]


def isa_of(item: pytest.Function) -> object:
    """Return the instruction set that a test is parametrized with, or None."""
    return item.callspec.params.get("isa") if hasattr(item, "callspec") else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """Print the seed of the long random tests, if they are chosen: a header would not be seen in a quiet run."""
    if session.config.option.markexpr == "fuzz":
        seed = first_seed()
        line = f"random runs begin with seed {seed}: QUIRE_FUZZ_SEED={seed} repeats them"
        session.config.get_terminal_writer().line(line)


def pytest_sessionfinish() -> None:
    """Collect all garbage, once: pytest does it twice, and the interpreter again, among a million objects of tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_state_each_time(pytestconfig: pytest.Config) -> Iterator[None]:
    """Seed random numbers, and undo what a server in this process did to its log and to the collector.

    Then a test does not depend on the tests before it. One fixture, since each costs 0.2 ms in each of 23,000 tests.
    Frozen objects are counted at each call. `torch.manual_seed` keeps the stack for GPUs that are not in use yet, three
    times: a millisecond of each test.
    """
    random.seed(0)
    if (torch := sys.modules.get("torch")) is not None:
        is_on_cpu = pytestconfig.getoption("--device") == "cpu"
        (torch.default_generator.manual_seed if is_on_cpu else torch.manual_seed)(0)
    levels = [(log, log.level) for log in LOGS]
    variables = [(name, os.environ.get(name)) for name in LOG_VARIABLES]
    thresholds = gc.get_threshold()
    yield
    for log, level in levels:
        if log.level != level:  # setting it clears what every logger knows of its level
            log.setLevel(level)
    for name, value in variables:
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value
    gc.unfreeze()
    gc.set_threshold(*thresholds)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Return the folder of the bundled demo model."""
    if not (DEMO_MODEL / "config.json").exists():
        pytest.skip("the demo model has not been trained")
    return DEMO_MODEL


@pytest.fixture(scope="session")
def stories260k() -> Path:
    """Return the folder of a real model of 260 thousand parameters, which lies beside the repository."""
    if not STORIES_260K.exists():
        pytest.skip("../shared/data is not here")
    return STORIES_260K.resolve()


@pytest.fixture
def tests_frozen() -> Iterator[None]:
    """Exempt the million objects of all tests from full collections, for tests that make some: 1.2 s each."""
    with older_objects_frozen():
        yield


@pytest.fixture
def forked_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the processes of engines and ranks, which spares seconds of imports: for tests that look at no start."""
    from support.forked_engines import fork_module

    monkeypatch.setattr("quire.engine.launcher.start_module", fork_module)
    monkeypatch.setattr("quire.engine.parallel.starters.start_module", fork_module)
