"""Options of several engines, and of several processes of one engine."""

import re
from dataclasses import dataclass
from functools import partial
from typing import Literal

from quire.core.errors import ConfigError
from quire.core.options import option

_parallel = partial(option, panel="Parallel")

KVRole = Literal["none", "producer", "consumer", "both"]
ExecutorBackend = Literal["auto", "mp", "uni", "ray"]
TensorParallelMode = Literal["auto", "gather", "reduce"]
MAX_ENGINES = 64
START_TIMEOUT_S = 120.0
MAX_PEERS = 64
MAX_NAME_CHARS = 128
PEER_CHARS = "letters, digits and . _ : [ ] - @ /"
_PEER_NAME = re.compile(rf"[A-Za-z0-9._:\[\]@/-]{{1,{MAX_NAME_CHARS}}}")


def is_peer_name(name: str) -> bool:
    """Return whether a producer can have this name."""
    return _PEER_NAME.fullmatch(name) is not None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class ParallelOptions:
    """Engines, ranks and nodes, and the times after which they count as lost."""

    data_parallel_size: int = _parallel(
        1, "engines behind one server, which divide memory and threads", low=1, high=MAX_ENGINES, short="-dp",
        row=f"engines behind one server, or behind an `LLM`, 1 to {MAX_ENGINES}: above 1 each is a process with the "
        "whole model; `kv_cache_memory`, `num_kv_blocks`, `swap_space`, `num_swap_blocks`, their defaults and the "
        "CPU's threads are divided among them; the same tokens ([scaling.md](scaling.md)). On CPUs",
    )  # fmt: skip
    prefill_engines: int = _parallel(
        0, "engines of data_parallel_size that compute prompts, for the others to decode", low=0, high=MAX_ENGINES - 1,
        row="how many engines of `data_parallel_size` compute prompts alone, while the others decode "
        "([scaling](scaling.md#engines-for-prompts-in-one-server)); fewer than all. They listen at `kv_host`, ports "
        "from `kv_port` on. On a CPU with the C++ kernels, `tensor_parallel_size` 1; the same tokens",
    )  # fmt: skip
    prefill_least_tokens: int = _parallel(
        256, "prompts with fewer tokens to compute are computed where they are decoded", low=1, high=1 << 30,
        row="with `prefill_engines`: a prompt of which an engine that decodes has fewer tokens left to compute, as it "
        "is short or cached there, is computed there",
    )  # fmt: skip
    tensor_parallel_size: int = _parallel(
        1, "processes that share the model and each step; on CPUs, with the same tokens", low=1, high=64, short="-tp",
        row="processes that share the model and each step: on CPUs with the same tokens, to the bit "
        "([scaling](scaling.md)); on GPUs one for each ([gpu](gpu.md#several-gpus))",
    )  # fmt: skip
    tensor_parallel_mode: TensorParallelMode = _parallel(
        "auto", "division of layers among these processes: gather, with the same tokens; reduce, with fewer exchanges",
        row="division of layers among these processes: `gather`, by outputs, with the same tokens for any number of "
        "processes; `reduce`, with half as many exchanges and the same tokens for the same number "
        "([scaling](scaling.md#gather-or-reduce)); `auto`: `gather` on CPUs and with `exact`, else `reduce`",
    )  # fmt: skip
    distributed_executor_backend: ExecutorBackend = _parallel(
        "auto", "start of these processes: ray places them on a Ray cluster; auto is mp; uni is one process",
        row="start of these processes: `mp`, by this command (and by those of the other nodes); `ray`, on a Ray "
        "cluster ([scaling](scaling.md#ranks-on-a-ray-cluster)); `auto`, which is `mp`; or `uni`, for one process",
    )  # fmt: skip
    nnodes: int = _parallel(
        1, "machines that these processes are on, each with as many; start the same command on each", low=1, high=64,
        short="-n",
        row="machines (nodes) that these processes are on, each with as many: the same command is started on each of "
        "them ([scaling](scaling.md#several-machines-by-hand))",
    )  # fmt: skip
    node_rank: int = _parallel(
        0, "number of this machine, from 0: that serves", low=0, high=63, short="-r",
        row="number of this machine, from 0; node 0 has the engine, and the others are started by `quire serve`",
    )  # fmt: skip
    master_addr: str = _parallel(
        "127.0.0.1", "address of node 0 for the other nodes", metavar="HOST",
        row="address of node 0, at which it listens for the other nodes; one beyond this machine needs "
        "`node_secret_file`. With `ray` the default is Ray's address of this machine, and the port a free one",
    )  # fmt: skip
    master_port: int = _parallel(
        29501, "port of node 0 for the other nodes", low=1, high=65535,
        row="port of node 0, at which it listens for the other nodes",
    )  # fmt: skip
    node_secret_file: str | None = _parallel(
        None, "file with a secret that all nodes share", metavar="FILE",
        row="file with a secret of 16 to 4,096 bytes, the same on all nodes, without which none joins the run",
    )  # fmt: skip
    allow_public_master_addr: bool = _parallel(
        False, "let master_addr be a public address: what nodes exchange is not encrypted",
        row="`True`: `master_addr` may be an address of no private network; what the nodes exchange is not encrypted",
    )  # fmt: skip
    kv_role: KVRole = _parallel(
        "none", "part in prefill apart from decoding: producer, consumer or both",
        row="part in prefill apart from decoding ([scaling](scaling.md#prefill-apart-from-decoding)), for servers: "
        "`producer`, computes prompts and keeps their KV blocks for another engine; `consumer`, fetches them from the "
        "engines of `kv_peers`; `both`. On a CPU with the C++ kernels, `tensor_parallel_size` 1 and "
        "`data_parallel_size` 1. Needs `kv_secret_file`",
    )  # fmt: skip
    kv_engine_id: str | None = _parallel(
        None, "name of this producer in the kv_peers of consumers", metavar="NAME", shown_default="KV_HOST:KV_PORT",
        row="name of a producer, by which the `kv_peers` of consumers know it; `None`: `kv_host:kv_port`",
    )  # fmt: skip
    kv_host: str = _parallel(
        "127.0.0.1", "address at which a producer listens for consumers", metavar="HOST",
        row="address at which a producer listens for consumers; KV blocks are not encrypted on their way",
    )  # fmt: skip
    kv_port: int = _parallel(
        14579, "port at which a producer listens for consumers", low=1, high=65535,
        row="port at which a producer listens for consumers",
    )  # fmt: skip
    kv_peers: str | None = _parallel(
        None, "file with the producers of a consumer: lines of NAME HOST:PORT", metavar="FILE",
        row=f"file with the producers that a consumer may fetch from, 1 to {MAX_PEERS}: lines of `NAME HOST:PORT`, and "
        "comments that begin with `#`. No address is ever taken from a request",
    )  # fmt: skip
    kv_secret_file: str | None = _parallel(
        None, "file with a secret that producers and consumers share", metavar="FILE",
        row="file with a secret of 16 to 4,096 bytes, the same for producers and consumers: without it none connects",
    )  # fmt: skip
    kv_lease_duration: float = _parallel(
        30.0, "seconds for which a producer keeps the KV blocks of a prompt", low=1, high=3600, metavar="SECONDS",
        row="seconds for which a producer keeps the KV blocks of a prompt, and again from the moment at which a "
        "consumer begins to fetch them; fewer where blocks are short. vLLM's name and default",
    )  # fmt: skip
    stall_limit: float = option(
        10.0, "seconds without a heartbeat of a rank, after which the engine ends", kind="none",
        low=1, high=86400, unit="seconds",
        row="seconds, at least 1: with `tensor_parallel_size` above 1, a process without heartbeats for so long counts "
        "as lost, and the engine ends; with `data_parallel_size` above 1, an engine without progress for so long is "
        "ended and started again",
    )  # fmt: skip
    start_timeout: float = option(
        START_TIMEOUT_S, "seconds for machines to find each other, or without a sign of life of an engine that starts",
        kind="none", low=1, high=86400, unit="seconds",
        row="seconds, at least 1: with `nnodes` above 1, four fifths of it are for the other nodes to find node 0, and "
        "nine tenths for it to find all of them; with `ray`, half for Ray to find room; with `data_parallel_size` "
        "above 1, an engine that starts and neither uses CPU time nor reads for so long is given up",
    )  # fmt: skip

    @property
    def is_over_network(self) -> bool:
        """True if ranks of one model may be on several machines."""
        return self.nnodes > 1 or (self.distributed_executor_backend == "ray" and self.tensor_parallel_size > 1)

    @property
    def is_kv_producer(self) -> bool:
        """True if the engine keeps KV blocks for other engines."""
        return self.kv_role in ("producer", "both")

    @property
    def is_kv_consumer(self) -> bool:
        """True if the engine fetches KV blocks from other engines."""
        return self.kv_role in ("consumer", "both")

    @property
    def kv_name(self) -> str:
        """The producer's name, by which consumers know it."""
        return self.kv_engine_id or f"{self.kv_host}:{self.kv_port}"

    def _check_kv_role(self) -> None:
        """Check what roles need of each other; what they need of the engine is checked elsewhere."""
        if self.prefill_engines and self.prefill_engines >= self.data_parallel_size:
            raise ConfigError(
                f"prefill_engines {self.prefill_engines} must be below data_parallel_size {self.data_parallel_size}: "
                "the others decode"
            )
        if self.prefill_engines and self.kv_role != "none":
            raise ConfigError(
                f"prefill_engines {self.prefill_engines} does not go with kv_role {self.kv_role!r}: the one is for "
                "engines of this server, the other for those of several"
            )
        if self.prefill_engines and self.kv_port + self.prefill_engines > 1 << 16:
            raise ConfigError(
                f"kv_port {self.kv_port} must leave a port for each of {self.prefill_engines} prefill_engines, up to "
                "65535"
            )
        given = {"kv_engine_id": self.kv_engine_id, "kv_peers": self.kv_peers, "kv_secret_file": self.kv_secret_file}
        if self.kv_role == "none":
            for name, value in given.items():
                if value is not None:
                    raise ConfigError(f"{name} {value!r} needs kv_role producer, consumer or both")
            return
        if self.kv_secret_file is None:
            raise ConfigError(f"kv_role {self.kv_role!r} needs kv_secret_file, the same for producers and consumers")
        if self.is_kv_consumer and self.kv_peers is None:
            raise ConfigError(f"kv_role {self.kv_role!r} needs kv_peers, a file with the producers")
        if self.kv_role == "producer" and self.kv_peers is not None:
            raise ConfigError(f"kv_peers {self.kv_peers!r} is for consumers, and kv_role is 'producer'")
        if self.kv_role == "consumer" and self.kv_engine_id is not None:
            raise ConfigError(f"kv_engine_id {self.kv_engine_id!r} is for producers, and kv_role is 'consumer'")
        if not is_peer_name(self.kv_name):
            raise ConfigError(f"kv_engine_id must have 1 to {MAX_NAME_CHARS} characters of {PEER_CHARS}, got "
                              f"{self.kv_name!r}")  # fmt: skip

    def _check_ranks(self) -> None:
        if self.distributed_executor_backend == "uni" and self.tensor_parallel_size != 1:
            raise ConfigError(
                f"distributed_executor_backend 'uni' is one process: tensor_parallel_size must be 1, got "
                f"{self.tensor_parallel_size}"
            )
        if self.tensor_parallel_size % self.nnodes:
            raise ConfigError(
                f"nnodes must divide tensor_parallel_size {self.tensor_parallel_size}, got {self.nnodes}: each node "
                "has as many of these processes"
            )
        if self.node_rank >= self.nnodes:
            raise ConfigError(f"node_rank must be below nnodes {self.nnodes}, got {self.node_rank}")
        name = f"nnodes {self.nnodes}" if self.nnodes > 1 else "distributed_executor_backend 'ray'"
        if self.is_over_network and self.data_parallel_size > 1:
            raise ConfigError(
                f"{name} does not go with data_parallel_size {self.data_parallel_size}: start replicas on several "
                "machines by `quire deploy`, on a Ray cluster, or a server on each machine behind a router"
            )
        if self.distributed_executor_backend == "ray" and self.node_rank:
            raise ConfigError(f"node_rank {self.node_rank} is for nodes that are started by hand: Ray starts them all")
        if self.distributed_executor_backend == "ray" and self.node_secret_file is not None:
            raise ConfigError("node_secret_file is for nodes that are started by hand: with Ray a run makes its own")
