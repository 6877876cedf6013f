"""Adapter store: adapters in memory, at most so many, the least recently used first to go.

Adapters are identified by the digest of their files. A request with an adapter that is not there waits while a thread
reads it. An adapter stays in memory while a request that has been admitted uses it, and while the requests of the last
step waited for it. A load starts only if there is room for the adapter, so that the number in memory and being read is
never above the limit. Loads and admissions that the limits hold up also hold up later requests with adapters: else
these could keep their adapters in use for ever.
"""

import logging
from collections import OrderedDict
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from quire.core.errors import ConfigError, EngineError, ModelError
from quire.core.lora import MAX_ADAPTERS, MAX_SHOWN_NAMES, Adapter, AdapterUse
from quire.core.sequence import Request
from quire.engine.adapters.peft_weights import CONFIG_FILE, WEIGHTS_FILE, LoadedAdapter, ModelTargets
from quire.engine.options import EngineOptions
from quire.execution.batch import AdapterRows
from quire.kernels.back_end import require
from quire.kernels.low_rank import AdapterWeights
from quire.model.decoder import Decoder
from quire.model.language_model import LanguageModel
from quire.model.sharding import Shard
from quire.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from quire.engine.parallel.rank_set import RankSet
    from quire.kernels.triton.triton_low_rank import TritonSlots

log = logging.getLogger(__name__)

Signature = tuple[tuple[int, ...], ...]
WHOLE = Shard(0, 1)


def make_store(
    options: EngineOptions, model: LanguageModel, shard: Shard = WHOLE, ranks: "RankSet | None" = None
) -> "AdapterStore":
    """Return the store of a model, or of rank 0. ConfigError names a model or a device that serves no adapters."""
    require(model.back_end.name, ["adapters"])
    if not isinstance(model, Decoder):
        raise ConfigError(f"enable_lora needs a model of Quire's own families, got a {type(model).__name__}")
    limits = options.resolved_max_loras, options.resolved_max_cpu_loras
    return AdapterStore(_reader(options, model, shard), *limits, ranks)


def make_slots(options: EngineOptions, model: LanguageModel, shard: Shard = WHOLE) -> "TritonSlots | None":
    """Return memory for `max_loras` adapters on the model's device; None if it computes them where they are loaded.

    `shard`: of the model, which is a rank's part. ConfigError if the device has less.
    """
    if model.back_end.adapter_slots is None or not isinstance(model, Decoder):
        return None
    sizes = ModelTargets(model.spec, model.back_end, model.dtype, shard, model.summed_inputs).factor_sizes()
    num_slots, rank = options.resolved_max_loras, options.max_lora_rank
    try:
        return model.back_end.adapter_slots(sizes, num_slots, rank, model.dtype, model.device)
    except RuntimeError as error:
        from torch import OutOfMemoryError  # noqa: PLC0415 (slots are PyTorch's: a CPU has none, and does not load it)

        if not isinstance(error, OutOfMemoryError):
            raise
        limits = f"max_loras {num_slots} and max_lora_rank {rank}"
        raise ConfigError(f"{limits} need more memory than {model.device} has left; lower one of them") from error


def rank_adapters(options: EngineOptions, model: Decoder, shard: Shard) -> "tuple[RankAdapters, AdapterRows]":
    """Return the adapters of a rank other than 0, and those of its rows. Rank 0 has refused where there are none."""
    adapters = RankAdapters(_reader(options, model, shard))
    return adapters, AdapterRows(adapters.weights, make_slots(options, model, shard))


def _reader(options: EngineOptions, model: Decoder, shard: Shard) -> Callable[[Path], LoadedAdapter]:
    targets = ModelTargets(model.spec, model.back_end, model.dtype, shard, model.summed_inputs)
    return lambda folder: targets.read(folder, options.max_lora_rank)


