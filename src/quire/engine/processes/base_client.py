"""Base of the clients of one engine and of several: numbering of requests, and pinned prefixes by their public ids."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

from quire.core.block_map import BlockMap, Tier
from quire.core.errors import EngineAsleepError, EngineError, InvalidRequestError
from quire.core.lora import Adapter
from quire.core.sequence import Request
from quire.engine.messages import TAGS, EngineDeadError, EngineState, Profile, Ready, SessionBlocks, Tag
from quire.engine.processes.forecast import Asked
from quire.engine.processes.streams import RequestStream, RequestStreams
from quire.engine.requests.input_processor import CheckedParams, InputProcessor, PreparedRequest, TokenizedPrompt
from quire.engine.requests.output_processor import OutputKind
from quire.engine.requests.pinned_prefixes import PinnedPrefixes
from quire.text.tokenizer import Tokenizer


class BaseClient(ABC):
    """Client of the server's engines. Lives on one event loop."""

    def __init__(
        self, tokenizer: Tokenizer | None, ready: Ready, inputs: InputProcessor, request_ids: Iterator[int]
    ) -> None:
        self.tokenizer, self.ready, self.inputs = tokenizer, ready, inputs
        self.pinned = PinnedPrefixes(ready.limits.block_size)
        self.request_ids = request_ids                    # numbers of requests to come
        self.sleeping: frozenset[Tag] = frozenset()       # memory that was freed; with any no request is computed
        self._sleep_lock = asyncio.Lock()

    @property
    @abstractmethod
    def engines(self) -> "Sequence[SingleEngine]":
        """The engines by number, dead ones too."""

    # --- requests -------------------------------------------------------------------------------------------------

    def prepare(
        self, prompt: TokenizedPrompt, checked: CheckedParams, client_id: str = "", weight: float = 1.0
    ) -> PreparedRequest:
        """Number a request of parameters from `inputs.check_params`. ContextLengthError if it could never run."""
        return self.inputs.prepare(next(self.request_ids), prompt, checked, client_id, weight)

    @abstractmethod
    async def add(
        self, prepared: PreparedRequest, *, external_id: str, arrival_s: float, kind: OutputKind = "final"
    ) -> RequestStream:
        """Queue a request, once. EngineDeadError if no engine is alive."""

    @property
    @abstractmethod
    def num_open(self) -> int:
        """Requests that were sent, and of which the last output was not read yet."""

    @property
    @abstractmethod
    def num_queued(self) -> int:
        """Requests that were sent and not yet admitted."""

    @property
    @abstractmethod
    def num_queued_tokens(self) -> int:
        """Prompt tokens x n of the requests that were sent and not yet admitted."""

    @property
    @abstractmethod
    def num_free_seqs(self) -> int:
        """Requests of one sequence that could run at once, by the last reports; 0 if requests wait or are swapped."""

    def first_token_s(self, asked: Asked, request: Request | None = None, within_s: float = math.inf) -> float:
        """Return the predicted seconds until what is asked has its first token; 0 where nothing is known.

        `request`: that of a single prompt, once it is tokenized: of several engines the one counts that it will get.
        `within_s`: the caller refuses what takes longer.
        """
        return 0.0

    @abstractmethod
    async def read_adapter(self, folder: str) -> Adapter:
        """Have an engine read the LoRA adapter of a folder. ModelError with the reason if it cannot be served."""

    # --- pinned prefixes ------------------------------------------------------------------------------------------

    def prepare_pin(self, prompt: TokenizedPrompt, client_id: str = "", weight: float = 1.0) -> PreparedRequest:
        """As `prepare`, for a request that pins its prompt. Once it has ended, `pinned.add` it, or `unpin` it."""
        return self.inputs.prepare_pin(next(self.pinned.request_ids), prompt, client_id, weight)

    @abstractmethod
    def unpin(self, request_id: int) -> None:
        """Release what a request has pinned, or abort it."""

    @abstractmethod
    async def release_pin(self, request_id: int) -> None:
        """Release what a request has pinned; its blocks are free on return. EngineDeadError if its engine has died."""

    async def unpin_prefix(self, prefix_id: str, key_number: int | None = 0) -> None:
        """Unpin a prefix of a key (None: any); its blocks are free on return. UnknownPrefixError if there is none."""
        self._check_serves()
        await self.release_pin(self.pinned.remove(prefix_id, key_number))

    def expire_prefix(self, prefix_id: str, ttl_s: float) -> None:
        """Unpin a prefix after some seconds, unless it has been unpinned by then."""

        def expire() -> None:
            self.unpin(self.pinned.remove(prefix_id, None))

        timer = asyncio.get_running_loop().call_later(ttl_s, expire)
        self.pinned.on_removal(prefix_id, timer.cancel)

    def renew_prefix(self, prefix_id: str, ttl_s: float) -> None:
        """Unpin a pinned prefix after `ttl_s` from now, or when it expires already, whichever is later."""
        if self.pinned.remaining_s(prefix_id) < ttl_s:
            self.pinned.renew(prefix_id, ttl_s)
            self.expire_prefix(prefix_id, ttl_s)

    # --- saved sessions: see quire.engine.kv_sessions ---------------------------------------------------------------

    @abstractmethod
    async def save_session(self, request_id: int, folder: Path) -> SessionBlocks:
        """Copy what a request has pinned into the store of a session. EngineDeadError if its engine has died."""

    @abstractmethod
    async def open_session(self, request: Request, folder: Path, num_blocks: int, identity: str) -> SessionBlocks:
        """Let a request that is about to be added load from a saved session, until `close_session`."""

    @abstractmethod
    def close_session(self, request: Request) -> None:
        """Let the request load no more from the saved session."""

    # --- health ---------------------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def is_alive(self) -> bool:
        """True if an engine answers."""

    @property
    @abstractmethod
    def death_reason(self) -> str:
        """Reason that no engine answers; for a client that is not alive."""

    @property
    @abstractmethod
    def stalled_s(self) -> float:
        """Seconds since an engine made progress, although all have work; 0 while one has none."""

    async def sleep(self, level: int) -> None:
        """Free the KV cache, and at level 2 the weights as well. No request may be open; pinned prefixes are lost.

        An engine that sleeps at level 1 may be asked for level 2. Errors as in `wake_up`.
        """
        async with self._sleep_lock:
            if not self.is_alive:
                raise EngineDeadError(self.death_reason)
            if self.num_open:
                raise InvalidRequestError(f"{self.num_open} requests are open; end them before the sleep")
            before, self.sleeping = self.sleeping, TAGS
            try:
                await self._sleep(level)
            except EngineError:
                self.sleeping = before
                raise
            self.pinned.clear()

    async def wake_up(self, tags: Collection[Tag] = TAGS) -> None:
        """Load the weights, or make the KV cache, or both; what does not sleep stays as it is.

        EngineDeadError if no engine is alive; ConfigError or ModelError if the memory, or the files, are not there any
        more: the engines sleep on, and may be asked again.
        """
        async with self._sleep_lock:
            if not self.is_alive:
                raise EngineDeadError(self.death_reason)
            named = tuple(sorted(self.sleeping.intersection(tags)))
            if named:
                await self._wake_up(named)
                self.sleeping -= frozenset(named)

    @abstractmethod
    async def _sleep(self, level: int) -> None: ...

    @abstractmethod
    async def _wake_up(self, tags: tuple[Tag, ...]) -> None: ...

    def _check_serves(self) -> None:
        """Raise EngineDeadError if no engine is alive, EngineAsleepError while they sleep."""
        if not self.is_alive:
            raise EngineDeadError(self.death_reason)
        if self.sleeping:
            raise EngineAsleepError

    @abstractmethod
    async def close(self) -> None:
        """End the engine processes, and with them all requests. Returns when they are gone. Idempotent."""


