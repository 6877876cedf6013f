"""`quire replay`: the decisions of a recorded engine, made again and compared, on any machine and without its model."""

import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from quire.cli.flag_groups import flag
from quire.core.config import SchedulingPolicy
from quire.core.deltas import WAIT_REASONS, SequenceDelta
from quire.core.errors import ConfigError
from quire.core.plan import StepResult, decode_result
from quire.core.sequence import Request
from quire.engine.recording.record import (
    Added,
    Event,
    Fault,
    Planned,
    RecordError,
    RecordStart,
    Repeated,
    Resumed,
    RolledBack,
    Updated,
    read_record,
    shown,
)
from quire.engine.recording.replay import DifferenceError, RecordReplay
from quire.engine.recording.what_if import RecordedRequests

MAX_CLIENTS = 10              # rows
DIFFERENT, UNREADABLE = 1, 2  # exit codes


def replay(
    file: Annotated[Path, typer.Argument(help="a record that an engine has written with --record", show_default=False)],
    until: Annotated[int | None, flag("stop behind this step, and show it", metavar="STEP")] = None,
    check: Annotated[bool, flag("print nothing unless a plan differs", "--check")] = False,
    explain: Annotated[int | None, flag("tell what happened to a request, by its number", metavar="ID")] = None,
    execute: Annotated[
        bool, flag("compute the steps, too, with the engine's model, and compare the tokens", "--execute")
    ] = False,
    model: Annotated[str | None, flag("where that model is now", metavar="MODEL")] = None,
    policy: Annotated[
        SchedulingPolicy | None, flag("tell what requests would have had of another order of admission")
    ] = None,
) -> None:
    """Make the decisions of a recorded engine again, and compare each plan with that of the record.

    The first difference is shown with both plans, and the exit code is 1; a file that cannot be read to its end: 2.
    The steps before a fault, in a file that an engine has written without --record, are only shown.
    """
    if until is not None and until < 1:
        raise ConfigError(f"until must be at least 1, got {until}")
    events = read_record(file)
    life = None if explain is None else Life(explain)
    asked: RecordedRequests | None = None
    execution: Execution | None = None
    began_s = time.monotonic()
    try:
        _, start = next(events)
        assert isinstance(start, RecordStart), "the reader looks at it"
        first = next(events, None)
        if first is not None and isinstance(first[1], Fault):
            if check or execute or explain is not None or policy is not None:
                raise ConfigError("the file of a fault can only be shown: the one flag for it is until")
            _show_fault(first[1], events, until)
            return
        events = chain([] if first is None else [first], events)
        run = RecordReplay(start)
        asked = None if policy is None else RecordedRequests(start)
        if execute:
            execution = Execution(start, model)
        _replay(run, events, until, [each for each in (execution, life, asked) if each is not None])
    except DifferenceError as difference:
        _print_difference(difference)
        raise typer.Exit(DIFFERENT) from None
    except OtherTokensError as difference:
        typer.echo(str(difference), err=True)
        raise typer.Exit(DIFFERENT) from None
    except RecordError as error:
        typer.echo(f"quire: {error}", err=True)
        raise typer.Exit(UNREADABLE) from None
    if life is not None:
        life.print()
    if not check:
        _print_summary(run, time.monotonic() - began_s)
        if execution is not None:
            typer.echo(f"{execution.num_tokens:,} tokens were computed again, and are those of the record")
    if until is not None and not check:
        _print_step(run)
    if asked is not None and policy is not None:
        _print_policies(asked, policy)


def _replay(
    run: RecordReplay, events: Iterator[tuple[int, Event]], until: int | None,
    watching: "Sequence[Execution | Life | RecordedRequests]",
) -> None:
    """Replay events, up to the plan of step `until`."""
    for _, event in events:
        run.apply(event)
        for each in watching:
            each.see(run, event)
        if until is not None and run.num_steps >= until and isinstance(event, Planned):
            return


def _print_summary(run: RecordReplay, seconds: float) -> None:
    rate = run.num_sequence_steps / max(seconds, 1e-9)
    typer.echo(
        f"steps {run.first_step:,} to {run.num_steps:,}, {run.num_sequence_steps:,} sequences in them, "
        f"{run.num_requests:,} requests: "
        f"every plan is that of the record ({seconds:.2f} s, {rate:,.0f} sequences of steps per second)"
    )
    if run.end:
        typer.echo(f"the file ends before the engine: {run.end}")


def _print_step(run: RecordReplay) -> None:
    queues, kv = run.scheduler.queues, run.scheduler.cache.stats()
    typer.echo(
        f"step {run.num_steps}: {len(queues.running)} requests run, {len(queues.waiting)} wait "
        f"({queues.wait_reasons.current or 'for nothing'}), {len(queues.swapped)} are swapped out; blocks: "
        f"{kv.used_blocks} used, {kv.cached_blocks} cached, {kv.free_blocks} free"
    )
    for name, values in shown(run.plan).items():
        typer.echo(f"  {name}: {values}")


