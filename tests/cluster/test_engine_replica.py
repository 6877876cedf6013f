"""An engine replica without a cluster: its health is that of its engine process."""

import asyncio
import importlib.util
import os
import signal
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from quire.core.owner_labels import OwnerLabels
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.messages import EngineDeadError, Ready
from quire.engine.metrics.page import Metrics
from quire.engine.options import EngineOptions
from quire.text.tokenizer import Tokenizer
from support.engine_process import TIMEOUT_S, is_running, until
from support.small_vision import write_llava

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed", allow_module_level=True)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")         # raised in Ray's own modules
    from quire.cluster.engine_replica import EngineReplica
    from quire.cluster.ray_client import RayClient
    from quire.cluster.routing import EngineCall

pytestmark = pytest.mark.usefixtures("forked_processes")


class Replica(EngineReplica):
    """A replica outside of Ray, which would await the end that it has."""

    def __del__(self) -> None:  # type: ignore[override]
        """Leave the end to the test."""


@pytest.mark.parametrize("has_work", [True, False], ids=["with work", "idle"])
def test_replica_with_a_stopped_engine_is_unhealthy_and_its_requests_end(demo_model: Path, *, has_work: bool) -> None:
    async def run() -> None:
        replica = Replica.__new__(Replica)
        await replica.__init__(EngineOptions(str(demo_model), num_kv_blocks=256, stall_limit=600.0), 60.0)  # type: ignore[misc]
        try:
            pid = replica.pids()[1]
            params = SamplingParams(max_tokens=1500, ignore_eos=True)
            request = Request(0, pack_tokens([5, 6, 7]), params, seed=0, max_tokens=1500)
            replica.check_health()
            os.kill(pid, signal.SIGSTOP)
            replica._watch.cancel()     # only now: the machine may have stopped the engine for longer before
            replica._watch = asyncio.create_task(replica._end_when_stalled(2.0))
            if has_work:
                with pytest.raises(EngineDeadError, match="made no progress for 2 s"):
                    [report async for report in replica.generate(EngineCall(request, None))]
            async with asyncio.timeout(TIMEOUT_S):
                await until(lambda: bool(replica._death))
            with pytest.raises(EngineDeadError, match="made no progress for 2 s"):
                replica.check_health()
            await until(lambda: not is_running(pid))
        finally:
            await replica._connection.stop()

    asyncio.run(run())


def test_ingresses_send_a_replica_no_images_which_each_would_number_from_0(tmp_path: Path) -> None:
    for name in ("torch", "transformers"):
        pytest.importorskip(name)       # they write the model
    options = EngineOptions(str(write_llava(tmp_path)), num_kv_blocks=64)

    async def run() -> Ready:
        replica = Replica.__new__(Replica)
        await replica.__init__(options, 60.0)  # type: ignore[misc]
        try:
            return msgspec.msgpack.decode(replica.ready(), type=Ready)
        finally:
            await replica._connection.stop()

    ready = asyncio.run(run())
    assert ready.images is not None
    handle: Any = SimpleNamespace(options=lambda **_: SimpleNamespace(generate=None))   # no request is sent
    metrics, tokenizer = Metrics("tiny").engines[0], Tokenizer.from_folder(tmp_path)
    client = RayClient(handle, ready, tokenizer, options, OwnerLabels(8), metrics, 1)
    assert (client.inputs.images, client.ready.images) == (None, None)
    assert client.ready.no_images_reason == "they are not served on Ray"
