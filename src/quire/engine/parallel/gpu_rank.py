"""Rank of a GPU other than 0: loads its part of the model, and launches what rank 0 commands."""

import logging
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, NoReturn

import torch
from torch._C._distributed_c10d import Store

from quire.core.errors import ConfigError, EngineError
from quire.core.plan import decode_plan
from quire.engine.devices import graph_sizes_of
from quire.engine.parallel import messages
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.gpu_worker import FollowingWorker
from quire.engine.parallel.nccl import GpuRanks
from quire.engine.parallel.rank import MAX_REASON_CHARS, adapters_of, expect, load_part, next_command
from quire.execution.batch import PersistentBatch
from quire.execution.cuda.cuda_graphs import GraphSize
from quire.execution.device import StepLimits, WorkerParts
from quire.model.decoder import Decoder

if TYPE_CHECKING:
    from quire.engine.adapters.store import RankAdapters

log = logging.getLogger(__name__)


def bring_up(
    channel: Channel, open_store: Callable[[], Store], command: messages.Load
) -> Callable[[], NoReturn]:
    """Load a part of the model, measure, and allocate; return what runs plans until the end, which raises EOFError.

    `open_store` as of `GpuRanks`.
    """
    card, num_cards = command.rank % (command.num_ranks // command.options.nnodes), torch.cuda.device_count()
    if card >= num_cards:
        raise ConfigError(f"rank {command.rank} needs GPU {card} of its machine, but torch sees {num_cards} there")
    torch.cuda.set_device(card)
    ranks = GpuRanks(command.shard, torch.device("cuda", card), open_store)
    loaded, block_size = load_part(channel, command, ranks), command.options.block_size
    model, device = loaded.model, loaded.device
    assert isinstance(model, Decoder)
    adapters, rows = adapters_of(model, command.options, command.shard)
    slots = None if rows is None else rows.slots
    limits = StepLimits(*expect(channel, messages.Measure).limits)
    channel.send(messages.Measured(device.kv_bytes(model, limits, slots)))
    sizes = expect(channel, messages.Allocate)
    cache = device.allocate_cache(model.kv_geometry, sizes.num_blocks, block_size, model.back_end)
    batch = PersistentBatch(sizes.max_num_seqs, sizes.max_model_len, block_size, model.vocab_size)
    swapper = None
    if sizes.num_swap_blocks:
        swapper = device.swapper(cache, model.kv_geometry, sizes.num_swap_blocks, model.back_end, None)
    worker = FollowingWorker(
        ranks, model, WorkerParts(model, cache, batch, swapper, adapters=rows), graph_sizes_of(command.options)
    )
    channel.send(messages.Allocated())
    return partial(_run_or_end, channel, worker, adapters)


def _run_or_end(channel: Channel, worker: FollowingWorker, adapters: "RankAdapters | None") -> NoReturn:
    try:
        run(channel, worker, adapters)
    except EOFError:
        raise
    except Exception as error:  # the other ranks wait for this one on their devices: the run is over
        log.exception("a step has failed")
        channel.send(messages.Refused(EngineError.__name__, f"a step has failed: {error!r}"[:MAX_REASON_CHARS]))
        os._exit(1)  # what is left on the device may never end


def run(channel: Channel, worker: FollowingWorker, adapters: "RankAdapters | None") -> NoReturn:
    """Launch what rank 0 commands, in its order."""
    while True:
        command = next_command(channel, adapters)
        match command:
            case messages.Step(plan):
                worker.prepare(decode_plan(plan))
            case messages.Compute(kind, num_rows):
                worker.compute(kind, num_rows)
            case messages.Capture(num_rows, num_tokens, has_adapters):
                channel.send(messages.Captured(worker.capture(GraphSize(num_rows, num_tokens, has_adapters))))
            case messages.DropGraph(num_rows, num_tokens, has_adapters):
                worker.drop(GraphSize(num_rows, num_tokens, has_adapters))
            case _:
                raise AssertionError(f"command {command}")
