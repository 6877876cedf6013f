"""The real scheduler over the real cache, without a model: for benchmarks of what is found, kept and shared."""

from collections.abc import Callable, Iterator
from typing import Protocol

from quire.core.config import CacheConfig, SchedulerConfig
from quire.core.plan import StepPlan, StepResult
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.engine.engine import Engine
from quire.execution.executor import LocalExecutor
from quire.scheduling.scheduler import make_scheduler

OUTPUT_TOKEN = 7  # what every answer consists of
NO_LIMIT = 1 << 40


class Clients(Protocol):
    """Source of requests. `next` returns None while there is none to send."""

    def next(self) -> Request | None: ...
    def take(self, request: Request) -> None:
        """Take the answer: the request is over."""


class InOrder:
    """Clients that ask one after the other, whatever comes of it."""

    def __init__(self, requests: Iterator[Request]) -> None:
        self._requests = requests

    def next(self) -> Request | None:
        return next(self._requests, None)

    def take(self, request: Request) -> None:
        pass


class AnsweringWorker:
    """A worker that computes nothing: `answer` makes the result of each plan."""

    def __init__(self, answer: Callable[[StepPlan], StepResult]) -> None:
        self.execute = answer


def always_the_same(plan: StepPlan) -> StepResult:
    """Answer every sample with OUTPUT_TOKEN."""
    return StepResult([OUTPUT_TOKEN] * len(plan.sample_rows))


def engine_without_model(
    cache: CacheConfig,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    answer: Callable[[StepPlan], StepResult] = always_the_same,
) -> Engine:
    """Return an engine that computes nothing: its samples come from `answer`."""
    config = SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len=NO_LIMIT)
    return Engine(make_scheduler(config, cache), LocalExecutor(AnsweringWorker(answer)))


def request_of(request_id: int, prompt: list[int], output_len: int, n: int = 1) -> Request:
    """Return a request for `n` answers of exactly that length."""
    params = SamplingParams(n=n, ignore_eos=True, max_tokens=output_len)
    return Request(request_id, prompt, params, seed=request_id, max_tokens=output_len)


def run_all(engine: Engine, clients: Clients, max_open: int, after_step: Callable[[], None] = lambda: None) -> int:
    """Serve all clients, at most `max_open` requests at a time; return the number of steps."""
    num_steps, unanswered = 0, dict[int, Request]()
    while True:
        while len(unanswered) < max_open and (request := clients.next()) is not None:
            engine.add(request)
            unanswered[request.request_id] = request
        if not unanswered:
            return num_steps
        deltas = engine.step()
        num_steps += 1
        after_step()
        for request_id in {delta.request_id for delta in deltas if delta.finish_reason is not None}:
            if not unanswered[request_id].live:
                clients.take(unanswered.pop(request_id))
