"""What a record costs an engine, and how fast it is replayed: steps of decodes without a model, on the real classes.

Engines with and without a record alternate. The recorder runs in a process of its own, so it has a CPU of its own here.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

from quire.core.config import CacheConfig, SchedulerConfig
from quire.engine.options import EngineOptions
from quire.engine.recording.record import RecordStart, read_record
from quire.engine.recording.recorded_scheduler import RecordedScheduler, make_recorded_scheduler
from quire.engine.recording.replay import RecordReplay
from quire.scheduling.scheduler import Scheduler, make_scheduler
from quire_lab.bench.control_plane import us_per_sequence_and_step

ROUNDS, PROMPT_LEN, BLOCK_SIZE = 5, 64, 16


def main() -> None:
    """Print the microseconds per sequence of a step without and with a record, its bytes, and the rate of a replay."""
    for num_seqs, num_steps in ((16, 3000), (64, 1500), (256, 600)):
        with tempfile.TemporaryDirectory() as folder:
            _measure(num_seqs, num_steps, Path(folder))


def _measure(num_seqs: int, num_steps: int, folder: Path) -> None:
    options, recorded = EngineOptions(record=str(folder)), list[RecordedScheduler]()

    def make(config: SchedulerConfig, cache: CacheConfig) -> Scheduler:
        scheduler = make_recorded_scheduler(options, config, cache, lambda request: None)
        assert isinstance(scheduler, RecordedScheduler)
        recorded.append(scheduler)
        while len([*folder.iterdir()]) < len(recorded):     # the recorder loads what it needs
            time.sleep(0.01)
        return scheduler

    plain_us, recorded_us = list[float](), list[float]()
    for _ in range(ROUNDS):
        plain_us.append(us_per_sequence_and_step(num_seqs, num_steps, PROMPT_LEN, BLOCK_SIZE, make_scheduler))
        recorded_us.append(us_per_sequence_and_step(num_seqs, num_steps, PROMPT_LEN, BLOCK_SIZE, make))
        recorded[-1].sink.close()
    more_us = median(recorded_us) - median(plain_us)
    print(
        f"{num_seqs} sequences: {median(plain_us):.2f} us ({min(plain_us):.2f} to {max(plain_us):.2f}) without, "
        f"{median(recorded_us):.2f} ({min(recorded_us):.2f} to {max(recorded_us):.2f}) with a record: "
        f"{more_us / median(plain_us):.0%} more, {more_us * num_seqs:.0f} us per step"
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
