"""Client of engine replicas on Ray Serve: what a server asks of its engines, over a deployment's handle."""

import asyncio
import itertools
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from ray.serve.handle import DeploymentHandle

from quire.cluster.routing import EngineCall, ReplicaTable
from quire.core.block_map import BlockMap, Tier
from quire.core.errors import ConfigError, EngineError, InvalidRequestError, ModelError, RequestFailedError
from quire.core.lora import Adapter
from quire.core.owner_labels import OwnerLabels
from quire.core.sequence import Request
from quire.engine.messages import (
    EngineDeadError,
    EngineState,
    Profile,
    Ready,
    RequestRefused,
    SessionBlocks,
    Stepped,
    Tag,
)
from quire.engine.metrics.engine_metrics import EngineMetrics
from quire.engine.options import EngineOptions
from quire.engine.processes.base_client import SingleEngine
from quire.engine.processes.streams import RequestStream, RequestStreams
from quire.engine.requests.input_processor import InputProcessor, PreparedRequest
from quire.engine.requests.output_processor import FinishedRequest, OutputKind, ProcessedStep
from quire.text.tokenizer import Tokenizer

_decode = msgspec.msgpack.Decoder(Stepped | RequestRefused).decode


class RayClient(SingleEngine):
    """The engine replicas of an application, as one engine. Requests of texts only: pins and block maps are refused."""

    def __init__(
        self, handle: DeploymentHandle[Any], ready: Ready, tokenizer: Tokenizer | None, options: EngineOptions,
        owners: OwnerLabels, observer: EngineMetrics, max_replicas: int,
    ) -> None:  # fmt: skip
        # An ingress would number images from 0 on, as others do, and mix them up in the replica that they share.
        ready = structs.replace(ready, images=None, no_images_reason="they are not served on Ray")
        inputs = InputProcessor(tokenizer, ready, options, owners)
        super().__init__(tokenizer, ready, inputs, itertools.count(secrets.randbits(48)))  # seeds derive from numbers
        self.state = EngineState(0, 0, 0)
        self._generate = handle.options(stream=True).generate
        self._observer = observer
        limits = ready.limits
        self._table = ReplicaTable(limits.num_blocks, limits.block_size, limits.max_num_seqs, max_replicas)
        self._streams = RequestStreams(tokenizer, self._on_abort, self._on_close, itl_target_s=options.itl_target_s)
        self._followers: dict[int, asyncio.Task[None]] = {}

    async def add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind = "final"
    ) -> RequestStream:
        """Send a request to a replica."""
        stream = self._streams.open(prepared, external_id=external_id, arrival_s=arrival_s, kind=kind)
        request_id = prepared.request.request_id
        call = EngineCall(prepared.request, self._table)
        self._followers[request_id] = asyncio.create_task(self._follow(request_id, call))
        return stream

    async def _follow(self, request_id: int, call: EngineCall) -> None:
        """Give the reports of a request to its stream until it has ended."""
        response: Any = self._generate.remote(call)
        try:
            async for raw in response:
                report = _decode(raw)
                if isinstance(report, RequestRefused):
                    refusal = InvalidRequestError(report.message, param=report.param, code=report.code)
                    self._streams.fail(request_id, refusal)
                else:
                    self._handle_step(request_id, report)
            self._streams.fail(request_id, EngineDeadError("the engine replica sent no end"))   # after the end, if any
        except asyncio.CancelledError:
            response.cancel()
            raise
        except Exception as error:  # whatever ends a replica's call: the request is lost
            lost = EngineDeadError(f"the engine replica of the request has failed: {_reason(error)}")
            self._streams.fail(request_id, lost)
        finally:
            self._table.forget(request_id)

    def _handle_step(self, request_id: int, step: Stepped) -> None:
        self._table.record_step(request_id, step)
        step = structs.replace(step, started_s=time.monotonic())    # another machine has another clock
        self.state, whole = step.state, ProcessedStep()
        for processed in self._streams.process(step):
            for failed, error in processed.failed:
                shown = RequestFailedError(f"the request's output could not be made: {error}")
                self._streams.fail(failed, error if isinstance(error, EngineError) else shown)
            self._streams.wake(processed.ready)
            whole.add(processed)
        self._observer.on_step(step, whole)

    def _on_abort(self, request_id: int, finished: FinishedRequest) -> None:
        self._observer.on_abort(finished)

    def _on_close(self, request_id: int) -> None:
        """Cancel the call of a request after the end of its stream, if the engine still computes."""
        if (follower := self._followers.pop(request_id, None)) is not None:
            follower.cancel()

    @property
    def num_free_seqs(self) -> int:
        """Requests of one sequence that one replica could run at once, if none waits."""
        return 0 if self.num_queued else self.ready.limits.max_num_seqs

    def unpin(self, request_id: int) -> None:
        """Do nothing: nothing is pinned."""

    async def release_pin(self, request_id: int) -> None:
        """Do nothing: nothing is pinned."""

    async def save_session(self, request_id: int, folder: Path) -> SessionBlocks:
        """Save nothing: nothing is pinned."""
        return SessionBlocks(code="gone", message="replicas pin nothing")

    async def open_session(self, request: Request, folder: Path, num_blocks: int, identity: str) -> SessionBlocks:
        """Load nothing: replicas have no disk of their own."""
        return SessionBlocks(code="unusable", message="replicas keep nothing on a disk")

    def close_session(self, request: Request) -> None:
        """Do nothing: nothing is loaded."""

    async def read_adapter(self, folder: str) -> Adapter:
        """Raise ModelError: replicas read no adapters yet."""
        raise ModelError(f"{folder}: adapters are not supported yet on Ray")

    async def block_map(self, first: int, count: int, timeout_s: float, tier: Tier = "kv") -> BlockMap:
        """Raise EngineDeadError: replicas have a map each."""
        raise EngineDeadError("block maps of replicas on Ray are not served")

    async def start_profile(self) -> bool:
        """Raise EngineDeadError: replicas are engines each."""
        raise EngineDeadError("profiles of replicas on Ray are not served")

    async def stop_profile(self) -> Profile | None:
        """Return None: there is no profile."""
        return None

    def log_stacks(self) -> None:
        """Do nothing: Ray shows the stacks of its actors."""

    @property
    def is_alive(self) -> bool:
        """True if an engine answers: Ray Serve replaces replicas that die."""
        return True

    @property
    def death_reason(self) -> str:
        """Empty: Ray Serve replaces replicas that die."""
        return ""

    @property
    def stalled_s(self) -> float:
        """0: Ray Serve checks the health of replicas."""
        return 0.0

    async def _sleep(self, level: int) -> None:
        raise ConfigError("replicas on Ray do not sleep; Ray Serve starts and ends them by their load")

    async def _wake_up(self, tags: tuple[Tag, ...]) -> None:
        """Do nothing: no replica sleeps."""

    async def wait_dead(self) -> EngineDeadError:
        """Wait forever."""
        await asyncio.get_running_loop().create_future()
        raise AssertionError("the future has no result")

    async def close(self) -> None:
        for follower in list(self._followers.values()):
            follower.cancel()


def _reason(error: Exception) -> str:
    """Return the last line of an error: Ray puts whole tracebacks of the replica before it."""
    return (str(error).strip().splitlines() or [type(error).__name__])[-1][:500]
