"""Places for models: which of many are loaded, which requests wait for one, and which is unloaded for another.

Pure: events come in with their time, actions come out, and nothing here starts a process, waits or reads a clock.

* Models without a place wait in order of their first request. The first of them gets the next free place; while it
  waits, none behind it is started.
* Where no place is free, the idle model that was asked for longest ago is unloaded. Where none is idle, the one asked
  for longest ago is closed: it answers what it has, later requests for it wait behind the others, and it is unloaded
  once it is idle. So a busy model cannot keep another out for ever, and no model is unloaded with a request open, or
  while it is loading.
* A model that is closed and then not needed to give way is opened again.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum


class State(StrEnum):
    """State of a model. Each but the first takes a place. CLOSED: as LOADED, but new requests wait."""

    UNLOADED = "unloaded"
    LOADING = "loading"
    LOADED = "loaded"
    CLOSED = "closed"
    UNLOADING = "unloading"


@dataclass(frozen=True, slots=True)
class StartModel:
    """Start the process of a model."""

    name: str


@dataclass(frozen=True, slots=True)
class StopModel:
    """End the process of a model, which has no request open."""

    name: str


@dataclass(frozen=True, slots=True)
class Admit:
    """Send a request to its model, which is loaded."""

    ticket: int
    name: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Answer a request with an error: its model could not be loaded, or has died."""

    ticket: int
    reason: str


Action = StartModel | StopModel | Admit | Fail


@dataclass(slots=True)
class Model:
    """A model. `waiting` tickets are in order; times are in seconds, `keep_alive_s` of the last request's choice."""

    name: str
    keep_alive_s: float
    state: State = State.UNLOADED
    waiting: list[int] = field(default_factory=list)
    open: set[int] = field(default_factory=set)
    asked_s: float = -math.inf     # when the last request came
    idle_since_s: float = -math.inf

    @property
    def is_idle(self) -> bool:
        """True if it is loaded, and no request is open or waits."""
        return self.state in (State.LOADED, State.CLOSED) and not self.open and not self.waiting

    @property
    def expires_s(self) -> float:
        """Time at which an idle model is unloaded; infinity for one that is not idle."""
        return self.idle_since_s + self.keep_alive_s if self.is_idle else math.inf


