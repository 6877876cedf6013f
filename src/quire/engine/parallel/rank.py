"""A rank of tensor parallelism other than 0: loads its part of the model and runs the plans that rank 0 sends.

It has no scheduler, no sampler and no tokens of its own.
"""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn, TypeVar

import torch
from msgspec import structs

from quire.core.config import CacheConfig
from quire.core.errors import ConfigError, ModelError
from quire.core.lora import Adapter
from quire.core.plan import decode_plan
from quire.core.version import __version__
from quire.engine.loading import LoadedModel, load
from quire.engine.messages import failed
from quire.engine.options import EngineOptions
from quire.engine.parallel import messages
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.digest import model_digest
from quire.engine.parallel.link import END, FORWARD, LOGITS, Link, RankExchange
from quire.execution.adapter_rows import AdapterRows
from quire.execution.batch import PersistentBatch
from quire.execution.swapper import Swapper
from quire.kernels.cpp.back_end import usable_isas
from quire.kernels.cpp.gather import InterruptedExchangeError
from quire.kernels.low_rank import AdapterWeights
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.resolve import resolve_model
from quire.model.sharding import Shard

if TYPE_CHECKING:
    from quire.engine.adapters.store import RankAdapters

log = logging.getLogger(__name__)

MAX_REASON_CHARS = 2000

T = TypeVar("T")
CommandT = TypeVar("CommandT", messages.Load, messages.Measure, messages.Allocate, messages.Step, messages.Resume)


@dataclass(frozen=True, slots=True)
class RankWorker:
    """A rank's model, cache and rows; computes what rank 0 computes, with its part of the model."""

    model: Decoder
    cache: KVCache
    batch: PersistentBatch
    swapper: Swapper | None
    link: Link
    adapters: "RankAdapters | None" = None  # None: no row has one
    adapter_rows: AdapterRows | None = None

    @torch.inference_mode()
    def execute(self, plan_message: bytes) -> None:
        """Run a step: changes of rows, swaps, block copies, then what rank 0 asks for."""
        plan = decode_plan(plan_message)
        self.batch.apply(plan)
        batch = self.batch.inputs(plan).forward
        if self.adapter_rows is not None:
            batch = replace(batch, adapters=self.adapter_rows.of_step(plan))
        if self.swapper is not None:
            self.swapper.move(plan, batch.slot_mapping)
        if plan.copies:
            src, dst = torch.tensor(plan.copies).unbind(dim=1)
            self.model.back_end.copy_blocks(self.cache.tensors, self.cache.tensors, src, dst)
        while True:
            kind, count = self.link.receive()
            if kind == END:
                return
            if kind == FORWARD:
                tokens = self.link.rows(count, 1, torch.int64).flatten()
                self.model.forward(replace(batch, token_ids=tokens), self.cache)
            else:
                assert kind == LOGITS, f"command {kind}"
                self.model.head_sums(self.link.rows(count, self.model.spec.hidden_size, self.model.dtype))


def start(
    channel: Channel, load: Callable[[messages.Load], Callable[[], NoReturn]], own: EngineOptions | None = None
) -> Callable[[], NoReturn]:
    """Wait for what to load; return what `load` makes of it, which runs plans. Errors are reported and raised.

    `own`: the options of a rank's own command on another machine, where folders have other names. Raises EOFError if
    rank 0 has ended.
    """
    channel.send(messages.Hello(__version__, usable_isas(), own))
    load_command = expect(channel, messages.Load)
    channel.silence_limit_s = load_command.options.stall_limit
    try:
        if own is not None:
            folder = str(resolve_model(own.model, own.model_files, own.revision))
            options = replace(load_command.options, model=folder, swap_dir=own.swap_dir)
            load_command = structs.replace(load_command, options=options)
        return load(load_command)
    except (EOFError, OSError):
        raise
    except Exception as error:
        refusal = failed(error)
        channel.send(messages.Refused(refusal.kind, refusal.message))
        raise


def load_part(channel: Channel, command: messages.Load, ranks: RankExchange) -> LoadedModel:
    """Connect with the other ranks, load this one's part of the model, and report it."""
    if command.num_threads:
        torch.set_num_threads(command.num_threads)
    if model_digest(Path(command.options.model or "")) != command.digest:
        raise ConfigError(f"the model at {command.options.model} is another one than that of rank 0")
    ranks.reset()
    opened = ranks, command.num_positions
    loaded = load(command.options, Path(command.options.model or ""), lambda spec, num_positions: opened)
    channel.send(messages.Loaded(loaded.model.weight_bytes, loaded.device.free_bytes()))
    return loaded


