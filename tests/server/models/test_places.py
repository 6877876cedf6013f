"""Places for models: 1,000 random loads, requests, unloads and kills against a plain model of processes."""

import random
from collections import Counter

import pytest

from quire.server.models.places import Admit, Fail, Places, StartModel, State, StopModel

NAMES = ("a", "b", "c", "d")
KEEP_S = 30.0


def started(places: Places) -> list[str]:
    return [each.name for each in places.take_actions() if isinstance(each, StartModel)]


class World:
    """Processes and clients, which do what `Places` asks for in their own time."""

    def __init__(self, seed: int, max_loaded: int) -> None:
        self.random = random.Random(seed)
        self.places = Places(max_loaded, KEEP_S)
        self.now_s = 0.0
        self.processes: dict[str, str] = {}      # keyed by model: loading, loaded or ending
        self.asked: dict[int, str] = {}          # all that have come, by ticket
        self.open: set[int] = set()
        self.waiting: set[int] = set()
        self.told = Counter[int]()               # admissions and failures
        self.first_asked: list[str] = []         # models that wait for a place, by their first request
        self.most = max_loaded

    def act(self) -> None:
        for action in self.places.take_actions():
            match action:
                case StartModel(name):
                    assert name not in self.processes
                    self.processes[name] = "loading"
                    assert len(self.processes) <= self.most
                case StopModel(name):
                    assert self.processes[name] == "loaded"
                    assert not any(self.asked[ticket] == name for ticket in self.open)
                    self.processes[name] = "ending"
                case Admit(ticket, name):
                    assert self.asked[ticket] == name
                    assert self.processes[name] == "loaded"
                    self.waiting.remove(ticket)
                    self.open.add(ticket)
                    self.told[ticket] += 1
                case Fail(ticket, _):
                    self.told[ticket] += ticket in self.waiting    # one that is open was told before that
                    self.waiting.discard(ticket)
                    self.open.discard(ticket)
        self.places.check()

    def ask(self) -> None:
        ticket, name = len(self.asked), self.random.choice(NAMES)
        self.asked[ticket] = name
        self.waiting.add(ticket)
        keep_s = self.random.choice([None, None, None, 0.0, 5.0, float("inf")])
        self.places.arrive(name, ticket, self.now_s, keep_s, is_use=self.random.random() < 0.9)

    def leave(self) -> None:
        ticket = self.random.choice(sorted(self.open | self.waiting))
        self.told[ticket] += ticket in self.waiting     # its client knows
        self.open.discard(ticket)
        self.waiting.discard(ticket)
        self.places.end(ticket, self.now_s)

    def move_process(self, *, may_die: bool = True) -> None:
        name = self.random.choice(sorted(self.processes))
        if self.processes[name] == "ending" or (may_die and self.random.random() < 0.2):
            del self.processes[name]
            self.places.has_ended(name, "killed", self.now_s)
        elif self.processes[name] == "loading":
            self.processes[name] = "loaded"
            self.places.has_loaded(name, self.now_s)

    def step(self) -> None:
        self.now_s += self.random.random() * 3
        kind = self.random.random()
        if kind < 0.45:
            self.ask()
        elif kind < 0.7 and (self.open or self.waiting):
            self.leave()
        elif kind < 0.9 and self.processes:
            self.move_process()
        elif kind < 0.95:
            self.places.unload(self.random.choice(NAMES), self.now_s)
        else:
            self.places.tick(self.now_s)
        self.act()

    def settle(self) -> None:
        """Answer everything, with processes that no longer die, then wait until all models are unloaded."""
        for _ in range(10 * len(self.asked)):
            if self.open:
                self.places.end(ticket := min(self.open), self.now_s)
                self.open.remove(ticket)
            elif self.processes:
                self.move_process(may_die=False)
            self.act()
        assert not self.waiting
        assert not self.open
        for name in NAMES:
            self.places.unload(name, self.now_s)
        self.places.tick(self.now_s)
        self.act()
        while self.processes:
            self.move_process(may_die=False)
            self.act()


@pytest.mark.parametrize("max_loaded", [1, 2, 3])
@pytest.mark.parametrize("seed", range(20))
def test_random_loads_requests_unloads_and_kills_lose_nothing(seed: int, max_loaded: int) -> None:
    world = World(seed, max_loaded)
    for _ in range(1000):
        world.step()
    world.settle()
    assert all(world.told[ticket] == 1 for ticket in world.asked)       # each once, none lost
    assert len(world.asked) > 300
    assert all(world.places.state(name) is State.UNLOADED for name in NAMES)
    assert world.places.num_waiting == 0
    assert world.places.take_actions() == []


