"""Energy of the machine, from files as those of /sys/class/powercap."""

from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from quire.engine.metrics import energy, page
from quire.engine.metrics.energy import EnergyCollector


def write_zone(folder: Path, place: str, name: str, energy_uj: int, range_uj: int = 1_000_000) -> Path:
    zone = folder / place
    zone.mkdir(parents=True)
    for file, content in (("name", name), ("energy_uj", energy_uj), ("max_energy_range_uj", range_uj)):
        (zone / file).write_text(f"{content}\n")
    return zone


def page_of(collector: EnergyCollector) -> list[str]:
    registry = CollectorRegistry()
    registry.register(collector)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_zones_that_do_not_overlap_are_counted_from_the_start(tmp_path: Path) -> None:
    first, memory = write_zone(tmp_path, "intel-rapl:0", "package-0", 900_000), "intel-rapl:0:1"
    dram = write_zone(tmp_path, memory, "dram", 5)
    write_zone(tmp_path, "intel-rapl:1", "package-1", 0)
    write_zone(tmp_path, "intel-rapl:0:0", "core", 0)           # a part of the package
    write_zone(tmp_path, "intel-rapl:2", "psys", 0)             # has all others
    collector = EnergyCollector(tmp_path)
    (first / "energy_uj").write_text("950000\n")
    (dram / "energy_uj").write_text("1005\n")
    assert page_of(collector) == [
        'quire:energy_joules_total{zone="package-0"} 0.05', 'quire:energy_joules_total{zone="dram-0"} 0.001',
        'quire:energy_joules_total{zone="package-1"} 0.0',
    ]


def test_counter_that_starts_again_goes_on(tmp_path: Path) -> None:
    counter = write_zone(tmp_path, "intel-rapl:0", "package-0", 900_000) / "energy_uj"
    collector = EnergyCollector(tmp_path)
    for now_uj in (100_000, 300_000):
        counter.write_text(str(now_uj))
        (line,) = page_of(collector)
    assert line.endswith(" 0.4")


def test_counter_that_cannot_be_read_any_more_stays(tmp_path: Path) -> None:
    counter = write_zone(tmp_path, "intel-rapl:0", "package-0", 0) / "energy_uj"
    collector = EnergyCollector(tmp_path)
    counter.write_text("250000")
    assert page_of(collector)[0].endswith(" 0.25")
    for content in ("no number", None):
        counter.unlink() if content is None else counter.write_text(content)
        assert page_of(collector)[0].endswith(" 0.25")


def test_machine_that_tells_nothing_has_no_series(tmp_path: Path) -> None:
    assert page_of(EnergyCollector(tmp_path / "powercap")) == []
    write_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    (tmp_path / "intel-rapl:0" / "energy_uj").unlink()
    assert page_of(EnergyCollector(tmp_path)) == []


def test_page_of_a_server_has_the_energy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_zone(tmp_path, "intel-rapl:0", "package-0", 0)
    monkeypatch.setattr(page, "EnergyCollector", lambda: energy.EnergyCollector(tmp_path))
    metrics = page.Metrics("tiny")
    assert b"quire:energy_joules_total" not in metrics.exposition()[0]
    metrics.measure_energy()
    assert b'quire:energy_joules_total{zone="package-0"} 0.0' in metrics.exposition()[0]
