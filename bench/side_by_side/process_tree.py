"""Memory and CPU time of a process and its descendants, and the CPU time of all other processes, by /proc."""

import os
import signal
from collections import defaultdict
from pathlib import Path

_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def processes_of(pid: int) -> list[int]:
    """Return `pid` and its descendants."""
    children = defaultdict(list)
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and (fields := _stat_fields(int(entry.name))):
            children[int(fields[1])].append(int(entry.name))
    found = [pid]
    for parent in found:  # grows while it is walked
        found += children[parent]
    return found


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that the tree has used, user and system, in steps of a clock tick."""
    return _TICK_S * sum(int(f[11]) + int(f[12]) for p in processes_of(pid) if (f := _stat_fields(p)))


def peak_rss_bytes(pid: int) -> int:
    """Return the highest resident memory of each process, added up: what two of them share counts twice."""
    return sum(_peak_rss_bytes(process) for process in processes_of(pid))


def steal_share(before: tuple[int, int], after: tuple[int, int]) -> float:
    """Return the share of the CPUs' time that the machine's other guests took between two `cpu_ticks`."""
    return (after[0] - before[0]) / max(1, after[1] - before[1])


def cpu_ticks() -> tuple[int, int]:
    """Return clock ticks of all CPUs since start: stolen, and all."""
    ticks = [int(field) for field in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    return ticks[7], sum(ticks)


def end_group(group: int, how: signal.Signals) -> None:
    """Signal every process of a group that still has one."""
    try:
        os.killpg(group, how)
    except ProcessLookupError:
        return


def _stat_fields(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat after the name, or none if the process has gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def _peak_rss_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM")), 0)