def bring_up(channel: Channel, ranks: RankExchange, command: messages.Load) -> Callable[[], NoReturn]:
    """Load a part of the model, and allocate; return what runs plans until the end, which raises EOFError."""
    loaded = load_part(channel, command, ranks)
    worker = allocate(loaded, command, expect(channel, messages.Allocate), Link(ranks))
    adapters, rows = adapters_of(worker.model, command.options, ranks.shard)
    worker = replace(worker, adapters=adapters, adapter_rows=rows)
    channel.send(messages.Allocated())
    return partial(run, channel, ranks, worker)


def expect(channel: Channel, kind: type[CommandT], adapters: "RankAdapters | None" = None) -> CommandT:
    """Wait for a command of this kind, as `next_command`."""
    command = next_command(channel, adapters)
    assert isinstance(command, kind), f"expected {kind.__name__}, got {command}"
    return command


def next_command(channel: Channel, adapters: "RankAdapters | None") -> messages.Command:
    """Wait for a command; follow those about adapters that come before. EOFError if rank 0 has ended."""
    while True:
        command: messages.Command = channel.receive()
        if not isinstance(command, messages.LoadAdapter | messages.DropAdapter):
            return command
        assert adapters is not None, f"{command} for a rank without adapters"
        if isinstance(command, messages.LoadAdapter):
            read = adapters.load(Adapter(command.digest, command.folder))
            read.add_done_callback(partial(_report_read, channel, command.digest))
        else:
            adapters.drop(command.digest)


def _report_read(channel: Channel, digest: str, read: Future[AdapterWeights]) -> None:
    error = read.exception()
    if error is not None and not isinstance(error, ModelError):
        log.error("an adapter cannot be read", exc_info=error)
    reason = None if error is None else str(error) if isinstance(error, ModelError) else repr(error)
    with suppress(OSError):  # the thread that reads finds the end
        channel.send(messages.AdapterRead(digest, reason and reason[:MAX_REASON_CHARS]))


def allocate(loaded: LoadedModel, load: messages.Load, sizes: messages.Allocate, link: Link) -> RankWorker:
    """Allocate the KV cache, the swap space and the rows."""
    model, block_size = loaded.model, load.options.block_size
    assert isinstance(model, Decoder)
    config = CacheConfig(sizes.num_blocks, block_size, num_swap_blocks=sizes.num_swap_blocks)
    cache = KVCache.allocate(model.kv_geometry, config.num_blocks, block_size, model.back_end)
    batch = PersistentBatch(sizes.max_num_seqs, sizes.max_model_len, block_size, model.vocab_size)
    swapper, num_swap_blocks = None, config.num_swap_blocks
    if num_swap_blocks:
        swap_dir = load.options.swap_dir
        swapper = loaded.device.swapper(cache, model.kv_geometry, num_swap_blocks, model.back_end, swap_dir)
    return RankWorker(model, cache, batch, swapper, link)


def adapters_of(
    model: Decoder, options: EngineOptions, shard: Shard
) -> "tuple[RankAdapters, AdapterRows] | tuple[None, None]":
    """Return the adapters of a rank, and those of its rows; None if they are off."""
    if not options.enable_lora:
        return None, None
    # The one place that knows the room of adapters; it loads what only engines with a scheduler need otherwise.
    from quire.engine.assembly import rank_adapters  # noqa: PLC0415

    return rank_adapters(options, model, shard)


def run(channel: Channel, ranks: RankExchange, worker: RankWorker) -> NoReturn:
    """Run plans. A step that fails here, or on another rank, is left, and the next one waits for all."""
    while True:
        command = expect(channel, messages.Step, worker.adapters)
        try:
            worker.execute(command.plan)
        except Exception as error:
            is_own = not isinstance(error, InterruptedExchangeError)
            if is_own:
                log.exception("a step has failed")
            ranks.leave()
            channel.send(messages.Stopped(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS] if is_own else None))
            expect(channel, messages.Resume, worker.adapters)
            ranks.reset()
