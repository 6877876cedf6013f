"""What a reader of one request pays, in calls, files and moves between files, is within the budgets of the tool."""

from functools import partial

import pytest

import trace_request
from support.forked_engines import fork_engine
from trace_request import BUDGETS, SLACK, Call

TRACES = {"decode": trace_request.trace_decode, "completion": partial(trace_request.trace_completion, fork_engine)}


@pytest.mark.parametrize("name", BUDGETS)
def test_request_keeps_within_its_budgets(name: str) -> None:
    found, budgets = trace_request.figures(TRACES[name]()), BUDGETS[name]
    above = {key: found[key] for key, budget in budgets.items() if found[key] > budget}
    assert not above, f"{name}: {above} of {budgets}; `python tools/trace_request.py {name}` prints the calls"
    below = {key: found[key] for key, budget in budgets.items() if found[key] < SLACK * budget}
    assert not below, f"{name}: {below} of {budgets}: lower the budgets in tools/trace_request.py"


def test_moves_are_calls_in_another_file() -> None:
    calls = [Call("llm.py", "a"), Call("llm.py", "b"), Call("engine/engine.py", "c"), Call("llm.py", "a")]
    found = trace_request.figures(calls)
    assert (found["calls"], found["functions"], found["files"], found["moves"]) == (4, 3, 2, 2)


def test_calls_of_other_packages_are_not_recorded() -> None:
    with trace_request.recorded() as calls:
        trace_request.figures([])
    assert calls == []
