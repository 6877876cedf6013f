"""Engines that an `LLM` computes with: the interface, and the engine in its own process; `fleet` has several."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from quire.core.errors import EngineAsleepError, InvalidRequestError, ModelError
from quire.core.lora import Adapter
from quire.core.outputs import KVStats, RequestOutput
from quire.core.sequence import Request
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.assembly import AssembledEngine, assemble
from quire.engine.engine import NO_ADAPTERS, Engine
from quire.engine.kv_sessions import KVSessions, OnEnd
from quire.engine.messages import EngineState, Ready, SessionBlocks, Stepped, Tag
from quire.engine.metrics.engine_metrics import EngineMetrics
from quire.engine.options import EngineOptions
from quire.engine.requests.input_processor import InputProcessor, PreparedRequest
from quire.engine.requests.output_processor import OutputKind, OutputProcessor
from quire.engine.requests.pinned_prefixes import PinnedPrefixes
from quire.engine.sleeping import SleepingEngine
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")
OPEN_REQUESTS = "requests are open, such as those of `stream`: end them before the sleep"


class OfflineEngine(ABC):
    """Computes the requests that an `LLM` has prepared and numbered, while the caller waits. Not for several threads.

    After `close` every method raises RuntimeError.
    """

    tokenizer: Tokenizer | None
    ready: Ready
    pinned: PinnedPrefixes

    @property
    @abstractmethod
    def inputs(self) -> InputProcessor:
        """The input processor, with the current limits."""

    @abstractmethod
    def run(self, requests: Sequence[PreparedRequest], kind: OutputKind) -> Iterator[RequestOutput]:
        """Queue requests at the first `next`; yield their outputs until all have ended. On exit they have ended."""

    @abstractmethod
    def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError for a grammar that cannot be compiled."""

    @abstractmethod
    def read_adapter(self, folder: str) -> Adapter:
        """Read the LoRA adapter of a folder. ModelError with the reason if it cannot be used."""

    @abstractmethod
    def unpin(self, request_id: int) -> None:
        """Release what a request has pinned; its blocks are free on return."""

    @abstractmethod
    def save_session(self, request_id: int, folder: Path) -> SessionBlocks:
        """Copy what a request has pinned into the store of a session."""

    @abstractmethod
    def open_session(self, request: Request, folder: Path, num_blocks: int, identity: str) -> SessionBlocks:
        """Let a request that is about to run load from a saved session, until `close_session`."""

    @abstractmethod
    def close_session(self, request: Request) -> None:
        """Let the request load no more from the saved session."""

    @abstractmethod
    def kv_stats(self) -> KVStats:
        """Return the state of the KV cache between two steps; of several engines the sum."""

    @abstractmethod
    def observe(self, read: Callable[[], T]) -> T:
        """Return what `read` makes of the engines' observers, which have their current state."""

    @property
    @abstractmethod
    def sleeping(self) -> frozenset[Tag]:
        """The memory that was freed; with any no request is computed."""

    @abstractmethod
    def sleep(self, level: int) -> None:
        """Free the KV cache, and at level 2 the weights as well. InvalidRequestError while requests are open."""

    @abstractmethod
    def wake_up(self, tags: Collection[Tag]) -> None:
        """Load the weights, or make the KV cache, or both. Errors as in `SleepingEngine.wake`."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory, and end all requests. Idempotent."""


_MOVE_PAUSE_S = 0.001   # between two looks at files, while the engine is idle
_NO_STATE = EngineState(0, 0, 0)  # steps report none: `observe` looks at the engine itself


