"""Cost of a record in an engine, and speed of its replay: steps of decodes without a model, on the real classes.

One engine runs without either, with a record and with the ring of recent plans in turns of random order: engines
beside each other differ by more than that, as their objects lie elsewhere. Turns are short, so that what else the
machine does is alike for all. Times are of the CPU of the engine's thread, so that other work on the machine is not
part of them. The recorder's process has a CPU of its own.
"""

import random
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median, quantiles

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.deltas import SequenceDelta
from quire.core.plan import StepPlan, StepResult
from quire.engine.engine import RecentPlans
from quire.engine.options import EngineOptions
from quire.engine.recording.fault_files import encode_whole
from quire.engine.recording.record import RecordStart, read_record
from quire.engine.recording.recorded_scheduler import Line, RecordedScheduler, make_recorded_scheduler
from quire.engine.recording.replay import RecordReplay
from quire.scheduling.scheduler import Scheduler, make_cache
from quire_lab.bench.control_plane import decoding_engine

ROUNDS, WARM_UP, STEPS, PROMPT_LEN, BLOCK_SIZE = 1500, 5, 15, 64, 16    # the first steps of a turn are not measured
KINDS = "nothing", "a record", "the ring"


class _Switched(RecordedScheduler):
    """A scheduler that records while `is_recorded` is set: of another class, Python would adapt its code anew."""

    is_recorded = False

    def update(self, plan: StepPlan, result: StepResult) -> list[SequenceDelta]:
        if self.is_recorded:
            return RecordedScheduler.update(self, plan, result)
        return Scheduler.update(self, plan, result)


def main() -> None:
    """Print the CPU time of a step without and with a record, its bytes, and the rate of a replay."""
    for num_seqs in map(int, sys.argv[1:] or (16, 64, 256)):
        _measure_steps(num_seqs)
        with tempfile.TemporaryDirectory() as folder:
            _measure_replay(num_seqs, Path(folder))


def _measure_steps(num_seqs: int) -> None:
    ours, other = socket.socketpair()
    # Takes the place of a recorder, which would end at the first step that it was not told of.
    process = subprocess.Popen(["cat"], stdin=other.fileno(), stdout=subprocess.DEVNULL)
    other.close()
    line = Line(process, ours)

    def make(config: SchedulerConfig, cache: CacheConfig) -> Scheduler:
        return _Switched(config, make_cache(cache), line)

    engine = decoding_engine(num_seqs, ROUNDS * (WARM_UP + STEPS) * len(KINDS), PROMPT_LEN, BLOCK_SIZE, make=make)
    scheduler = engine.scheduler
    assert isinstance(scheduler, _Switched)
    ring, rng = RecentPlans(4 << 20, encode_whole), random.Random(0)
    step_us: dict[str, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(ROUNDS):
        for kind in rng.sample(KINDS, len(KINDS)):
            engine.recent = ring if kind == "the ring" else None
            scheduler.is_recorded = kind == "a record"
            for _ in range(WARM_UP):
                engine.step()
            began_s = time.thread_time()
            for _ in range(STEPS):
                engine.step()
            step_us[kind].append((time.thread_time() - began_s) / STEPS * 1e6)
    line.close()
    base = step_us["nothing"]
    for kind, all_us in step_us.items():
        more = [us - base_us for us, base_us in zip(all_us, base, strict=True)]
        low, _, high = quantiles(more, n=4)
        print(
            f"{num_seqs} sequences, {kind}: {median(all_us):.1f} us per step, {median(more):+.1f} us "
            f"({median(more) / median(base):+.1%}; half of the rounds {low:+.1f} to {high:+.1f} us)"
        )


def _measure_replay(num_seqs: int, folder: Path) -> None:
    def make(config: SchedulerConfig, cache: CacheConfig) -> Scheduler:
        return make_recorded_scheduler(EngineOptions(record=str(folder)), config, cache, lambda request: None)

    steps = 2000
    engine = decoding_engine(num_seqs, steps, PROMPT_LEN, BLOCK_SIZE, make=make)
    for _ in range(steps):
        engine.step()
    scheduler = engine.scheduler
    assert isinstance(scheduler, RecordedScheduler)
    scheduler.close()
    (path,) = folder.iterdir()
    began_s = time.perf_counter()
    events = (event for _, event in read_record(path))
    start = next(events)
    assert isinstance(start, RecordStart)
    run = RecordReplay(start)
    for event in events:
        run.apply(event)
    rate = run.num_sequence_steps / (time.perf_counter() - began_s)
    num_bytes = path.stat().st_size / run.num_sequence_steps
    print(f"  replay: {rate:,.0f} sequences of steps per second, {num_bytes:.1f} bytes for each in the file")


if __name__ == "__main__":
    main()
