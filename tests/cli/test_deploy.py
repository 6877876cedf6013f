"""`quire deploy`: what is refused before a cluster is looked for."""

from collections.abc import Callable
from typing import Any

import pytest

Run = Callable[..., Any]


@pytest.mark.parametrize("replicas", ["0", "3..2", "x", "1..", "-1"])
def test_replicas_are_a_number_or_two(run: Run, replicas: str) -> None:
    refused = run("deploy", f"--replicas={replicas}")
    assert refused.code == 1
    expected = f"replicas must be a number from 1 up, or two such as 1..8, got '{replicas}'"
    assert expected in " ".join(refused.err.split())


def test_engines_of_one_server_are_refused(run: Run) -> None:
    refused = run("deploy", "-dp", 2)
    assert refused.code == 1
    assert "replicas sets the engines on a cluster" in " ".join(refused.err.split())
