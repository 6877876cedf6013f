"""CPUs and memory in containers: files of both versions of cgroups, and a real group where one can be made."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from quire.core.host_limits import Cpus, find_cpus, find_memory, num_threads

GIB = 2**30
MEMINFO = f"MemTotal:       {64 * GIB // 1024} kB\nMemFree:  1 kB\nMemAvailable:   {40 * GIB // 1024} kB\n"
V2 = "30 20 0:26 {root} /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "".join(
    f"3{number} 31 0:29 {{root}} /sys/fs/cgroup/{name} rw - cgroup cgroup rw,{name}\n"
    for number, name in enumerate(["cpu,cpuacct", "memory", "cpuset"])
)
V1_SELF = "5:memory:{path}\n4:cpu,cpuacct:{path}\n3:cpuset:/\n1:name=systemd:/\n0::/\n"
NO_LIMIT = str(2**63 - 4096)  # cgroups of version 1


class Case(NamedTuple):
    own: str                    # /proc/self/cgroup
    mounts: str                 # /proc/self/mountinfo
    files: dict[str, str]       # below /sys/fs/cgroup
    num_cpus: int = 64
    free_bytes: int = 40 * GIB
    limit_bytes: int | None = None


CASES = {
    "no cgroups": Case("", "", {}),
    "no limits": Case("0::/\n", V2.format(root="/"), {"cpu.max": "max 100000\n", "memory.max": "max\n"}),
    "a container with its namespace": Case(
        "0::/\n", V2.format(root="/"),
        {"cpu.max": "200000 100000\n", "memory.max": f"{4 * GIB}\n", "memory.current": f"{GIB}\n"},
        2, 3 * GIB, 4 * GIB,
    ),
    "a container with the host's paths": Case(
        "0::/docker/abc\n", V2.format(root="/docker/abc"), {"cpu.max": "350000 100000\n"}, 3
    ),
    "half a CPU": Case("0::/\n", V2.format(root="/"), {"cpu.max": "50000 100000\n"}, 1),
    "a quota of more than there is": Case("0::/\n", V2.format(root="/"), {"cpu.max": "9900000 100000\n"}),
    "the least of the path": Case(
        "0::/a/b/c\n", V2.format(root="/"),
        {
            "a/cpu.max": "300000 100000\n", "a/b/cpu.max": "max 100000\n", "a/b/c/cpu.max": "800000 100000\n",
            "a/memory.max": f"{8 * GIB}\n", "a/memory.current": f"{6 * GIB}\n",
            "a/b/c/memory.max": f"{4 * GIB}\n", "a/b/c/memory.current": f"{GIB}\n",
        },
        3, 2 * GIB, 4 * GIB,
    ),
    "memory.high": Case(
        "0::/\n", V2.format(root="/"),
        {"memory.max": f"{8 * GIB}\n", "memory.high": f"{6 * GIB}\n", "memory.current": f"{GIB}\n"},
        64, 5 * GIB, 6 * GIB,
    ),
    "files in the page cache can be dropped": Case(
        "0::/\n", V2.format(root="/"),
        {
            "memory.max": f"{4 * GIB}\n", "memory.current": f"{3 * GIB}\n",
            "memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
        },
        64, 3 * GIB, 4 * GIB,
    ),
    "more is used than allowed": Case(
        "0::/\n", V2.format(root="/"), {"memory.high": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 64, 0, GIB
    ),
    "a limit above the host's memory": Case(
        "0::/\n", V2.format(root="/"), {"memory.max": f"{999 * GIB}\n", "memory.current": "5\n"}
    ),
    "version 1": Case(
        V1_SELF.format(path="/x"), V1.format(root="/"),
        {
            "cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n", "cpu,cpuacct/x/cpu.cfs_period_us": "50000\n",
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/x/memory.limit_in_bytes": f"{2 * GIB}\n", "memory/x/memory.usage_in_bytes": f"{GIB}\n",
            "memory/x/memory.stat": f"inactive_file 7\ntotal_inactive_file {GIB // 2}\ntotal_active_file 0\n",
            "memory/memory.limit_in_bytes": f"{NO_LIMIT}\n", "memory/memory.usage_in_bytes": f"{50 * GIB}\n",
        },
        5, GIB + GIB // 2, 2 * GIB,
    ),
    "version 1 without limits": Case(
        V1_SELF.format(path="/"), V1.format(root="/"),
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": f"{NO_LIMIT}\n", "memory/memory.usage_in_bytes": f"{50 * GIB}\n",
        },
    ),
    "version 1 in a container": Case(
        V1_SELF.format(path="/docker/9/inner"), V1.format(root="/docker/9"),
        {
            "cpu,cpuacct/cpu.cfs_quota_us": "100000\n", "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            "cpu,cpuacct/inner/cpu.cfs_quota_us": "-1\n", "cpu,cpuacct/inner/cpu.cfs_period_us": "100000\n",
        },
        1,
    ),
    "a path outside of the mount": Case("0::/../other\n", V2.format(root="/"), {"cpu.max": "400000 100000\n"}, 4),
    "a mount point with a space": Case(
        "0::/\n", V2.format(root="/").replace("/sys/fs/cgroup", r"/sys/fs/cgroup/of\040ours"),
        {"of ours/cpu.max": "200000 100000\n"}, 2,
    ),
    "nonsense": Case(
        "0::/\nhello\n::\n7:cpu\n", "not a mount - cgroup2\n" + V2.format(root="/"),
        {
            "cpu.max": "two of them\n", "memory.max": "-5\n", "memory.high": "1e9\n", "memory.current": "\n",
            "memory.stat": "inactive_file\nactive_file many\n",
        },
    ),
    "a period of nothing": Case("0::/\n", V2.format(root="/"), {"cpu.max": "100000 0\n"}),
    "numbers without an end": Case("0::/\n", V2.format(root="/"), {"cpu.max": "9" * 5000, "memory.max": "9" * 5000}),
    "files of bytes": Case("0::/\n", V2.format(root="/"), {"cpu.max": "\udcff\udcfe 100000", "memory.max": "\udcff"}),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_limits_are_those_of_the_groups_and_their_parents(case: Case, tmp_path: Path) -> None:
    files = {"proc/meminfo": MEMINFO, "proc/self/cgroup": case.own, "proc/self/mountinfo": case.mounts}
    files |= {f"sys/fs/cgroup/{path}": text for path, text in case.files.items()}
    for path, text in files.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(text.encode("utf-8", "surrogateescape"))
    cpus, memory = find_cpus(tmp_path, (64, 64)), find_memory(tmp_path)
    assert cpus == Cpus(case.num_cpus, 64, "cgroup" if case.num_cpus < 64 else "")
    assert (memory.free_bytes, memory.limit_bytes) == (case.free_bytes, case.limit_bytes)


def test_fewer_cpus_by_affinity_than_by_quota_are_those_that_count(tmp_path: Path) -> None:
    assert str(find_cpus(tmp_path, (2, 64))) == "2 of 64 (affinity)"
    assert str(find_cpus(tmp_path, (64, 64))) == "64"


@pytest.mark.parametrize(
    ("given", "num"), [("3", 3), ("4,2", 4), (" 5 ", 5), ("0", None), ("", None), ("many", None), ("-2", None)]
)
def test_threads_are_those_asked_for_or_the_cpus(given: str, num: int | None) -> None:
    assert num_threads({"OMP_NUM_THREADS": given}) == (num or find_cpus().num_usable)


@pytest.fixture
def real_groups() -> Iterator[dict[str, Path]]:
    """Groups of version 1 of our own, of one CPU and a half and of 1 GiB."""
    groups = {name: Path(f"/sys/fs/cgroup/{name}/quire-{os.getpid()}") for name in ("cpu", "memory")}
    made = list[Path]()
    try:
        for group in groups.values():
            group.mkdir()
            made.append(group)
        (groups["cpu"] / "cpu.cfs_quota_us").write_text("150000")
        (groups["memory"] / "memory.limit_in_bytes").write_text(str(GIB))
    except OSError as error:
        for group in made:
            group.rmdir()
        pytest.skip(f"no cgroup of version 1 can be made here: {error}")
    yield groups
    for group in made:
        group.rmdir()


def test_a_process_in_a_real_group_sees_its_limits(real_groups: dict[str, Path]) -> None:
    code = (
        "import json\nfrom quire.core.host_limits import find_cpus, find_memory\n"
        "print(json.dumps([find_cpus().num_usable, find_memory().limit_bytes, find_memory().free_bytes]))"
    )
    join = "".join(f"echo $$ > {group}/cgroup.procs && " for group in real_groups.values())
    command = ["/bin/sh", "-c", f'{join}exec {sys.executable} -c "$0"', code]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    num_cpus, limit_bytes, free_bytes = json.loads(done.stdout)
    assert (num_cpus, limit_bytes) == (1, GIB)
    assert 0 < free_bytes < GIB
