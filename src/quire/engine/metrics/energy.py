"""Energy of the machine, where the system tells it: the counters of RAPL that Linux has under /sys/class/powercap.

Zones that do not overlap: `package-N`, a CPU with its cores, and `dram-N`, its memory. A counter goes back to 0 at its
range, after minutes under load; reading it more seldom loses whole rounds. By default root alone can read it.
"""

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

POWERCAP = Path("/sys/class/powercap")


class _Zone:
    """A counter, in microjoules up to `range_uj`, and the energy since it was first read."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self._counter = name, folder / "energy_uj"
        self._range_uj = int((folder / "max_energy_range_uj").read_text())
        self._last_uj = int(self._counter.read_text())
        self._total_uj = 0

    def joules(self) -> float:
        """Return the energy since the first call."""
        with suppress(OSError, ValueError):         # what was counted stays, should it not be readable any more
            now_uj = int(self._counter.read_text())
            more_uj = now_uj - self._last_uj
            self._total_uj += more_uj if more_uj >= 0 else more_uj + self._range_uj
            self._last_uj = now_uj
        return self._total_uj / 1e6


class EnergyCollector(Collector):
    """The family `quire:energy_joules_total`, by zone; nothing where no zone can be read."""

    def __init__(self, folder: Path = POWERCAP) -> None:
        self._zones = [*_zones(folder)]

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the family."""
        if self._zones:
            family = CounterMetricFamily("quire:energy_joules", "Energy of the whole machine.", labels=["zone"])
            for zone in self._zones:
                family.add_metric([zone.name], zone.joules())
            yield family


def _zones(folder: Path) -> Iterator[_Zone]:
    for each in sorted(folder.glob("intel-rapl:*")):    # AMD's, too
        with suppress(OSError, ValueError):
            name = (each / "name").read_text().strip()
            if name.startswith("package-"):
                yield _Zone(name, each)
            elif name == "dram":
                yield _Zone(f"dram-{each.name.split(':')[1]}", each)