class SingleEngine(BaseClient):
    """Client of one engine."""

    state: EngineState
    _streams: RequestStreams

    @property
    def engines(self) -> "Sequence[SingleEngine]":
        return (self,)

    @property
    def num_open(self) -> int:
        """Requests that were sent, and of which the last output was not read yet."""
        return len(self._streams)

    @property
    def num_queued(self) -> int:
        """Requests that were sent and not yet admitted."""
        return len(self._streams.queued.requests)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens x n of the requests that were sent and not yet admitted."""
        return self._streams.queued.num_tokens

    @abstractmethod
    async def block_map(self, first: int, count: int, timeout_s: float, tier: Tier = "kv") -> BlockMap:
        """Return what blocks [first, first + count) of a tier are at the end of a step.

        The engine is asked for one map at a time, however many callers there are. Raises TimeoutError after
        `timeout_s`, EngineDeadError if the engine has died.
        """

    @abstractmethod
    async def start_profile(self) -> bool:
        """Start a profile; return False if one runs. EngineDeadError if the engine has died."""

    @abstractmethod
    async def stop_profile(self) -> Profile | None:
        """End the profile and return it; None if there is none. EngineDeadError if the engine has died."""

    @abstractmethod
    def log_stacks(self) -> None:
        """Make the engine write the stacks of its threads to its error stream, as soon as it can."""

    @abstractmethod
    async def wait_dead(self) -> EngineDeadError:
        """Wait until the engine has died or the client was closed; return why."""