class AdapterStore:
    """Adapters of one engine. `read` may be called by any thread, all other methods by the one that runs steps."""

    def __init__(
        self,
        read: Callable[[Path], LoadedAdapter],
        max_running: int,
        max_in_memory: int,
        ranks: "RankSet | None" = None,
    ) -> None:
        self._ranks = ranks    # the others have copies of the adapters here; None: there is one rank
        self._read, self._max_running, self._max_in_memory = read, max_running, max_in_memory
        self._lock = Lock()
        self._pool = ThreadPoolExecutor(1, "adapters")
        self._in_memory = OrderedDict[str, AdapterWeights]()  # the least recently used first
        self._loading = dict[str, Future[None]]()
        self._known = dict[str, tuple[Signature, Adapter]]()  # keyed by folder; used by the store's thread alone
        self._failed = set[str]()                   # digests of loads since the last step
        self._step = 0
        self._wanted = dict[str, int]()             # the last step that had a waiting request of each in memory
        self._is_held = False                       # this step: a limit holds up a request
        self._running: set[str] | None = None       # adapters of admitted requests, once this step has asked
        self._scheduler: Scheduler | None = None

    def watch(self, scheduler: Scheduler) -> None:
        """Set the scheduler: its admitted requests keep their adapters."""
        self._scheduler = scheduler

    # --- loading ----------------------------------------------------------------------------------------------------

    def read(self, folder: str) -> Future[Adapter]:
        """Read a folder in the store's thread and keep it if there is room. The future's error is a ModelError."""
        return self._pool.submit(self._read_new, folder)

    def _read_new(self, folder: str) -> Adapter:
        signature = _signature(Path(folder))
        if signature is not None and (known := self._known.get(folder)) is not None and known[0] == signature:
            return known[1]
        loaded = self._read(Path(folder))
        adapter = Adapter(loaded.digest, folder)
        is_on_all = False
        try:
            self._wait_for_copies(adapter)
            is_on_all = True
        finally:
            with self._lock:
                has_room = len(self._in_memory) + len(self._loading) < self._max_in_memory
                if is_on_all and has_room:
                    self._in_memory.setdefault(loaded.digest, loaded.weights)
                elif loaded.digest not in self._in_memory and loaded.digest not in self._loading:
                    self._drop_copies(loaded.digest)
        if signature is not None:
            self._known[folder] = signature, adapter
            while len(self._known) > MAX_ADAPTERS:
                del self._known[next(iter(self._known))]
        return adapter

    def _wait_for_copies(self, adapter: Adapter) -> None:
        """Let the other ranks read an adapter. Raises ModelError with the reason of the first that cannot."""
        copies = [] if self._ranks is None else self._ranks.load(adapter)
        wait(copies)
        for each in copies:
            each.result()

    def _load(self, adapter: Adapter) -> None:
        weights: AdapterWeights | None = None
        try:
            loaded = _read_unchanged(self._read, adapter)
            self._wait_for_copies(adapter)
            weights = loaded
        except EngineError as error:
            log.warning("an adapter cannot be loaded: %s", error)
        except Exception:
            log.exception("an adapter cannot be loaded")
        with self._lock:
            del self._loading[adapter.digest]
            if weights is None:
                self._failed.add(adapter.digest)
                self._drop_copies(adapter.digest)
            else:
                self._in_memory[adapter.digest] = weights

    def wait(self, timeout_s: float) -> None:
        """Wait until an adapter has been loaded, at most this long. No request runs."""
        with self._lock:
            loading = list(self._loading.values())
        wait(loading, timeout_s, FIRST_COMPLETED)

    # --- steps ------------------------------------------------------------------------------------------------------

    def start_step(self) -> list[int]:
        """Begin a step; return the requests with adapters that could not be loaded: they must be ended."""
        self._step += 1
        self._is_held, self._running = False, None
        if not self._failed:
            return []
        with self._lock:
            failed, self._failed = self._failed, set()
        assert self._scheduler is not None
        return [each.request_id for each in self._scheduler.queues.requests.values() if each.scope.adapter in failed]

    @property
    def is_held(self) -> bool:
        """True if a limit holds up all further requests with adapters in this step."""
        return self._is_held

    def is_ready(self, request: Request) -> bool:
        """Return whether a waiting request may be admitted; else its adapter is read as soon as there is room."""
        digest = request.scope.adapter
        if digest is None:
            return True
        if self._is_held:
            return False
        with self._lock:
            is_loaded = digest in self._in_memory
            if is_loaded:
                self._in_memory.move_to_end(digest)
                self._wanted[digest] = self._step
            elif not (digest in self._loading or digest in self._failed) and not self._start_load(
                Adapter(digest, request.adapter_folder)
            ):
                self._is_held = True
        if not is_loaded:
            return False
        running = self._adapters_of_running()
        if digest not in running and len(running) >= self._max_running:
            self._is_held = True
            return False
        running.add(digest)
        return True

    def _start_load(self, adapter: Adapter) -> bool:
        """Start to load an adapter, evicting another one if there must be; return False if there is no room."""
        if len(self._in_memory) + len(self._loading) >= self._max_in_memory:
            victim = self._victim()
            if victim is None:
                return False
            del self._in_memory[victim]
            self._wanted.pop(victim, None)
            self._drop_copies(victim)
        self._loading[adapter.digest] = self._pool.submit(self._load, adapter)
        return True

    def _drop_copies(self, digest: str) -> None:
        if self._ranks is not None:
            self._ranks.drop(digest)

    def _victim(self) -> str | None:
        """Return the least recently used adapter that nothing needs."""
        assert self._scheduler is not None
        scheduler = self._scheduler
        kept = {each.scope.adapter for each in (*scheduler.queues.running, *scheduler.queues.swapped)}
        kept |= {each.scope.adapter for each in scheduler.queues.lines.preempted}
        kept |= {digest for digest, step in self._wanted.items() if step >= self._step - 1}
        return next((digest for digest in self._in_memory if digest not in kept), None)

    def _adapters_of_running(self) -> set[str]:
        """Return the adapters of admitted requests, with those that this step may admit."""
        if self._running is None:
            assert self._scheduler is not None
            running: Iterable[Request] = (*self._scheduler.queues.running, *self._scheduler.queues.swapped)
            self._running = {each.scope.adapter for each in running if each.scope.adapter is not None}
        return self._running

    def weights(self, digest: str) -> AdapterWeights:
        """Return an adapter that a row uses."""
        with self._lock:
            return self._in_memory[digest]

    def use(self) -> AdapterUse:
        """Return the adapters of running requests, and those of all others."""
        assert self._scheduler is not None
        running = {each.request_id for each in self._scheduler.queues.running}
        found: dict[bool, dict[str, str]] = {True: {}, False: {}}  # is it running: names by digests
        for each in self._scheduler.queues.requests.values():
            if each.scope.adapter is not None:
                found[each.request_id in running].setdefault(each.scope.adapter, each.adapter_name)
        names = {is_running: tuple(sorted(found[is_running].values())[:MAX_SHOWN_NAMES]) for is_running in found}
        return AdapterUse(self._max_running, len(found[True]), len(found[False]), names[True], names[False])

    @property
    def num_in_memory(self) -> int:
        return len(self._in_memory)

    @property
    def num_bytes(self) -> int:
        """Bytes of the adapters in memory."""
        with self._lock:
            return sum(each.num_bytes for each in self._in_memory.values())


