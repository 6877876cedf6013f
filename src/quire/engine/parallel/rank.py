"""A rank of tensor parallelism: `python -m quire.engine.parallel.rank FD`, started by rank 0.

It loads its part of the model and runs the plans that rank 0 sends, without scheduler, sampler and tokens of its own.
It ends with rank 0's end of the socket, at any time: a thread of its own watches it, another one beats.
"""

import logging
import os
import select
import socket
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import msgspec
import torch

from quire.core.config import CacheConfig
from quire.core.errors import ConfigError
from quire.core.frames import frame, read_frame
from quire.core.plan_codec import decode_plan
from quire.core.version import __version__
from quire.engine.loading import LoadedModel, load
from quire.engine.messages import failed
from quire.engine.parallel import messages
from quire.engine.parallel.digest import model_digest
from quire.engine.parallel.link import END, FORWARD, LOGITS, Link
from quire.engine.parallel.shared_memory import MemoryLayout, SharedRanks
from quire.execution.batch import PersistentBatch
from quire.execution.swap_storage import allocate_swap_space
from quire.execution.swapper import Swapper
from quire.kernels.cpp.back_end import usable_isas
from quire.kernels.cpp.gather import InterruptedExchangeError
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.sharding import Shard

log = logging.getLogger(__name__)

BEAT_INTERVAL_S = 0.25
MAX_REASON_CHARS = 2000


class Connection:
    """Frames over the socket to rank 0."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._input = connection.makefile("rb")

    def send(self, report: messages.Report) -> None:
        """Send a report."""
        self._socket.sendall(frame(report))

    def receive(self) -> messages.Command:
        """Wait for the next command. EOFError if rank 0 has ended."""
        message = read_frame(self._input)
        if message is None:
            raise EOFError("rank 0 has ended")
        command: messages.Command = messages.decode_command(message)
        return command

    def receive_load(self) -> tuple[messages.Load, int]:
        """Wait for the first command, and the descriptor that comes with it. EOFError as of `receive`."""
        _, descriptors, _, _ = socket.recv_fds(self._socket, 1, 1)  # a byte of its own, before the frame
        if not descriptors:
            raise EOFError("rank 0 has ended")
        command = self.receive()
        assert isinstance(command, messages.Load), f"the first command must be Load, got {command}"
        return command, descriptors[0]


@dataclass(frozen=True, slots=True)
class RankWorker:
    """A rank's model, cache and rows; computes what rank 0 computes, with its part of the model."""

    model: Decoder
    cache: KVCache
    batch: PersistentBatch
    swapper: Swapper | None
    link: Link

    @torch.inference_mode()
    def execute(self, plan_message: bytes) -> None:
        """Run a step: changes of rows, swaps, block copies, then what rank 0 asks for."""
        plan = decode_plan(plan_message)
        self.batch.apply(plan)
        batch = self.batch.inputs(plan).forward
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


def serve(connection: Connection) -> NoReturn:
    """Load a part of the model, then run plans. Errors of the start are reported and raised; EOFError at the end."""
    is_over = threading.Event()
    try:
        _serve(connection, is_over)
    finally:
        is_over.set()


def _serve(connection: Connection, is_over: threading.Event) -> NoReturn:
    connection.send(messages.Hello(__version__, usable_isas()))
    command, descriptor = connection.receive_load()
    try:
        torch.set_num_threads(command.num_threads)
        if model_digest(Path(command.options.model or "")) != command.digest:
            raise ConfigError(f"rank {command.rank} finds another model than rank 0 at {command.options.model}")
        ranks = SharedRanks(Shard(command.rank, command.num_ranks), MemoryLayout(*command.layout), descriptor)
        os.close(descriptor)
        ranks.group.beat()
        threading.Thread(target=beat, args=(ranks, is_over), name="beat", daemon=True).start()
        opened = ranks, command.num_positions
        loaded = load(command.options, Path(command.options.model or ""), lambda spec, num_positions: opened)
        connection.send(messages.Loaded(loaded.model.weight_bytes))
        sizes = connection.receive()
        assert isinstance(sizes, messages.Allocate), f"expected Allocate, got {sizes}"
        worker = allocate(loaded, command, sizes, Link(ranks))
        connection.send(messages.Allocated())
    except EOFError:
        raise
    except Exception as error:
        refusal = failed(error)
        connection.send(messages.Refused(refusal.kind, refusal.message))
        raise
    run(connection, ranks, worker)


def allocate(loaded: LoadedModel, load: messages.Load, sizes: messages.Allocate, link: Link) -> RankWorker:
    """Allocate the KV cache, the swap space and the rows."""
    model, block_size = loaded.model, load.options.block_size
    assert isinstance(model, Decoder)
    config = CacheConfig(sizes.num_blocks, block_size, num_swap_blocks=sizes.num_swap_blocks)
    cache = KVCache.allocate(model.kv_geometry, config.num_blocks, block_size, model.back_end)
    batch = PersistentBatch(sizes.max_num_seqs, sizes.max_model_len, block_size, model.vocab_size)
    swapper = None
    if config.num_swap_blocks:
        space = allocate_swap_space(
            model.kv_geometry, config.num_swap_blocks, block_size, model.back_end, load.options.swap_dir
        )
        swapper = Swapper(cache, space, model.back_end.copy_blocks)
    return RankWorker(model, cache, batch, swapper, link)


def run(connection: Connection, ranks: SharedRanks, worker: RankWorker) -> NoReturn:
    """Run plans. A step that fails here, or on another rank, is left, and the next one waits for all."""
    while True:
        command = connection.receive()
        assert isinstance(command, messages.Step), f"expected Step, got {command}"
        try:
            worker.execute(command.plan)
        except Exception as error:
            is_own = not isinstance(error, InterruptedExchangeError)
            if is_own:
                log.exception("a step has failed")
            ranks.group.interrupt()
            connection.send(messages.Stopped(f"{type(error).__name__}: {error}"[:MAX_REASON_CHARS] if is_own else None))
            resume = connection.receive()
            assert isinstance(resume, messages.Resume), f"expected Resume, got {resume}"
            ranks.group.reset()


def beat(ranks: SharedRanks, is_over: threading.Event) -> None:
    """Show that this process runs, four times a second."""
    while not is_over.wait(BEAT_INTERVAL_S):
        ranks.group.beat()


def watch(connection: socket.socket) -> NoReturn:
    """End the process when rank 0's end of the socket is closed."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    poll.poll()
    os._exit(0)


def main() -> None:
    """Serve the socket with the number given as the only argument."""
    logging.basicConfig(format="%(asctime)s %(levelname)s rank: %(message)s")
    connection = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=watch, args=(connection,), name="watch", daemon=True).start()
    try:
        serve(Connection(connection))
    except (EOFError, ConnectionError, msgspec.DecodeError):
        sys.exit(1)
    except ConfigError:
        sys.exit(1)  # reported


if __name__ == "__main__":
    main()
