"""Ranks that Ray places: bits, ends and restarts on a cluster of two nodes, in a process of its own; refusals."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import ConfigError
from quire.engine.options import EngineOptions
from support.faults import raising
from support.ray_cluster import SETTINGS, TESTS

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")


def lines_of(mode: str, model: Path) -> list[str]:
    """Return what `tests/ray_ranks.py` says to hold."""
    run = subprocess.run(
        [sys.executable, TESTS / "ray_ranks.py", mode, model], env=os.environ | SETTINGS,
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return [line for line in run.stdout.splitlines() if line.isupper()]


def test_two_nodes_have_the_bits_of_one_process_and_a_killed_actor_ends_the_run(demo_model: Path) -> None:
    assert lines_of("small", demo_model) == ["SAME BITS", "LOST", "DONE"]


@pytest.mark.ray
def test_server_starts_the_whole_set_again_whichever_process_was_killed(demo_model: Path) -> None:
    killed = [f"{name} KILLED" for name in ("ACTOR", "RANK", "ENGINE", "NODE")]
    assert lines_of("full", demo_model) == ["TWO NODES", "REFUSED", *killed, "DONE"]


def test_absent_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.parallel import ray_ranks

    monkeypatch.setattr(ray_ranks.ray, "init", raising(ConnectionError))
    with pytest.raises(ConfigError, match="'ray' cannot connect to a Ray cluster: run `ray start` on each machine, or"):
        ray_ranks.RayConnection()


def test_wrong_address_of_a_cluster_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.parallel import ray_ranks

    monkeypatch.setenv("RAY_ADDRESS", "nowhere")
    with pytest.raises(ConfigError, match=r"set RAY_ADDRESS \(Invalid address format: nowhere\)$"):
        ray_ranks.RayConnection()


def test_head_that_cannot_be_reached_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.engine.parallel import ray_ranks

    monkeypatch.setattr(ray_ranks.ray, "init", raising(AssertionError))  # it would try for minutes
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # nothing listens, and no other process gets the port
        monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{silent.getsockname()[1]}")
        with pytest.raises(ConfigError, match=r"or set RAY_ADDRESS \(.*Connection refused\)$"):
            ray_ranks.RayConnection()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"node_rank": 1, "nnodes": 2}, "node_rank 1 is for nodes that are started by hand: Ray starts them all"),
        ({"node_secret_file": "secret"}, "node_secret_file is for nodes that are started by hand: with Ray a run"),
        ({"data_parallel_size": 2}, "distributed_executor_backend 'ray' does not go with data_parallel_size 2"),
    ],
)
def test_settings_that_do_not_go_with_ray_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions(tensor_parallel_size=2, distributed_executor_backend="ray", **settings)
