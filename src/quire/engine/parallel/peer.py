"""Both ends of the channel between rank 0 and another rank: the peer, as rank 0 has it, and the commands there."""

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import Popen
from typing import TypeVar

from quire.core.errors import EngineError, ModelError, RankLostError, error_of
from quire.core.lora import Adapter
from quire.engine.adapters.store import RankAdapters
from quire.engine.parallel import rank_messages
from quire.engine.parallel.channel import Channel
from quire.kernels.low_rank import AdapterWeights

log = logging.getLogger(__name__)

ReportT = TypeVar(
    "ReportT", rank_messages.Hello, rank_messages.Loaded, rank_messages.Measured, rank_messages.Allocated,
    rank_messages.Captured, rank_messages.Stopped,
)  # fmt: skip
CommandT = TypeVar(
    "CommandT", rank_messages.Load, rank_messages.Measure, rank_messages.Allocate, rank_messages.Step,
    rank_messages.Resume,
)  # fmt: skip


class Peer:
    """Another rank: the channel to it, and its process if that is a child of this one. `place`: of the process."""

    def __init__(self, rank: int, channel: Channel, process: Popen[bytes] | None, place: str) -> None:
        self.rank, self.channel, self.process, self.place = rank, channel, process, place
        self.refusal: EngineError | None = None  # the rank's reason to end
        self._reads = dict[str, Future[None]]()  # reads of adapters, by digests
        self._has_ended = False

    def start(self, on_end: Callable[["Peer"], None], handles: Callable[["Peer", rank_messages.Report], bool]) -> None:
        """Start to read its reports; `on_end` is called when it has ended. `handles` as in `Channel.start`."""

        def end() -> None:
            self._has_ended = True
            self._fail_reads()
            on_end(self)

        self.channel.start(end, lambda report: self._notes(report) or handles(self, report))

    def send(self, command: rank_messages.Command) -> None:
        """Send a command. RankLostError if the rank has ended."""
        try:
            self.channel.send(command)
        except OSError as error:
            raise self.lost() from error

    def load(self, adapter: Adapter) -> Future[None]:
        """Read an adapter there, unless it is in memory. The future's error is a ModelError, or that the rank ended."""
        read = self._reads[adapter.digest] = Future()
        with suppress(RankLostError):  # the next step raises it
            self.send(rank_messages.LoadAdapter(adapter.digest, str(Path(adapter.folder).absolute())))
        if self._has_ended:
            self._fail_reads()
        return read

    def receive(self, kind: type[ReportT]) -> ReportT:
        """Wait for a report of this kind. RankLostError if the rank has ended."""
        try:
            report = self.channel.receive()
        except EOFError as error:
            raise self.lost() from error
        assert isinstance(report, kind), f"expected {kind.__name__} of rank {self.rank}, got {report}"
        return report

    def lost(self, reason: str = "has ended") -> RankLostError:
        """Return the error of a rank that has ended."""
        return RankLostError(f"rank {self.rank} ({self.place}) {reason}")

    def end(self, reason: str, wait_s: float) -> None:
        """Close the channel, which ends the process. One of another machine gets the reason, as in `Channel.offer`."""
        if self.process is None:
            self.channel.offer(rank_messages.End(reason), wait_s)
        self.channel.close()

    def _fail_reads(self) -> None:
        with suppress(KeyError):  # there is none left
            while True:
                self._reads.popitem()[1].set_exception(self.lost())

    def _notes(self, report: rank_messages.Report) -> bool:
        if isinstance(report, rank_messages.AdapterRead):
            read = self._reads.pop(report.digest)
            if report.reason is None:
                read.set_result(None)
            else:
                read.set_exception(ModelError(f"rank {self.rank} ({self.place}): {report.reason}"))
            return True
        if not isinstance(report, rank_messages.Refused):
            return False
        self.refusal = error_of(report.kind, f"rank {self.rank}: {report.message}", EngineError)
        return True


class Commands:
    """The commands of rank 0, in order; those about adapters are followed where they come."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self.adapters: RankAdapters | None = None

    def next(self) -> rank_messages.Command:
        """Wait for a command. EOFError if rank 0 has ended."""
        while True:
            command: rank_messages.Command = self._channel.receive()
            if not isinstance(command, rank_messages.LoadAdapter | rank_messages.DropAdapter):
                return command
            assert self.adapters is not None, f"{command} for a rank without adapters"
            if isinstance(command, rank_messages.LoadAdapter):
                read = self.adapters.load(Adapter(command.digest, command.folder))
                read.add_done_callback(partial(self._report_read, command.digest))
            else:
                self.adapters.drop(command.digest)

    def expect(self, kind: type[CommandT]) -> CommandT:
        """Wait for a command of this kind."""
        command = self.next()
        assert isinstance(command, kind), f"expected {kind.__name__}, got {command}"
        return command

    def _report_read(self, digest: str, read: Future[AdapterWeights]) -> None:
        error = read.exception()
        if error is not None and not isinstance(error, ModelError):
            log.error("an adapter cannot be read", exc_info=error)
        reason = None if error is None else str(error) if isinstance(error, ModelError) else repr(error)
        with suppress(OSError):  # the thread that reads finds the end
            self._channel.send(rank_messages.AdapterRead(digest, reason and reason[: rank_messages.MAX_REASON_CHARS]))
