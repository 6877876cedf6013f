"""Hostile clients among honest ones: what the honest ones notice, what refused requests cost, and what grows.

    python bench/hostile_soak.py --minutes 20              # the demo model; phases of two minutes
    python bench/hostile_soak.py --minutes 2 --phase-s 15 MODEL -- --max-num-seqs 64

Phases alternate: in a baseline phase the hostile clients ask for the same accepted tokens without the hostile part (see
hostile_load.py), in a hostile phase with it. Honest clients and hostile ones are processes of their own, and all
traffic is on the loopback interface. The table shows the honest clients' time between two frames of a stream in each
phase, and the ratio of all hostile phases to all baseline phases; a last phase, of refused requests alone, shows what
share of a core they cost, less what the server costs at rest. Memory, descriptors and threads of the server, the engine
and the template processes are those after the warm-up and at the end, both at rest. Ends by itself.
"""

import asyncio
import json
import multiprocessing
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated

import psutil
import typer

from hostile_load import HOST, Tally, Target, attack_until, statuses_of_attacks, stream_until
from http_overhead import server

HONEST_KEY, HOSTILE_KEY = "honest-key", "hostile-key"
REST_S = 12.0          # the engine checks its accounts after 10 s
JOIN_LIMIT_S = 30.0    # for a load process to end after its phase


def run_load(result: Connection, target: Target, end_s: float, seed: int, refused: frozenset[str], kind: str) -> None:
    """Run one side of a phase in a process of its own and send its tally."""
    tally = Tally()

    async def run() -> None:
        if kind == "honest":
            await stream_until(target, end_s, seed, tally)
        else:
            await attack_until(target, end_s, seed, refused, kind, tally)

    asyncio.run(run())
    result.send(tally)


class Soak:
    """A server under alternating phases."""

    def __init__(self, port: int, process: psutil.Process, has_keys: bool) -> None:
        self._process = process
        self._honest = Target(port, HONEST_KEY if has_keys else None)
        self._hostile = Target(port, HOSTILE_KEY if has_keys else None)
        self._spawn = multiprocessing.get_context("spawn")
        self._seed = 0
        self.refused: frozenset[str] = frozenset()

    def find_refused(self) -> dict[str, int]:
        """Run each attack once; one that is refused is so in all phases."""
        statuses = asyncio.run(statuses_of_attacks(self._hostile))
        self.refused = frozenset(name for name, status in statuses.items() if 400 <= status < 500)
        return statuses

    def phase(self, seconds: float, *kinds: str) -> tuple[dict[str, Tally], float]:
        """Run loads side by side; return the tally of each, and the share of a core that the server computed."""
        self._seed += 1
        end_s, before_s, started_s = time.monotonic() + seconds, self._computed_s(), time.monotonic()
        running = [self._start(kind, end_s) for kind in kinds]
        time.sleep(max(0.0, end_s - time.monotonic()))
        share = (self._computed_s() - before_s) / (time.monotonic() - started_s)
        return {kind: self._collect(*each) for kind, each in zip(kinds, running, strict=True)}, share

    def _start(self, kind: str, end_s: float) -> tuple[Connection, multiprocessing.process.BaseProcess]:
        ours, theirs = self._spawn.Pipe(duplex=False)
        target = self._honest if kind == "honest" else self._hostile
        load = self._spawn.Process(
            target=run_load, args=(theirs, target, end_s, self._seed, self.refused, kind), daemon=True
        )
        load.start()
        theirs.close()
        return ours, load

    @staticmethod
    def _collect(result: Connection, load: multiprocessing.process.BaseProcess) -> Tally:
        try:
            tally: Tally = result.recv() if result.poll(JOIN_LIMIT_S) else Tally(Counter({"load hangs": 1}))
        except EOFError:
            tally = Tally(Counter({"load died": 1}))
        load.join(JOIN_LIMIT_S)
        return tally

    def _computed_s(self) -> float:
        """Return the CPU seconds of the server and its processes but the engine, which computes accepted tokens."""
        total = 0.0
        for each in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):
                if "quire.engine.processes.engine_process" not in each.cmdline():
                    times = each.cpu_times()
                    total += times.user + times.system
        return total

    def holdings(self) -> dict[str, tuple[float, int, int]]:
        """Return MiB, descriptors and threads of each process by its module, those of one module together."""
        held: dict[str, tuple[float, int, int]] = {}
        for each in (self._process, *self._process.children(recursive=True)):
            with suppress(psutil.Error):
                modules = [part for part in each.cmdline() if part.startswith("quire.")]
                name = modules[0] if modules and each.pid != self._process.pid else "server"
                before = held.get(name, (0.0, 0, 0))
                now = (each.memory_info().rss / (1 << 20), each.num_fds(), each.num_threads())
                held[name] = (before[0] + now[0], before[1] + now[1], before[2] + now[2])
        return held


