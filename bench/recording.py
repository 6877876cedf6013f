"""What a record costs an engine, and how fast it is replayed: steps of decodes without a model, on the real classes.

Engines without either, with a record, and with the ring of recent plans take turns, some steps at a time. Times are of
the CPU of the engine's thread, so that other work on the machine is not part of them; the recorder's process has a CPU
of its own here.
"""

import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from quire.core.config import CacheConfig, SchedulerConfig
from quire.engine.engine import Engine, RecentPlans
from quire.engine.options import EngineOptions
from quire.engine.recording.fault_files import encode_whole
from quire.engine.recording.record import RecordStart, read_record
from quire.engine.recording.recorded_scheduler import RecordedScheduler, make_recorded_scheduler
from quire.engine.recording.replay import RecordReplay
from quire.scheduling.scheduler import Scheduler
from quire_lab.bench.control_plane import decoding_engine

ROUNDS, STEPS, PROMPT_LEN, BLOCK_SIZE = 40, 100, 64, 16


def main() -> None:
    """Print the CPU time of a step without and with a record, its bytes, and the rate of a replay."""
    for num_seqs in map(int, sys.argv[1:] or (16, 64, 256)):
        with tempfile.TemporaryDirectory() as folder:
            _measure(num_seqs, Path(folder))


@dataclass(slots=True)
class _Timed:
    name: str
    engine: Engine
    step_us: list[float] = field(default_factory=list)

    def run(self) -> None:
        began_s = time.thread_time()
        for _ in range(STEPS):
            self.engine.step()
        self.step_us.append((time.thread_time() - began_s) / STEPS * 1e6)


def _measure(num_seqs: int, folder: Path) -> None:
    def make(config: SchedulerConfig, cache: CacheConfig) -> Scheduler:
        scheduler = make_recorded_scheduler(EngineOptions(record=str(folder)), config, cache, lambda request: None)
        while not [*folder.iterdir()]:                          # the recorder loads what it needs
            time.sleep(0.01)
        return scheduler

    steps = ROUNDS * STEPS
    plain = _Timed("nothing", decoding_engine(num_seqs, steps, PROMPT_LEN, BLOCK_SIZE))
    recorded = _Timed("a record", decoding_engine(num_seqs, steps, PROMPT_LEN, BLOCK_SIZE, make=make))
    ringed = _Timed("the ring", decoding_engine(num_seqs, steps, PROMPT_LEN, BLOCK_SIZE))
    ringed.engine.recent = RecentPlans(4 << 20, encode_whole)
    timed = [plain, recorded, ringed]
    for _ in range(ROUNDS):
        for each in timed:
            each.run()
    scheduler = recorded.engine.scheduler
    assert isinstance(scheduler, RecordedScheduler)
    scheduler.sink.close()
    for each in timed:
        more_us = median(us - base_us for us, base_us in zip(each.step_us, plain.step_us, strict=True))
        print(
            f"{num_seqs} sequences, {each.name}: {median(each.step_us):.1f} us per step (least "
            f"{min(each.step_us):.1f}), {more_us:+.1f} us, {more_us / median(plain.step_us):+.1%}"
        )
    path = next(folder.iterdir())
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