def _signature(folder: Path) -> Signature | None:
    """Return what changes when the files of a folder do; None if they cannot be looked at."""
    try:
        stats = [(folder / name).stat() for name in (CONFIG_FILE, WEIGHTS_FILE)]
    except (OSError, ValueError):
        return None
    return tuple((each.st_ino, each.st_size, each.st_mtime_ns, each.st_ctime_ns) for each in stats)


def _read_unchanged(read: Callable[[Path], LoadedAdapter], adapter: Adapter) -> AdapterWeights:
    loaded = read(Path(adapter.folder))
    if loaded.digest != adapter.digest:
        raise ModelError(f"{adapter.folder}: the files differ from those that were read first")
    return loaded.weights


class RankAdapters:
    """Adapters of a rank of tensor parallelism: those that rank 0 names, of each the rank's part."""

    def __init__(self, read: Callable[[Path], LoadedAdapter]) -> None:
        self._read = read
        self._pool = ThreadPoolExecutor(1, "adapters")
        self._adapters = dict[str, Future[AdapterWeights]]()

    def load(self, adapter: Adapter) -> Future[AdapterWeights]:
        """Begin to read an adapter, unless it has begun."""
        if adapter.digest not in self._adapters:
            self._adapters[adapter.digest] = self._pool.submit(_read_unchanged, self._read, adapter)
        return self._adapters[adapter.digest]

    def drop(self, digest: str) -> None:
        """Forget an adapter, if there is one. No row of the next step uses it."""
        self._adapters.pop(digest, None)

    def weights(self, digest: str) -> AdapterWeights:
        """Return an adapter that a row uses, once it is read. EngineError if it cannot be."""
        return self._adapters[digest].result()
