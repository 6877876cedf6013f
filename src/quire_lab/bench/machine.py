"""Facts about the machine on which a figure was measured."""

import platform
from pathlib import Path

import quire
from quire.core.host_limits import find_cpus, num_threads
from quire.kernels.cpp.isas import usable_isas


def machine_facts() -> dict[str, str | int]:
    """Return the CPU, its best instruction set, the threads and the versions that a figure depends on."""
    return client_facts() | {"num_threads": num_threads(), "instruction_set": next(iter(usable_isas()), "none")}


def client_facts() -> dict[str, str | int]:
    """Return what matters to a client of a server elsewhere."""
    return {
        "cpu": _cpu_model(),
        "num_cpus": find_cpus().num_usable,
        "python": platform.python_version(),
        "quire": quire.__version__,
    }


def _cpu_model() -> str:
    """Return the processor's name as Linux gives it, else what Python knows."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or platform.machine())
