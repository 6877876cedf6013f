"""`quire deploy`: a model on a Ray cluster, as replicas behind Ray Serve."""

import re
from dataclasses import dataclass
from functools import partial

from quire.cli.flag_groups import flag_field, with_config_file, with_flag_groups
from quire.core.errors import ConfigError
from quire.core.optional_package import needs_library
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions

_cluster = partial(flag_field, panel="Cluster")


@dataclass(frozen=True, slots=True)
class ClusterFlags:
    """Replicas, and the cluster that they run on."""

    address: str = _cluster(
        "auto", "of the cluster, as `ray.init` takes it", metavar="ADDRESS",
        row="address of the Ray cluster, as `ray.init` takes it; `auto`: that of this machine; `local`: a new one, in "
        "this process",
    )  # fmt: skip
    replicas: str = _cluster(
        "1", "engine replicas: a number, or the least and the most, 1..8", metavar="N|N..M",
        row="engine replicas: a number, or `1..8`, between which they follow the prompt tokens that wait",
    )  # fmt: skip
    ingress_replicas: int = _cluster(1, "replicas that speak HTTP and tokenize", min=1)
    cpus_per_engine: float = _cluster(
        1.0, "CPUs that an engine replica, or each of its ranks, reserves", min=0.0,
        row="CPUs that an engine replica, or each of its ranks, reserves; its threads are set by `OMP_NUM_THREADS`",
    )  # fmt: skip
    queued_tokens_per_replica: int = _cluster(
        8192, "prompt tokens that may wait for each replica before another is started", min=1
    )
    app_name: str = _cluster("quire", "of the application: deploying it again upgrades it", metavar="NAME")

    @property
    def bounds(self) -> tuple[int, int]:
        """The least and the most engine replicas."""
        match = re.fullmatch(r"(\d{1,4})(?:\.\.(\d{1,4}))?", self.replicas)
        if match is None or not 1 <= int(match[1]) <= int(match[2] or match[1]):
            raise ConfigError(f"replicas must be a number from 1 up, or two such as 1..8, got {self.replicas!r}")
        return int(match[1]), int(match[2] or match[1])


@with_config_file
@with_flag_groups
def deploy(engine: EngineOptions, server: ServerOptions, cluster: ClusterFlags) -> None:
    """Deploy a model on a Ray cluster: replicas that scale, are upgraded one by one, and replaced when they die."""
    least, most = cluster.bounds
    if engine.distributed_executor_backend == "ray":
        raise ConfigError(
            "distributed_executor_backend 'ray' is for one server: the ranks of a replica share its placement group"
        )
    if engine.data_parallel_size > 1:
        raise ConfigError(
            f"data_parallel_size {engine.data_parallel_size} is for one server; replicas sets the engines on a cluster"
        )
    with needs_library("quire deploy", "ray", "'quire[ray]'"):
        import ray  # noqa: PLC0415 (optional, and slow)

        from quire.cluster.deployment import DeployOptions  # noqa: PLC0415
        from quire.cluster.deployment import deploy as run  # noqa: PLC0415
    options = DeployOptions(
        least, most, cluster.ingress_replicas, cluster.cpus_per_engine,
        queued_tokens_per_replica=cluster.queued_tokens_per_replica, name=cluster.app_name,
    )  # fmt: skip
    ray.init(address=cluster.address)
    run(server.with_engine_settings(engine), server, options)
    print(f"Quire is deployed as {cluster.app_name} on port {server.port} of the cluster's nodes")  # noqa: T201
