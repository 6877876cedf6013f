"""The flags that the benchmarks of models and of servers share."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

from quire.cli.flag_groups import flag
from quire.core.config import Batching, MemoryPolicy
from quire.core.errors import ConfigError
from quire.paper.traces import TraceSlice, is_trace, trace_workload
from quire.paper.workloads import WorkItem, length_workload, random_workload, token_id_workload

_DEFAULT_NUM_RANDOM = 64


_flag = partial(flag, panel="Workload")


@dataclass(frozen=True, slots=True)
class WorkloadFlags:
    """Which requests are run; all of them greedy, with a fixed number of output tokens."""

    workload: Annotated[
        str, _flag("random, a JSON file of token ids, a CSV file of lengths, or a trace", metavar="random|FILE")
    ] = "random"
    name: Annotated[str | None, _flag("which workload of a JSON file that holds several")] = None
    num_prompts: Annotated[
        int | None, _flag("requests", min=1, show_default=f"{_DEFAULT_NUM_RANDOM}, or all of a file")
    ] = None
    input_len: Annotated[int, _flag("prompt tokens of a random request", min=1)] = 128
    output_len: Annotated[int, _flag("output tokens of a random request", min=1)] = 128
    max_total_len: Annotated[int, _flag("leave out rows of a CSV file or trace with more tokens in all", min=2)] = 2048

    def build(self, vocab_size: int, seed: int) -> list[WorkItem]:
        """Return the requests. Raises ConfigError when the file or its name does not fit."""
        if self.workload == "random":
            num_prompts = self.num_prompts or _DEFAULT_NUM_RANDOM
            return random_workload(num_prompts, self.input_len, self.output_len, vocab_size, seed)
        path = Path(self.workload)
        if path.suffix == ".json":
            return token_id_workload(path, self.name, self.num_prompts)
        if path.name.endswith((".csv", ".csv.gz")):
            return length_workload(path, self.num_prompts, self.max_total_len, vocab_size, seed)
        if is_trace(path):
            return trace_workload(path, TraceSlice(self.num_prompts, self.max_total_len), vocab_size, seed)
        raise ConfigError(
            f"workload must be random, or a .json, .csv, .csv.gz, .jsonl or .jsonl.gz file, got {self.workload!r}"
        )


@dataclass(frozen=True, slots=True)
class PolicyFlags:
    """What paging and continuous batching are compared with."""

    memory_policy: Annotated[
        MemoryPolicy, flag("how KV blocks are given out; all but paged reserve one chunk per sequence", panel="Policy")
    ] = "paged"
    batching: Annotated[
        Batching, flag("static: whole batches, one after the other; needs contiguous-max", panel="Policy")
    ] = "continuous"


@dataclass(frozen=True, slots=True)
class RunFlags:
    """How often, and where the figures go."""

    repeats: Annotated[int, flag("timed passes, after one that warms up and watches the cache", min=1)] = 3
    json: Annotated[Path | None, flag("write everything there as well", metavar="FILE")] = None
