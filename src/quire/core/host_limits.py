"""CPUs and memory that this process may use: those of the host, or fewer where a container limits them.

A container is limited by the control groups (cgroups) of its process: by each from its own up to the root of what it
can see, in version 1 (a hierarchy for each resource) or 2 (one for all); cgroups(7). The kernel answers
`sched_getaffinity` by cpusets, but neither it nor /proc/meminfo knows of quotas and limits.
"""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

HOST_KV_SHARE = 0.4  # share of free memory for the KV cache; the contract's default
_ROOT = Path("/")
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True, slots=True)
class Cpus:
    """CPUs that this process may use at once, CPUs of the host, and what limits the first: "" if nothing does."""

    num_usable: int
    num_host: int
    limited_by: str

    def __str__(self) -> str:
        """Return "2 of 64 (cgroup)", or only the number of a process that may use all."""
        return f"{self.num_usable} of {self.num_host} ({self.limited_by})" if self.limited_by else str(self.num_usable)


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that can be allocated without swapping; the least limit of a cgroup, or None if there is none."""

    free_bytes: int
    limit_bytes: int | None


def find_cpus(root: Path = _ROOT, affinity: tuple[int, int] | None = None) -> Cpus:
    """Return the CPUs of this process: by affinity, and by quota rounded down, but at least 1.

    `root`: of the files; `affinity`: CPUs that the process may run on, and those of the host; None: as the system says.
    """
    num_usable, num_host = affinity or _affinity()
    limited_by = "affinity" if num_usable < num_host else ""
    for group in _groups(root, "cpu"):
        if (share := _cpu_share(group)) is not None and (num_whole := max(1, int(share))) < num_usable:
            num_usable, limited_by = num_whole, "cgroup"
    return Cpus(num_usable, num_host, limited_by)


def num_threads(environment: Mapping[str, str] = os.environ) -> int:
    """Return the threads that compute in one process: OMP_NUM_THREADS, else the CPUs that it may use."""
    given = environment.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return int(given) if given.isdecimal() and int(given) else find_cpus().num_usable


def find_memory(root: Path = _ROOT) -> Memory:
    """Return the free memory: of the host, or what the limits of this process's cgroups leave, if that is less.

    What a group holds in the page cache counts as free, as it does in the host's MemAvailable.
    """
    free_bytes = _host_free_bytes(root)
    limit_bytes: int | None = None
    for group in _groups(root, "memory"):
        names = ("memory.max", "memory.high", "memory.limit_in_bytes")
        limits = [limit for name in names if (limit := _number(group / name)) is not None]
        used_bytes = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes") or 0
        for limit in limits:
            limit_bytes = limit if limit_bytes is None else min(limit, limit_bytes)
            free_bytes = min(free_bytes, max(0, limit - max(0, used_bytes - _page_cache_bytes(group))))
    if limit_bytes is not None and limit_bytes >= _host_bytes(root):
        limit_bytes = None  # version 1 has a number of 2^63 where nothing is limited
    return Memory(free_bytes, limit_bytes)


def free_memory_bytes() -> int:
    """Return the memory that can be allocated without swapping, in bytes."""
    return find_memory().free_bytes


def _affinity() -> tuple[int, int]:
    num_host = os.cpu_count() or 1
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else num_host, num_host


def _host_free_bytes(root: Path) -> int:
    found = _table(root / "proc/meminfo").get("MemAvailable:")
    return found * 1024 if found is not None else os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _host_bytes(root: Path) -> int:
    found = _table(root / "proc/meminfo").get("MemTotal:")
    return found * 1024 if found is not None else os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cpu_share(group: Path) -> float | None:
    """Return the CPUs of a group's quota; None: it has none."""
    version_2 = _read(group / "cpu.max").split()
    if len(version_2) == 2 and all(map(_is_number, version_2)):
        quota, period = map(int, version_2)
    else:
        quota, period = _number(group / "cpu.cfs_quota_us") or 0, _number(group / "cpu.cfs_period_us") or 0
    return quota / period if quota > 0 and period > 0 else None


def _page_cache_bytes(group: Path) -> int:
    """Return the bytes of files that a group's kernel could drop; version 1 has them with all groups below, apart."""
    stat = _table(group / "memory.stat")
    return sum(stat.get(f"total_{name}", stat.get(name, 0)) for name in ("inactive_file", "active_file"))


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups of this process that may limit a resource, from its own up to what is mounted."""
    paths = _own_paths(root, controller)
    for mounted, mount_point, kind in _mounts(root, controller):
        if (path := paths.get(kind)) is None:
            continue
        top = root / mount_point.lstrip("/")
        # A container without a namespace of its own sees its path on the host, of which a part is mounted. A path
        # outside of that ("/../..") is one of another namespace: only the mount itself is known to be above us.
        inside = os.path.relpath(path, mounted)
        group = top if inside.startswith("..") or ".." in path.split("/") else top / inside
        while True:
            yield group
            if group == top:
                break
            group = group.parent


def _own_paths(root: Path, controller: str) -> dict[str, str]:
    """Return the paths of this process's groups: in version 2's hierarchy, and in that of a controller of version 1."""
    paths = dict[str, str]()
    for line in _read(root / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if not path.startswith("/"):
            continue
        if number == "0" and not controllers:
            paths["cgroup2"] = path
        elif controller in controllers.split(","):
            paths["cgroup"] = path
    return paths


def _mounts(root: Path, controller: str) -> Iterator[tuple[str, str, str]]:
    """Yield what is mounted of the hierarchies that may hold a controller, where, and the type of file system."""
    for line in _read(root / "proc/self/mountinfo").splitlines():
        fields, _, rest = line.partition(" - ")
        left, right = fields.split(), rest.split()
        if len(left) < 6 or len(right) < 3:
            continue
        kind, options = right[0], right[2].split(",")
        if kind == "cgroup2" or (kind == "cgroup" and controller in options):
            yield _unescaped(left[3]), _unescaped(left[4]), kind


def _unescaped(path: str) -> str:
    """Return a path of mountinfo, in which spaces and some more characters are octal numbers; proc(5)."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), path)


def _table(path: Path) -> dict[str, int]:
    """Return the lines of a file that are a name and a number."""
    lines = [line.split() for line in _read(path).splitlines()]
    return {words[0]: int(words[1]) for words in lines if len(words) >= 2 and _is_number(words[1])}


def _number(path: Path) -> int | None:
    """Return the number that a file holds; None: none ("max"), or no such file."""
    text = _read(path).strip()
    return int(text) if _is_number(text) else None


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 20


def _read(path: Path) -> str:
    """Return a file's text; "" where it cannot be read: what is not there limits nothing."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def format_bytes(num_bytes: float) -> str:
    """Return a number of bytes in the largest unit of which it has at least one."""
    exponent = 0
    while num_bytes >= 1024 and exponent < len(_UNITS) - 1:
        num_bytes /= 1024
        exponent += 1
    return f"{num_bytes:.{0 if exponent == 0 else 1}f} {_UNITS[exponent]}"