class Places:
    """The models of a server. At most `max_loaded` have a place; an idle one keeps it for `keep_alive_s` seconds."""

    def __init__(self, max_loaded: int, keep_alive_s: float) -> None:
        self._max_loaded, self._keep_alive_s = max_loaded, keep_alive_s
        self._models: dict[str, Model] = {}
        self._of_ticket: dict[int, Model] = {}
        self._queue: list[Model] = []       # with requests that wait, and without a place, or closed
        self._actions: list[Action] = []

    # --- what is asked -----------------------------------------------------------------------------------------------

    def state(self, name: str) -> State:
        """Return what a model does."""
        return self._models[name].state if name in self._models else State.UNLOADED

    def expires_s(self, name: str) -> float:
        """Return when a loaded model is unloaded if nothing happens; infinity if it is not."""
        return self._models[name].expires_s if name in self._models else math.inf

    def loaded(self) -> list[str]:
        """Return the models that answer requests, the one that was asked last first."""
        found = [each for each in self._models.values() if each.state in (State.LOADED, State.CLOSED)]
        return [each.name for each in sorted(found, key=lambda each: -each.asked_s)]

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a model."""
        return sum(len(each.waiting) for each in self._models.values())

    @property
    def next_expiry_s(self) -> float:
        """Time at which `tick` has a model to unload; infinity for never."""
        return min((each.expires_s for each in self._models.values()), default=math.inf)

    def take_actions(self) -> list[Action]:
        """Return what has to be done now, in this order, once."""
        actions, self._actions = self._actions, []
        return actions

    # --- what happens ------------------------------------------------------------------------------------------------

    def arrive(
        self, name: str, ticket: int, now_s: float, keep_alive_s: float | None = None, *, is_use: bool = True
    ) -> None:
        """Take a request, under a ticket of its own, for a model. It is admitted, fails or `end`s.

        `keep_alive_s`: from now on of this model; None: the server's. `is_use`: False for a look at a model, which
        keeps nothing loaded.
        """
        model = self._models.setdefault(name, Model(name, self._keep_alive_s))
        self._of_ticket[ticket] = model
        model.waiting.append(ticket)
        if is_use:
            model.asked_s = now_s
            model.keep_alive_s = self._keep_alive_s if keep_alive_s is None else keep_alive_s
        self._advance(now_s)

    def end(self, ticket: int, now_s: float, *, is_use: bool = True) -> None:
        """Forget a request that was answered, or given up by its client; one that has failed is forgotten already."""
        model = self._of_ticket.pop(ticket, None)
        if model is None:
            return
        if ticket in model.open:
            model.open.remove(ticket)
            if is_use:
                model.idle_since_s = now_s
        else:
            model.waiting.remove(ticket)
        self._advance(now_s)

    def has_loaded(self, name: str, now_s: float) -> None:
        """Record that the process of a model answers."""
        model = self._models[name]
        if model.state is State.LOADING:
            model.state, model.idle_since_s = State.LOADED, now_s
            self._admit(model)      # before it may have to give way
        self._advance(now_s)

    def has_ended(self, name: str, reason: str, now_s: float) -> None:
        """Record the end of a model's process, asked for or not: requests that it had, or waited for it, fail."""
        model = self._models[name]
        lost = sorted(model.open)
        if model.state is State.LOADING:
            lost += model.waiting
            model.waiting.clear()
        model.open.clear()
        for ticket in lost:
            del self._of_ticket[ticket]
            self._actions.append(Fail(ticket, reason))
        model.state = State.UNLOADED
        self._advance(now_s)

    def unload(self, name: str, now_s: float) -> None:
        """Unload a model as soon as it is idle, unless another request comes."""
        if name in self._models:
            self._models[name].keep_alive_s = 0.0
            self._advance(now_s)

    def tick(self, now_s: float) -> None:
        """Unload models that have been idle for long enough."""
        self._advance(now_s)

    # --- what follows ------------------------------------------------------------------------------------------------

    def _advance(self, now_s: float) -> None:
        """Do all that can be done. Each pass of the loop changes the state of a model."""
        while True:
            for model in self._models.values():
                if model.state is State.LOADED:
                    self._admit(model)
                if model.expires_s <= now_s:
                    self._stop(model)
            self._queue = [each for each in self._queue if self._needs_place(each)]
            for model in self._models.values():
                if self._needs_place(model) and model not in self._queue:
                    self._queue.append(model)
            if not self._serve_queue():
                return

    @staticmethod
    def _needs_place(model: Model) -> bool:
        return bool(model.waiting) and model.state in (State.UNLOADED, State.CLOSED, State.UNLOADING)

    def _serve_queue(self) -> bool:
        """Do what the first model of the queue needs; return whether that changed anything."""
        first, closed = self._queue[0] if self._queue else None, self._in(State.CLOSED)
        needs_start = first is not None and first.state is State.UNLOADED
        if needs_start and not self._has_room():
            return self._make_room()
        if closed:              # it need not give way
            closed[0].state = State.LOADED
            return True
        if first is None or not needs_start:
            return False
        first.state = State.LOADING
        self._actions.append(StartModel(first.name))
        return True

    def _make_room(self) -> bool:
        """Unload a model for the first of the queue, or close one; return whether that changed anything."""
        closed, candidates = self._in(State.CLOSED), self._in(State.LOADED, State.CLOSED)
        idle = [each for each in candidates if not each.open]
        if self._in(State.UNLOADING) or not candidates or (closed and not idle):
            return False        # a place will be free; or all are loading; or one answers what it has
        if idle:
            self._stop(min(idle, key=lambda each: each.asked_s))
        else:
            min(candidates, key=lambda each: each.asked_s).state = State.CLOSED
        return True

    def _has_room(self) -> bool:
        return sum(each.state is not State.UNLOADED for each in self._models.values()) < self._max_loaded

    def _in(self, *states: State) -> list[Model]:
        return [each for each in self._models.values() if each.state in states]

    def _admit(self, model: Model) -> None:
        for ticket in model.waiting:
            model.open.add(ticket)
            self._actions.append(Admit(ticket, model.name))
        model.waiting.clear()

    def _stop(self, model: Model) -> None:
        assert not model.open, f"{model.name} is unloaded with {len(model.open)} requests open"
        model.state = State.UNLOADING
        self._actions.append(StopModel(model.name))

    def check(self) -> None:
        """Assert what holds between any two events."""
        models = self._models.values()
        assert len(self._in(*set(State) - {State.UNLOADED})) <= self._max_loaded
        assert all(not each.open or each.state in (State.LOADED, State.CLOSED) for each in models)
        assert all(not each.waiting or each.state is State.LOADING or each in self._queue for each in models)
        assert len({each.name for each in self._queue}) == len(self._queue)
        assert _tickets(models) == self._of_ticket
        assert len(self._in(State.CLOSED)) <= 1


def _tickets(models: Iterable[Model]) -> dict[int, Model]:
    return {ticket: each for each in models for ticket in (*each.waiting, *each.open)}
