"""Ranks on CPUs: a step runs when its result is collected, on all ranks at once.

A step that fails on any rank fails on all, and the next one begins with all of them: the engine isolates the request
that is the cause, as with one rank.
"""

import logging
from dataclasses import replace
from typing import Literal, NoReturn

from quire.core.arrays import INT64
from quire.core.config import CacheConfig
from quire.core.plan import StepPlan, StepResult, decode_plan
from quire.engine.parallel import rank_messages
from quire.engine.parallel.channel import Channel
from quire.engine.parallel.link import END, FORWARD, LOGITS, Link, RankExchange
from quire.engine.parallel.peer import Commands
from quire.engine.parallel.rank_set import RankSet
from quire.execution.executor import Executor, LocalExecutor, StepWorker
from quire.execution.worker import StepCompute, Worker
from quire.kernels.cpp.cpp_gather import InterruptedExchangeError
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVGeometry

log = logging.getLogger(__name__)


class CpuRanks:
    """A `RankDevice` of CPUs."""

    kind: Literal["cpu", "cuda"] = "cpu"

    def link(self, ranks: RankSet) -> Link:
        """Return a link with commands that travel with the activations."""
        return Link(ranks.exchange)

    def check_swap_space(self, geometry: KVGeometry, cache: CacheConfig) -> None:
        """Do nothing: swap spaces are files, and their allocation finds how much room there is."""

    def executor(self, ranks: RankSet, compute: StepCompute, max_num_batched_tokens: int) -> Executor:
        """Return an executor of one step at a time."""
        return LocalExecutor(RankedWorker(Worker(compute), ranks, ranks.link()))

    def close(self) -> None:
        """Do nothing."""


class RankedWorker:
    """The `StepWorker` of all ranks."""

    def __init__(self, worker: StepWorker, ranks: RankSet, link: Link) -> None:
        self._worker, self._ranks, self._link = worker, ranks, link

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step on all ranks."""
        try:
            self._ranks.send_plan(plan)
            result = self._worker.execute(plan)
            self._link.send(END)
        except BaseException as error:
            if self._ranks.lost is not None:
                raise self._ranks.lost from error
            self._recover(error)
            raise
        return result

    def _recover(self, error: BaseException) -> None:
        """Begin again after a step that failed here or on another rank. Raises RankLostError, or the other's reason."""
        ranks, exchange = self._ranks, self._ranks.exchange
        exchange.leave()
        reasons = [(peer.rank, ranks.receive(peer, rank_messages.Stopped).reason) for peer in ranks.peers]
        if ranks.lost is not None:
            raise ranks.lost from error
        exchange.resume()
        ranks.tell(rank_messages.Resume())
        exchange.reset()
        if isinstance(error, InterruptedExchangeError):
            failed = ", ".join(f"rank {rank}: {reason}" for rank, reason in reasons if reason is not None)
            raise RuntimeError(f"a step has failed on {failed}") from error


class CpuRank:
    """Another rank, which computes what rank 0 computes, with its part of the model."""

    def __init__(self, channel: Channel, commands: Commands, exchange: RankExchange, compute: StepCompute) -> None:
        self._channel, self._commands, self._exchange, self._compute = channel, commands, exchange, compute
        self._link = Link(exchange)

    def run(self) -> NoReturn:
        """Run plans. A step that fails here, or on another rank, is left, and the next one waits for all."""
        while True:
            command = self._commands.expect(rank_messages.Step)
            try:
                self.execute(command.plan)
            except Exception as error:
                is_own = not isinstance(error, InterruptedExchangeError)
                if is_own:
                    log.exception("a step has failed")
                self._exchange.leave()
                reason = f"{type(error).__name__}: {error}"[: rank_messages.MAX_REASON_CHARS] if is_own else None
                self._channel.send(rank_messages.Stopped(reason))
                self._commands.expect(rank_messages.Resume)
                self._exchange.reset()

    def execute(self, plan_message: bytes) -> None:
        """Run a step: changes of rows, swaps, block copies, then what rank 0 asks for."""
        inputs, _ = self._compute.prepare(decode_plan(plan_message))
        model = self._compute.model
        assert isinstance(model, Decoder)
        while True:
            kind, count = self._link.receive()
            if kind == END:
                return
            if kind == FORWARD:
                tokens = self._link.rows(count, 1, INT64).flatten()
                self._compute.forward(replace(inputs.forward, token_ids=tokens))
            else:
                assert kind == LOGITS, f"command {kind}"
                model.head_sums(self._link.rows(count, model.spec.hidden_size, model.dtype))
