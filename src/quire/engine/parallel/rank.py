"""A rank of tensor parallelism other than 0: loads its part of the model and runs the plans that rank 0 sends.

It has no scheduler, no sampler and no tokens of its own.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from msgspec import structs

from quire.core.errors import ConfigError
from quire.core.version import __version__
from quire.engine.adapters.store import rank_adapters
from quire.engine.devices import graph_sizes_of
from quire.engine.loading import LoadedModel, load
from quire.engine.messages import failed
from quire.engine.options import EngineOptions
from quire.engine.parallel import rank_messages
from quire.engine.parallel.addresses import AddressBook
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.link import RankExchange
from quire.engine.parallel.peer import Commands
from quire.execution.batch import PersistentBatch
from quire.execution.device import StepLimits
from quire.execution.image_rows import ImageRows
from quire.execution.worker import StepCompute
from quire.extension.isas import set_threads_of_kernels, usable_isas
from quire.model.decoder import Decoder
from quire.model.resolve import model_digest, resolve_model

Inherited = int | AddressBook  # a descriptor, or the addresses at which ranks of other machines are reached


def serve(channel: Channel, inherited: Inherited, own: EngineOptions | None = None) -> NoReturn:
    """Bring a rank up, and run plans. Errors are reported and raised.

    `own`: the options of a rank's own command on another machine, where folders have other names. Raises EOFError if
    rank 0 has ended.
    """
    channel.send(rank_messages.Hello(__version__, usable_isas(), own))
    commands = Commands(channel)
    load_command = commands.expect(rank_messages.Load)
    channel.silence_limit_s = load_command.options.stall_limit
    try:
        if own is not None:
            folder = str(resolve_model(own.model, own.model_files, own.revision))
            options = replace(load_command.options, model=folder, swap_dir=own.swap_dir)
            load_command = structs.replace(load_command, options=options)
        run = bring_up(channel, commands, load_command, open_exchange(load_command, inherited))
    except (EOFError, OSError):
        raise
    except Exception as error:
        refusal = failed(error)
        channel.send(rank_messages.Refused(refusal.kind, refusal.message))
        raise
    run()


def open_exchange(command: rank_messages.Load, inherited: Inherited) -> RankExchange:
    """Return the exchanges of a rank, by its device and by what it has inherited; `reset` connects them."""
    if command.options.device == "cuda":
        from quire.engine.parallel.nccl import rank_exchange  # noqa: PLC0415 (loads torch)

        return rank_exchange(command, inherited if isinstance(inherited, int) else None)
    if isinstance(inherited, int):
        from quire.engine.parallel.shared_memory import SharedRanks  # noqa: PLC0415 (imports the extension)

        return SharedRanks(command.shard, command.layout, inherited)
    from quire.engine.parallel.tcp import NetworkRanks  # noqa: PLC0415 (loads torch)

    return NetworkRanks(command.shard, command.place, inherited)


def bring_up(
    channel: Channel, commands: Commands, command: rank_messages.Load, exchange: RankExchange
) -> Callable[[], NoReturn]:
    """Load a part of the model, measure, and allocate; return what runs plans until the end, which raises EOFError."""
    options = command.options
    loaded = load_part(channel, command, exchange)
    model, device = loaded.model, loaded.device
    assert isinstance(model, Decoder)
    rows, slots = None, None
    if options.enable_lora:
        commands.adapters, rows = rank_adapters(options, model, command.shard)
        slots = rows.slots
    limits = StepLimits(*commands.expect(rank_messages.Measure).limits)
    channel.send(rank_messages.Measured(device.kv_bytes(model, limits, slots)))
    sizes = commands.expect(rank_messages.Allocate)
    geometry, block_size = model.kv_geometry, options.block_size
    cache = device.allocate_cache(geometry, sizes.num_blocks, block_size, model.back_end, sizes.num_slots)
    batch = PersistentBatch(sizes.max_num_seqs, sizes.max_model_len, block_size, model.vocab_size)
    swapper, num_swap_blocks = None, sizes.num_swap_blocks
    if num_swap_blocks:
        swapper = device.swapper(
            cache, geometry, num_swap_blocks, model.back_end, options.swap_dir, sizes.num_swap_slots
        )  # fmt: skip
    images, settings = None, loaded.image_settings
    if model.vision is not None and settings is not None:
        images = ImageRows(model.vision, settings)
    compute = StepCompute(model, cache, batch, swapper, adapters=rows, images=images)
    if options.device == "cuda":
        from quire.engine.parallel.gpu_ranks import GpuRank  # noqa: PLC0415 (loads torch)

        graphs = graph_sizes_of(options, limits.max_num_batched_tokens)
        run = GpuRank(channel, commands, exchange, compute, graphs).run
    else:
        from quire.engine.parallel.cpu_ranks import CpuRank  # noqa: PLC0415 (imports the extension)

        run = CpuRank(channel, commands, exchange, compute).run
    channel.send(rank_messages.Allocated())
    return run


def load_part(channel: Channel, command: rank_messages.Load, exchange: RankExchange) -> LoadedModel:
    """Connect with the other ranks, load this one's part of the model, and report it."""
    if command.num_threads:
        set_threads_of_kernels(command.num_threads)
    path = Path(command.options.model or "")
    if model_digest(path) != command.digest:
        raise ConfigError(f"the model at {path} is another one than that of rank 0")
    exchange.reset()
    opened = exchange, command.num_positions
    loaded = load(command.options, path, lambda spec, num_positions: opened)
    channel.send(rank_messages.Loaded(loaded.model.weight_bytes))
    return loaded