def quantile(values: Sequence[float], share: float) -> float:
    """Return the value that a share of all does not exceed; NaN of none."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def shown_gaps(gaps_s: Sequence[float]) -> str:
    """Return median and 99th percentile in milliseconds."""
    if not gaps_s:
        return "no frames"
    return f"median {1e3 * statistics.median(gaps_s):7.1f} ms   p99 {1e3 * quantile(gaps_s, 0.99):7.1f} ms"


def soak(port: int, process: psutil.Process, minutes: float, phase_s: float, has_keys: bool) -> dict[str, float]:
    """Run all phases, print the tables, and return the figures that count."""
    run = Soak(port, process, has_keys)
    print("attacks alone:", json.dumps(run.find_refused()))
    run.phase(phase_s / 2, "honest", "hostile")  # warm-up: memory is touched, caches are filled
    time.sleep(REST_S)
    before = run.holdings()
    idle_share = run.phase(REST_S / 2)[1]
    gaps: dict[str, list[float]] = {"harmless": [], "hostile": []}
    end_s, number = time.monotonic() + 60 * minutes, 0
    while time.monotonic() + phase_s <= end_s or number < 2 or number % 2:
        kind = ("harmless", "hostile")[number % 2]
        tallies, share = run.phase(phase_s, "honest", kind)
        honest, other = tallies["honest"], tallies[kind]
        gaps[kind] += honest.gaps_s
        number += 1
        print(f"{number:3} {kind:8} {shown_gaps(honest.gaps_s)}   {honest.num_streams} streams, "
              f"{other.accepted_tokens} tokens accepted of others, server {share:.2f} cores")  # fmt: skip
        print("    ", dict(sorted((honest.statuses + other.statuses).items())), flush=True)
    refusals, share = run.phase(min(phase_s, 30.0), "refused")
    time.sleep(REST_S)
    after = run.holdings()
    for name in sorted(before | after):
        print(f"{name}: MiB, descriptors, threads {before.get(name)} -> {after.get(name)}")
    return report(gaps, share - idle_share, sum(refusals["refused"].statuses.values()))


def report(gaps: dict[str, list[float]], refused_share: float, num_refused: int) -> dict[str, float]:
    """Print and return the ratios and the cost of refused requests."""
    figures = {
        "median_ratio": statistics.median(gaps["hostile"]) / statistics.median(gaps["harmless"]),
        "p99_ratio": quantile(gaps["hostile"], 0.99) / quantile(gaps["harmless"], 0.99),
        "refused_share_of_a_core": refused_share,
        "num_refused": float(num_refused),
    }
    print(f"baseline {shown_gaps(gaps['harmless'])}\nhostile  {shown_gaps(gaps['hostile'])}")
    print("  ".join(f"{name} {value:.3f}" for name, value in figures.items()))
    return figures


def main(
    model: Annotated[str | None, typer.Argument(help="folder or hub id", show_default="the demo model")] = None,
    arguments: Annotated[list[str] | None, typer.Argument(help="after --: server's flags", metavar="FLAGS")] = None,
    minutes: Annotated[float, typer.Option(min=0.5, max=240, help="of alternating phases")] = 20.0,
    phase_s: Annotated[float, typer.Option(min=5, max=600, help="seconds of a phase")] = 120.0,
    keys: Annotated[bool, typer.Option(help="give the honest and the hostile clients a key each")] = True,
) -> None:
    """Serve a model to honest and hostile clients, and show what the honest ones notice."""
    flags = list(arguments or [])
    if model is not None and model.startswith("-"):  # no model before the --
        model, flags = None, [model, *flags]
    own = ["--api-key", HONEST_KEY, "--api-key", HOSTILE_KEY] if keys else []
    with (
        tempfile.TemporaryDirectory() as folder,
        server(Path(folder), [*([] if model is None else [model]), "--host", HOST, *own, *flags]) as url,
    ):
        process = next(each for each in psutil.Process().children() if "serve" in each.cmdline())
        print(json.dumps(soak(int(url.rpartition(":")[2]), process, minutes, phase_s, keys)))


if __name__ == "__main__":
    typer.run(main)