def _show_fault(fault: Fault, events: Iterable[tuple[int, Event]], until: int | None) -> None:
    """Print where an engine failed, its requests, and one of the plans before: the last one, or that of `until`."""
    plans = [event for _, event in events if isinstance(event, Planned | Repeated)]
    last = fault.first_step + len(plans) - 1
    typer.echo(
        f"steps {fault.first_step:,} to {last:,} before a fault, which can be shown (--until STEP) and not made again: "
        f"the file has no state to begin from\n{fault.error}"
    )
    for each in fault.requests:
        branches = "; ".join(
            f"{computed} tokens computed, {output} given" + (f", row {row}" if row >= 0 else "")
            for computed, output, row in each.branches
        )
        typer.echo(
            f"request {each.request_id}{' (at fault)' if each.is_at else ''}: {each.state}, {each.num_prompt_tokens} "
            f"prompt tokens, {each.num_preemptions} preemptions: {branches}"
        )
    shown_step = last if until is None else until
    if plans and not fault.first_step <= shown_step <= last:
        raise ConfigError(f"until must be from {fault.first_step} to {last}, got {until}")
    whole, plan = fault.first_step, None
    for number, event in enumerate(plans[: shown_step - fault.first_step + 1], fault.first_step):
        if isinstance(event, Planned):
            whole, plan = number, event.plan
    if plans:
        _print_recent(shown_step, whole, plan, plans[shown_step - fault.first_step])


def _print_recent(step: int, whole: int, plan: bytes | None, event: Planned | Repeated) -> None:
    """Print a plan before a fault, `plan` being that of the last step, `whole`, with other rows."""
    again = "" if step == whole else f" the rows of step {whole} once more, {step - whole} steps later"
    typer.echo(f"step {step}, at {event.now_s:.6f} s:{again}")
    if isinstance(event, Repeated):
        for name in ("table_rows", "table_columns", "table_blocks"):
            if values := getattr(event, name):
                typer.echo(f"  {name}: {values}")
        typer.echo(f"step {whole}:")
    for name, values in shown(plan).items():
        typer.echo(f"  {name}: {values}")


def _print_difference(difference: DifferenceError) -> None:
    typer.echo(f"step {difference.step} differs{f': {difference.why}' if difference.why else ''}", err=True)
    recorded, planned = shown(difference.recorded), shown(difference.planned)
    for name in sorted(recorded.keys() | planned.keys()):
        old, new = recorded.get(name, []), planned.get(name, [])
        typer.echo(f"  {name}: {old}" if old == new else f"- {name}: {old}\n+ {name}: {new}", err=True)


def _print_policies(asked: RecordedRequests, policy: SchedulingPolicy) -> None:
    """Print what clients have of the record's policy, and of another."""
    recorded = asked.start.scheduler.scheduling_policy
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("client", "requests", "policy", "TTFT p50", "p99", "end p50", "p99", "preempted"):
        table.add_column(name, justify="left" if name in ("client", "policy") else "right", no_wrap=True)
    by_policy = {each: asked.run(each) for each in (recorded, policy)}
    counts = Counter(outcome.client_id for outcome in by_policy[recorded])
    clients = [client for client, _ in counts.most_common(MAX_CLIENTS)] if len(counts) > 1 else []
    for client in (None, *clients):
        for name, outcomes in by_policy.items():
            own = [each for each in outcomes if client is None or each.client_id == client]
            ttft_s, ended_s = ([s for s in times if s is not None] for times in zip(*(
                (each.ttft_s, each.ended_s) for each in own
            ), strict=True))  # fmt: skip
            table.add_row(
                "all" if client is None else client or "-", str(len(own)), name, *_quantiles(ttft_s),
                *_quantiles(ended_s), str(sum(each.num_preemptions for each in own)),
            )  # fmt: skip
    Console(width=120, highlight=False).print(table)


def _quantiles(seconds: Sequence[float]) -> tuple[str, str]:
    """Return the median and the 99th percentile as text."""
    if not seconds:
        return "-", "-"
    ranked = sorted(seconds)
    p50, p99 = (ranked[min(int(share * len(ranked)), len(ranked) - 1)] for share in (0.5, 0.99))
    return f"{p50:.3f} s", f"{p99:.3f} s"


class OtherTokensError(Exception):
    """A step that has given other tokens than in the record."""


