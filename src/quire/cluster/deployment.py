"""Deployment of a model on a Ray cluster with Ray Serve.

Ingress replicas tokenize, hold the bounds on clients and speak all APIs; engine replicas compute. The number of engine
replicas follows the prompt tokens that wait in them. Deploying again with other settings replaces replicas one by one.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec
from ray import serve
from ray.serve.config import AutoscalingConfig, AutoscalingContext, AutoscalingPolicy, HTTPOptions, RequestRouterConfig

from quire.cluster.engine_replica import QUEUED_TOKENS, EngineReplica
from quire.cluster.ray_client import RayClient
from quire.cluster.routing import PrefixRouter
from quire.core.errors import ConfigError
from quire.core.owner_labels import OwnerLabels
from quire.engine.formats import TokenizerUse, load_tokenizer
from quire.engine.messages import Ready
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire.model.resolve import resolve_model, resolve_tokenizer
from quire.server.app import create_app
from quire.server.options import ServerOptions
from quire.server.service import Service
from quire.server.templates.template_renderer import TemplateRenderer

ENGINES = "engines"                 # name of the deployment of engine replicas
DEMO_NAME = "quire-demo"


@dataclass(frozen=True, slots=True)
class DeployOptions:
    """Options of a deployment. `cpus_per_engine`: for each of its ranks."""

    min_replicas: int = 1
    max_replicas: int = 1
    num_ingress: int = 1
    cpus_per_engine: float = 1.0
    cpus_per_ingress: float = 1.0
    queued_tokens_per_replica: int = 8192
    upscale_delay_s: float = 10.0
    downscale_delay_s: float = 120.0
    metrics_interval_s: float = 2.0     # between reports of the tokens that wait; two of them count
    name: str = "quire"
    route_prefix: str = "/"

    def __post_init__(self) -> None:
        if not 1 <= self.min_replicas <= self.max_replicas:
            bounds = f"{self.min_replicas}..{self.max_replicas}"
            raise ConfigError(f"replicas must be from 1 up, the least first, got {bounds}")
        if self.num_ingress < 1 or self.queued_tokens_per_replica < 1:
            raise ConfigError("num_ingress and queued_tokens_per_replica must be at least 1")


def replicas_for_queued_tokens(context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
    """Return the number of engine replicas: one for each `queued_tokens_per_replica` that wait, within the bounds."""
    waiting = (context.aggregated_metrics or {}).get(QUEUED_TOKENS, {})
    assert context.config is not None, "an autoscaled deployment has a configuration"
    per_replica = context.config.target_ongoing_requests        # tokens here: see `engine_deployment`
    wanted = math.ceil(sum(waiting.values()) / per_replica)
    return max(context.capacity_adjusted_min_replicas, min(wanted, context.capacity_adjusted_max_replicas)), {}


def deploy(engine: EngineOptions, server: ServerOptions, options: DeployOptions) -> None:
    """Deploy on the Ray cluster that this process is connected to; returns when the application is ready.

    An application of the same name is upgraded: its replicas are replaced one by one while it serves.
    """
    serve.start(http_options=HTTPOptions(host=server.host, port=server.port))
    serve.run(application(engine, server, options), name=options.name, route_prefix=options.route_prefix)


def application(engine: EngineOptions, server: ServerOptions, options: DeployOptions) -> serve.Application:
    """Return the application, to be run by `ray.serve.run` or in a file of `serve deploy`."""
    if server.enable_debug:
        raise ConfigError("enable_debug is not supported on Ray: each replica has a block map of its own")

    if engine.enable_lora:
        raise ConfigError("enable_lora is not supported yet on Ray")
    if engine.kv_events is not None:
        raise ConfigError("kv_events_config is not supported on Ray: replicas of one machine would share its ports")
    if engine.kv_role != "none":
        raise ConfigError("kv_role is not supported on Ray: replicas of one machine would share its port")
    server = replace(server, max_pinned_prefixes=0)     # a pin would be of one replica alone

    def build() -> LazyApp:
        return LazyApp(lambda: connect(engine, server, options))

    @serve.ingress(build)
    class Ingress:
        def __init__(self, engines: object) -> None:
            pass        # bound so that the engines are deployed first; the app finds their handle by name

    ingress = serve.deployment(
        name="ingress", num_replicas=options.num_ingress, max_ongoing_requests=server.max_connections,
        ray_actor_options={"num_cpus": options.cpus_per_ingress},
    )(Ingress)  # fmt: skip
    return ingress.bind(engine_deployment(engine, server, options))


def engine_deployment(engine: EngineOptions, server: ServerOptions, options: DeployOptions) -> serve.Application:
    """Return the deployment of engine replicas, each in a placement group of its own on one machine."""
    num_ranks = engine.tensor_parallel_size
    actor: dict[str, Any] = {"num_cpus": options.cpus_per_engine}
    if num_ranks > 1:   # Ray sets the threads to the CPUs of one bundle; the engine divides them among its ranks
        threads = max(1, int(options.cpus_per_engine)) * num_ranks
        actor["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
    scaling: dict[str, Any] = {"num_replicas": options.min_replicas}
    if options.max_replicas > options.min_replicas:
        config = AutoscalingConfig(
            min_replicas=options.min_replicas, max_replicas=options.max_replicas,
            target_ongoing_requests=options.queued_tokens_per_replica, upscale_delay_s=options.upscale_delay_s,
            downscale_delay_s=options.downscale_delay_s, metrics_interval_s=options.metrics_interval_s,
            look_back_period_s=2 * options.metrics_interval_s,
            policy=AutoscalingPolicy(policy_function=replicas_for_queued_tokens),  # type: ignore[no-untyped-call]
        )  # fmt: skip
        scaling = {"autoscaling_config": config}
    return serve.deployment(
        name=ENGINES, max_ongoing_requests=server.max_queued_requests + engine.resolved_max_num_seqs,
        request_router_config=RequestRouterConfig(request_router_class=PrefixRouter),  # type: ignore[arg-type]
        placement_group_bundles=[{"CPU": options.cpus_per_engine}] * num_ranks, placement_group_strategy="STRICT_PACK",
        ray_actor_options=actor, graceful_shutdown_timeout_s=server.shutdown_timeout, health_check_period_s=2,
        **scaling,
    )(EngineReplica).bind(engine, server.start_timeout)  # fmt: skip


async def connect(engine: EngineOptions, server: ServerOptions, options: DeployOptions) -> Any:  # noqa: ANN401 (ASGI)
    """Return the server's application over the engine replicas, once one of them is ready."""
    handle = serve.get_deployment_handle(ENGINES, options.name)
    ready = msgspec.msgpack.decode(await handle.ready.remote(), type=Ready)
    folder = await asyncio.to_thread(resolve_model, engine.model, engine.model_files, engine.revision)
    use: TokenizerUse = "skipped" if engine.skip_tokenizer_init else "required"
    text_source = resolve_tokenizer(engine.tokenizer, folder, engine.tokenizer_revision)
    tokenizer = await asyncio.to_thread(load_tokenizer, Path(text_source), use)
    names = server.served_model_name or (engine.model or DEMO_NAME,)
    metrics = Metrics(names[0], options=engine)
    metrics.engines[0].engine_ready(ready)
    owners = OwnerLabels(server.max_metric_labels)
    client = RayClient(handle, ready, tokenizer, engine, owners, metrics.engines[0], options.max_replicas)
    templates = TemplateRenderer(tokenizer, max_waiting=server.max_queued_requests)
    return create_app(Service(client, server, names, metrics, templates, model_source=engine.model))


class LazyApp:
    """An ASGI application that is made at its start, on the event loop that serves it."""

    def __init__(self, make: Callable[[], Awaitable[Any]]) -> None:
        self._make = make
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:  # noqa: ANN401 (ASGI)
        """Serve a scope; that of the lifespan makes the application."""
        if scope["type"] != "lifespan":
            await self._app(scope, receive, send)
            return
        while True:
            message = await receive()
            if message["type"] == "lifespan.startup":
                self._app = await self._make()
                await send({"type": "lifespan.startup.complete"})
            else:
                await send({"type": "lifespan.shutdown.complete"})
                return