class LocalEngine(OfflineEngine):
    """An engine that steps while the outputs of its requests are iterated over.

    ConfigError and ModelError as `assemble`.
    """

    def __init__(self, options: EngineOptions, observer: EngineMetrics) -> None:
        self._assembled: AssembledEngine | None = assemble(options, loads_tokenizer=True)
        self._sleeping: SleepingEngine | None = None
        self.tokenizer, self.ready = self._assembled.tokenizer, self._assembled.ready
        self.pinned = PinnedPrefixes(self.ready.limits.block_size)
        self.outputs = OutputProcessor(self.tokenizer, itl_target_s=options.itl_target_s)
        self.unread: dict[int, RequestOutput | Exception] = {}  # outputs that no iterator has yielded yet
        self._observer = observer
        observer.engine_ready(self.ready)

    @property
    def assembled(self) -> AssembledEngine:
        """The engine. EngineAsleepError while it sleeps, RuntimeError if it is closed."""
        if self._sleeping is not None:
            raise EngineAsleepError
        if self._assembled is None:
            raise RuntimeError("this LLM is closed")
        return self._assembled

    @property
    def inputs(self) -> InputProcessor:
        """The input processor, with the current limits."""
        assembled = self.assembled
        assembled.inputs.limits = assembled.engine.scheduler.limits
        return assembled.inputs

    def run(self, requests: Sequence[PreparedRequest], kind: OutputKind) -> Iterator[RequestOutput]:
        """Queue the requests, step until they have ended, yield their outputs. On exit all of them have ended."""
        left = {prepared.request.request_id for prepared in requests}
        try:
            arrival_s = time.monotonic()
            for prepared in requests:
                self.assembled.engine.add(prepared.request)
                name = str(prepared.request.request_id)
                self.outputs.add(prepared, external_id=name, arrival_s=arrival_s, kind=kind)
            while left:
                engine = self.assembled.engine
                if not (engine.scheduler.has_requests or left & self.unread.keys()):
                    raise RuntimeError(f"a failed step of another call has ended request {min(left)}")
                self._step(engine)
                for request_id in [own for own in self.unread if own in left]:
                    new = self.unread.pop(request_id)
                    if isinstance(new, Exception):
                        raise new
                    if new.finished:
                        left.discard(request_id)
                    yield new
        finally:
            if self._assembled is not None:
                self._abort(left)

    def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError for a grammar that cannot be compiled."""
        grammars = self.assembled.engine.grammars
        if grammars is not None:
            grammars.check(params)

    def read_adapter(self, folder: str) -> Adapter:
        """Read the LoRA adapter of a folder. ModelError with the reason if it cannot be used."""
        adapters = self.assembled.engine.adapters
        if adapters is None:
            raise ModelError(NO_ADAPTERS)
        return adapters.read(folder).result()

    def unpin(self, request_id: int) -> None:
        """Release what a request has pinned."""
        self._abort({request_id})

    def save_session(self, request_id: int, folder: Path) -> SessionBlocks:
        """Copy what a request has pinned into the store of a session."""
        return self._move_session(lambda sessions, on_end: sessions.save(request_id, folder, on_end))

    def open_session(self, request: Request, folder: Path, num_blocks: int, identity: str) -> SessionBlocks:
        """Let a request that is about to run load from a saved session, until `close_session`."""
        asked = request.request_id, folder, num_blocks, identity
        return self._move_session(lambda sessions, on_end: sessions.open(*asked, on_end))

    def close_session(self, request: Request) -> None:
        """Let the request load no more from the saved session."""
        if self._assembled is not None:
            self._sessions.close_session(request.request_id)

    @property
    def _sessions(self) -> KVSessions:
        disk = self.assembled.engine.disk
        assert disk is not None and disk.sessions is not None  # noqa: PT018 (an LLM without kv_disk_dir saves none)
        return disk.sessions

    def _move_session(self, begin: Callable[[KVSessions, OnEnd], None]) -> SessionBlocks:
        """Begin to save or to open a session, and step, or move blocks, until it has ended."""
        ended = list[SessionBlocks]()
        begin(self._sessions, ended.append)
        engine = self.assembled.engine
        while not ended:
            if engine.scheduler.has_requests:
                self._step(engine)
            elif engine.disk is not None:
                engine.disk.step()
                time.sleep(0 if ended else _MOVE_PAUSE_S)
        return ended[0]

    def kv_stats(self) -> KVStats:
        """Return the state of the KV cache between two steps."""
        return self.assembled.engine.kv_stats()

    def observe(self, read: Callable[[], T]) -> T:
        """Return what `read` makes of the engine's observer, which has its current state."""
        if self._sleeping is None:
            engine = self.assembled.engine
            self._observer.on_idle(engine.state(engine.kv_stats()))
        return read()

    @property
    def sleeping(self) -> frozenset[Tag]:
        """The memory that was freed."""
        return frozenset() if self._sleeping is None else self._sleeping.tags

    def sleep(self, level: int) -> None:
        """Free the KV cache, and at level 2 the weights as well."""
        if self._sleeping is not None:
            self._sleeping.deepen(level)
        else:
            if self.assembled.engine.scheduler.has_requests:
                raise InvalidRequestError(OPEN_REQUESTS)
            self._sleeping = SleepingEngine(self.assembled, level, loads_tokenizer=True)
            self._assembled = None
            self._observer.fell_asleep(level)
            self.pinned.clear()
        self._sleeping.free()

    def wake_up(self, tags: Collection[Tag]) -> None:
        """Load the weights, or make the KV cache, or both."""
        if self._sleeping is not None and (woken := self._sleeping.wake(tags)) is not None:
            self._assembled, self._sleeping = woken, None
            self._observer.woke_up()

    def close(self) -> None:
        """Free the weights and the KV cache, and end all requests. Idempotent."""
        self._sleeping = None
        if self._assembled is not None:
            device = self._assembled.loaded.device
            self._assembled.close()
            self._assembled = None
            device.release()

    def _step(self, engine: Engine) -> None:
        """Run one step of the engine, and store the new output of every request in it."""
        started_s = time.monotonic()
        deltas = engine.step()
        try:
            admissions, block_lives = engine.admissions, engine.take_block_lives()
            self.outputs.record_scheduled(engine.scheduler.step.preempted, admissions, started_s)
            now_s = time.monotonic()
            if chunks := engine.prompts_left.chunks:
                self.outputs.record_chunks(chunks, now_s)
            processed = self.outputs.process(deltas, now_s)
            step = Stepped(
                started_s, engine.num_computed_tokens, admissions, deltas, _NO_STATE, timing=engine.timing,
                block_lives=block_lives,
            )
            self._observer.on_step(step, processed)
            self.unread |= {request_id: self.outputs.output(request_id) for request_id in processed.ready}
        except BaseException:
            self._abort({delta.request_id for delta in deltas})  # their new tokens are lost
            raise
        for request_id, index in processed.stopped:
            engine.finish(request_id, index)
        for request_id, error in processed.failed:
            engine.abort(request_id)
            self.unread[request_id] = error

    def _abort(self, request_ids: set[int]) -> None:
        """Abort these requests: the iterator was closed early, or a step failed."""
        for request_id in request_ids:
            self.unread.pop(request_id, None)
            self.assembled.engine.abort(request_id)
            self.outputs.drop(request_id)
