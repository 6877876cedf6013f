"""Ranks on a Ray cluster, which places and watches their processes. Needs `quire[ray]`. Loads no torch.

A placement group has the CPUs of all ranks. Rank 0 is in the process that calls this, so the first bundle is of its
machine; each other rank has an actor, which starts the rank's process and ends with it. Plans, heartbeats and
activations travel as between nodes that are started by hand, with a secret that a rank gets by the call of its actor.
"""

import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from quire.core.errors import ConfigError, EngineError, RankLostError, error_of
from quire.engine.options import EngineOptions
from quire.engine.parallel.addresses import RunAddress, checked_address
from quire.engine.parallel.node import Members

NODE_ID = "ray.io/node-id"      # Ray's label of every node
CONNECT_TIMEOUT_S = 5.0         # to reach the port of a head at RAY_ADDRESS
KEY_BYTES = 32
PLACE_SHARE = 0.5               # part of the start timeout, for Ray to find room
DEFAULT_ADDRESS = "127.0.0.1"   # the default of master_addr: then Ray's own address of this machine is used


class PlacedByRay:
    """A `Placement` of all ranks but this one, in processes that Ray places."""

    def __init__(self, options: EngineOptions, num_threads: int) -> None:
        self._options = options
        self._places: RankPlaces | None = None
        self._waiting: threading.Thread | None = None
        self._connection = RayConnection()
        try:
            is_given = options.master_addr != DEFAULT_ADDRESS
            address = checked_address(options.master_addr if is_given else self._connection.address, options)
        except BaseException:
            self._connection.close()
            raise
        self.address = RunAddress(address, 0, secrets.token_bytes(KEY_BYTES))
        # Also the CPUs that Ray reserves for a rank: those of a machine, divided among its ranks.
        self.num_first_threads = max(1, num_threads * options.nnodes // options.tensor_parallel_size)

    def start(self, port: int, lose: Callable[[EngineError], None]) -> None:
        """Place the ranks, and start all but this one."""
        options, ranks = self._options, range(1, self._options.tensor_parallel_size)
        timeout_s = PLACE_SHARE * options.start_timeout
        self._places = RankPlaces(len(ranks) + 1, options.nnodes, self.num_first_threads, timeout_s)
        encoded = msgspec.msgpack.encode(options)
        ends = self._places.start(ranks, encoded, self.address.address, port, self.address.key)
        self._waiting = threading.Thread(target=wait_for_first, args=(ends, ranks, lose), name="actors", daemon=True)
        self._waiting.start()

    def close(self) -> None:
        """End the actors, and free their places. Idempotent."""
        places, self._places = self._places, None
        if places is not None:
            places.close()
        if self._waiting is not None and threading.current_thread() is not self._waiting:
            self._waiting.join()
        self._connection.close()


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
        """Start the actors of ranks; return the references to their ends. `arguments` as in `RankActor.run`."""
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


class RankActor:
    """One rank. Its secret is passed to `run`, not at the creation of the actor, of which Ray keeps the arguments."""

    def run(self, options: bytes, rank: int, num_threads: int, address: str, port: int, key: bytes) -> tuple[str, str]:
        """Run the rank until it ends; return the name of an error's type and the reason.

        `options` are EngineOptions in msgpack; `address` and `port` of rank 0.
        """
        decoded = msgspec.msgpack.decode(options, type=EngineOptions)
        members = Members(decoded, {rank: num_threads}, address, port, key)
        try:
            reason = members.wait()
        finally:
            members.close()
        return type(reason).__name__, str(reason)


def wait_for_first(ends: Sequence[Any], ranks: Sequence[int], on_end: Callable[[EngineError], None]) -> None:
    """Wait until an actor ends; call `on_end` with the reason."""
    rank_of = dict(zip(ends, ranks, strict=True))
    (first,), _ = ray.wait(list(ends), num_returns=1)
    try:
        kind, message = ray.get(first)
        on_end(error_of(kind, message, RankLostError))
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
