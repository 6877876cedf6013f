"""Progress bar of the offline API on standard error, on a terminal and in a notebook."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.text import Text

from quire.core.displays import is_notebook
from quire.core.outputs import RequestOutput
from quire.engine.metrics.engine_metrics import NumTokens
from quire.engine.requests.input_processor import PreparedRequest

NOTEBOOK_COLUMNS = 100   # a notebook has no width that could be asked for


class TokenProgress:
    """Bar of requests that run, by tokens: with many at once all end together, and none has ended until then.

    `count` returns the engines' counters, and is read by the thread that draws. A request of p prompt tokens and n
    answers of at most m tokens is p + n x m long; what it ends without is done as well.
    """

    def __init__(self, requests: Sequence[PreparedRequest], count: Callable[[], NumTokens]) -> None:
        self._count, self._start = count, count()
        self._started_s = time.monotonic()
        self._lengths = {str(each.request.request_id): _length(each) for each in requests}
        self._num_spared = 0                        # tokens that ended requests have not needed
        self._total = sum(self._lengths.values())
        columns = TextColumn("{task.description}"), _Column(self._bar), _Column(self._ended), TimeElapsedColumn()
        self._progress = Progress(*columns, _Column(self._rates), console=_console())
        self._task = self._progress.add_task("requests", total=len(requests))

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def ended(self, output: RequestOutput) -> None:
        """Count a request that has ended."""
        num_tokens = len(output.prompt_token_ids) + sum(len(each.token_ids) for each in output.outputs)
        self._num_spared += self._lengths[output.request_id] - num_tokens
        self._progress.advance(self._task)

    @property
    def share(self) -> float:
        """Share of all tokens that is done, 0 to 1."""
        now = self._count()
        num_done = now.prompt - self._start.prompt + now.output - self._start.output + self._num_spared
        return min(max(num_done / self._total, 0.0), 1.0) if self._total else 1.0

    def rates(self, now_s: float) -> str:
        """Return tokens per second since the start, in and out, in words."""
        now, seconds = self._count(), max(now_s - self._started_s, 1e-6)
        prompt, output = (now.prompt - self._start.prompt) / seconds, (now.output - self._start.output) / seconds
        return f"in {prompt:,.0f}, out {output:,.0f} tokens/s"

    def _bar(self, task: Task) -> ProgressBar:
        return ProgressBar(1.0, 1.0 if task.finished else self.share, width=30)

    def _ended(self, task: Task) -> Text:
        return Text(f"{task.completed:.0f}/{task.total:.0f}", "progress.download")

    def _rates(self, task: Task) -> Text:
        now_s = time.monotonic() if task.finished_time is None else self._started_s + task.finished_time
        return Text(self.rates(now_s), "progress.data.speed")


class _Column(ProgressColumn):
    """A column that a function draws."""

    def __init__(self, draw: Callable[[Task], ProgressBar | Text]) -> None:
        super().__init__()
        self._draw = draw

    def render(self, task: Task) -> ProgressBar | Text:
        return self._draw(task)


def _console() -> Console:
    """Return the console of standard error, so that a redirected output stays clean.

    In a notebook it writes as on a terminal: rich would ask for ipywidgets, while a cell's output knows the characters
    that redraw one line.
    """
    if is_notebook():
        return Console(
            stderr=True, force_terminal=True, force_jupyter=False, color_system="256", width=NOTEBOOK_COLUMNS
        )
    return Console(stderr=True)


def _length(prepared: PreparedRequest) -> int:
    request = prepared.request
    return len(prepared.prompt.token_ids) + request.params.n * request.max_tokens