def test_models_are_loaded_in_the_order_of_their_first_requests() -> None:
    places, order = Places(1, KEEP_S), []
    for ticket, name in enumerate("abcbadc"):
        places.arrive(name, ticket, float(ticket))
    for _ in range(4):
        (name,) = started(places)
        order.append(name)
        places.has_loaded(name, 10.0)
        for action in places.take_actions():
            if isinstance(action, Admit):
                places.end(action.ticket, 11.0)
        places.has_ended(name, "", 12.0)
    assert order == ["a", "b", "c", "d"]


def test_busy_model_gives_way_when_it_has_answered_what_it_had() -> None:
    places = Places(1, KEEP_S)
    places.arrive("a", 0, 0.0)
    places.has_loaded("a", 1.0)
    places.arrive("b", 1, 2.0)
    places.arrive("a", 2, 3.0)              # comes behind the request that waits for b
    assert places.take_actions() == [StartModel("a"), Admit(0, "a")]
    assert places.state("a") is State.CLOSED
    places.end(0, 4.0)
    assert places.take_actions() == [StopModel("a")]
    places.has_ended("a", "", 5.0)
    places.has_loaded("b", 6.0)
    assert places.take_actions() == [StartModel("b"), Admit(1, "b")]
    places.end(1, 7.0)
    places.has_ended("b", "", 8.0)
    assert places.take_actions() == [StopModel("b"), StartModel("a")]


def test_model_need_not_give_way_to_a_client_that_has_gone() -> None:
    places = Places(1, KEEP_S)
    places.arrive("a", 0, 0.0)
    places.has_loaded("a", 1.0)
    places.arrive("b", 1, 2.0)
    places.arrive("a", 2, 3.0)
    places.take_actions()
    places.end(1, 4.0)
    assert places.take_actions() == [Admit(2, "a")]
    assert places.state("a") is State.LOADED


def test_idle_model_that_was_asked_longest_ago_gives_way_at_once() -> None:
    places = Places(2, KEEP_S)
    for ticket, name in enumerate("ab"):
        places.arrive(name, ticket, float(ticket))
        places.has_loaded(name, 2.0)
        places.end(ticket, 3.0)
    places.arrive("c", 2, 4.0)
    assert places.take_actions()[-1] == StopModel("a")
    assert places.loaded() == ["b"]


def test_idle_models_are_unloaded_in_time_and_a_look_keeps_none() -> None:
    places = Places(2, KEEP_S)
    places.arrive("a", 0, 0.0)
    places.has_loaded("a", 1.0)
    assert places.next_expiry_s == float("inf")     # it has a request
    places.end(0, 10.0)
    places.arrive("a", 1, 20.0, is_use=False)
    places.end(1, 21.0, is_use=False)
    assert places.next_expiry_s == places.expires_s("a") == 40.0
    places.tick(39.9)
    assert StopModel("a") not in places.take_actions()
    places.tick(40.0)
    assert places.take_actions() == [StopModel("a")]


def test_request_says_how_long_its_model_stays() -> None:
    places = Places(1, KEEP_S)
    for ticket, keep_s in enumerate((5.0, None, float("inf"), 0.0)):
        places.arrive("a", ticket, 0.0, keep_s)
        places.has_loaded("a", 0.0)
        assert not any(isinstance(each, StopModel) for each in places.take_actions())
        places.end(ticket, 1.0)
        kept_s = KEEP_S if keep_s is None else keep_s
        assert places.expires_s("a") == (1.0 + kept_s if kept_s else float("inf"))
    assert places.take_actions() == [StopModel("a")]     # 0: at once


def test_failed_load_fails_its_requests_and_the_next_one_tries_again() -> None:
    places = Places(1, KEEP_S)
    places.arrive("a", 0, 0.0)
    places.arrive("a", 1, 0.0)
    places.has_ended("a", "no weights", 1.0)
    assert places.take_actions() == [StartModel("a"), Fail(0, "no weights"), Fail(1, "no weights")]
    places.end(0, 2.0)
    places.arrive("a", 2, 3.0)
    assert started(places) == ["a"]