class Execution:
    """The engine of a record with tokens, which computes its plans again."""

    def __init__(self, start: RecordStart, model: str | None) -> None:
        if start.settings is None:
            raise ConfigError("execute needs a record with tokens (--record-tokens)")
        from quire.engine.assembly import assemble  # noqa: PLC0415 (loads the kernels)

        settings = replace(
            start.settings, model=model or start.settings.model, record=None, num_kv_blocks=start.cache.num_blocks,
            num_swap_blocks=start.cache.num_swap_blocks, num_state_slots=start.cache.num_state_slots or None,
            max_model_len=start.scheduler.max_model_len,
            data_parallel_size=1,
        )  # fmt: skip
        self._engine = assemble(settings, loads_tokenizer=False).engine
        self._results = deque[StepResult]()     # results of steps that are not over in the record
        self.num_tokens = 0

    def see(self, run: RecordReplay, event: Event) -> None:
        """Compute the step of a plan, or compare its tokens with those of the record."""
        step = run.scheduler.step
        if isinstance(event, Planned) and event.now_s is not None and step.plan.rows:
            self._engine.executor.submit(step.plan)
            self._results.append(self._engine.executor.collect())
        elif isinstance(event, Updated):
            recorded, computed = decode_result(event.result), self._results.popleft()
            self._compare(run, recorded, computed)
        elif isinstance(event, RolledBack):
            self._results.clear()
        elif isinstance(event, Resumed):
            raise ConfigError("execute: the file follows another one, with keys and values that it does not have")
        elif isinstance(event, Added):
            request = next(reversed(run.scheduler.queues.requests.values()))
            if request.params.structured_outputs is not None or request.scope.adapter is not None:
                raise ConfigError(f"execute: request {request.request_id} has a grammar or an adapter")

    def _compare(self, run: RecordReplay, recorded: StepResult, computed: StepResult) -> None:
        step = run.scheduler.step
        for place, (row, (request, sequence)) in enumerate(zip(step.plan.sample_rows, step.sampled, strict=True)):
            old, new = (
                each.rows[row].token_ids if row in each.rows else [each.token_ids[place]]
                for each in (recorded, computed)
            )
            if old != new:
                name = f"request {request.request_id}, branch {sequence.index}"
                raise OtherTokensError(f"step {run.num_steps}: {name} has {new} in place of {old}")
            is_draft = place > 0 and step.plan.sample_rows[place - 1] == row   # its row was compared
            self.num_tokens += 0 if is_draft else len(new)


class Life:
    """Events of one request, as lines of text."""

    def __init__(self, request_id: int) -> None:
        self._id = request_id
        self._arrived_s: float | None = None
        self._num_tokens = 0
        self._lines: list[str] = []

    def see(self, run: RecordReplay, event: Event) -> None:
        """Look at a replay behind one of its events."""
        requests, step = run.scheduler.queues.requests, run.scheduler.step
        if isinstance(event, Added) and self._arrived_s is None and (request := requests.get(self._id)) is not None:
            self._arrived_s = request.arrived_s
            num_tokens = len(request.prompt_token_ids)
            self._tell(run, f"queued: {num_tokens} prompt tokens, n {request.params.n}", event.arrived_s)
        elif isinstance(event, Planned) and event.now_s is not None:
            if self._id in step.preempted:
                self._tell(run, "preempted")
            for admitted in step.admitted:
                if admitted.request_id == self._id:
                    self._tell(run, _admission(admitted))
        elif isinstance(event, Updated):
            for delta in run.deltas:
                if delta.request_id == self._id:
                    self._see_delta(run, delta)

    def _see_delta(self, run: RecordReplay, delta: SequenceDelta) -> None:
        if not self._num_tokens and delta.token_ids:
            self._tell(run, "first token")
        self._num_tokens += len(delta.token_ids)
        if delta.finish_reason is not None:
            self._tell(run, f"branch {delta.index} ends ({delta.finish_reason}); {self._num_tokens} tokens of all")

    def _tell(self, run: RecordReplay, text: str, now_s: float | None = None) -> None:
        since_s = (run.now_s if now_s is None else now_s) - (self._arrived_s or 0.0)
        self._lines.append(f"step {run.num_steps:>6}  {since_s:9.3f} s  {text}")

    def print(self) -> None:
        """Print the lines. ConfigError if the record does not have the request."""
        if not self._lines:
            raise ConfigError(f"explain: the record has no request {self._id}")
        for line in self._lines:
            typer.echo(line)


def _admission(request: Request) -> str:
    waited = zip(WAIT_REASONS, request.waited, strict=False)
    reasons = ", ".join(f"{reason} {count}" for reason, count in waited if count)
    found = request.live[0].num_computed_tokens if request.live else 0
    times = f", after {request.num_preemptions} preemptions" if request.num_preemptions else ""
    return f"admitted{times}: {found} tokens found; waited {reasons or 'for nothing'}"
