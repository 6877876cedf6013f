"""Placement of ranks on a Ray cluster: a placement group with the CPUs of all ranks, and an actor for each but rank 0.

Rank 0 is in the process that calls this, so the first bundle is of its machine.
"""

import logging
import os
import socket
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.core.errors import ConfigError, EngineError, ModelError, RankLostError
from quire.engine.parallel.ray_actor import RankActor

NODE_ID = "ray.io/node-id"      # Ray's label of every node
CONNECT_TIMEOUT_S = 5.0         # of a head at RAY_ADDRESS


class RayConnection:
    """This process's connection to the Ray cluster of its machine; one that was there before stays.

    ConfigError if there is none, or nothing accepts connections at RAY_ADDRESS: Ray itself would try for two minutes.
    """

    def __init__(self) -> None:
        self._is_own = not ray.is_initialized()
        if self._is_own:
            try:
                _check_reachable(os.environ.get("RAY_ADDRESS", ""))
                ray.init(address="auto", logging_level=logging.WARNING)
            except (OSError, ValueError, RuntimeError) as error:  # none, a wrong address, another version
                raise ConfigError(
                    "distributed_executor_backend 'ray' cannot connect to a Ray cluster: run `ray start` on each "
                    f"machine, or set RAY_ADDRESS ({_first_line(error)})"
                ) from error
        self.address = str(get_node_ip_address())  # type: ignore[no-untyped-call]

    def close(self) -> None:
        """Disconnect. Idempotent."""
        if self._is_own and ray.is_initialized():
            ray.shutdown()
        self._is_own = False


class RankPlaces:
    """The bundles of a run. `num_nodes` above 1: so many machines, with as many ranks each; else as few as possible.

    EngineError if Ray has no room for them for `timeout_s`.
    """

    def __init__(self, num_ranks: int, num_nodes: int, cpus_per_rank: int, timeout_s: float) -> None:
        self._per_bundle = num_ranks // num_nodes if num_nodes > 1 else 1
        self._cpus = cpus_per_rank
        bundles = [{"CPU": float(cpus_per_rank * self._per_bundle)}] * (num_ranks // self._per_bundle)
        here = {NODE_ID: ray.get_runtime_context().get_node_id()}
        self._group = placement_group(
            bundles, strategy="STRICT_SPREAD" if num_nodes > 1 else "PACK",
            bundle_label_selector=[here, *({} for _ in bundles[1:])],
        )  # fmt: skip
        self._actors: list[Any] = []
        if not self._group.wait(timeout_s):
            self.close()
            cpus = f"{bundles[0]['CPU']:g} free CPUs"
            room = f"{num_nodes} machines with {cpus} each" if num_nodes > 1 else f"{num_ranks} times {cpus}"
            raise EngineError(
                f"Ray has not found {room} within {timeout_s:g} s (start_timeout), the first on this machine; "
                "`ray status` shows what is free"
            )

    def start(self, ranks: Sequence[int], *arguments: object) -> list[Any]:
        """Start the actors of ranks; return the references to their ends. `arguments` as of `RankActor.run`."""
        options, *others = arguments
        for rank in ranks:
            place = PlacementGroupSchedulingStrategy(
                self._group, placement_group_bundle_index=rank // self._per_bundle
            )
            make: Any = ray.remote(num_cpus=self._cpus, max_restarts=0, scheduling_strategy=place)(RankActor)
            self._actors.append(make.remote())
        return [
            actor.run.remote(options, rank, self._cpus, *others)
            for actor, rank in zip(self._actors, ranks, strict=True)
        ]

    def close(self) -> None:
        """End the actors, and free the bundles."""
        for actor in self._actors:
            ray.kill(actor)
        remove_placement_group(self._group)


def wait_for_first(ends: Sequence[Any], ranks: Sequence[int], on_end: Callable[[EngineError], None]) -> None:
    """Wait until an actor ends; call `on_end` with the reason."""
    rank_of = dict(zip(ends, ranks, strict=True))
    (first,), _ = ray.wait(list(ends), num_returns=1)
    try:
        kind, message = ray.get(first)
        on_end({"ConfigError": ConfigError, "ModelError": ModelError}.get(kind, RankLostError)(message))
    except RayError as error:
        on_end(RankLostError(f"the Ray actor of rank {rank_of[first]} has ended: {_first_line(error)}"))


def _check_reachable(address: str) -> None:
    """Connect to a Ray head once. OSError if it does not answer; an address of another form is left to Ray."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=CONNECT_TIMEOUT_S).close()


def _first_line(error: Exception) -> str:
    """Return the first line of an error of Ray, which may have the traceback of another process behind it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
