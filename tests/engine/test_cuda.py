"""The engine with --device cuda, where there is a GPU; elsewhere tests/kernels/triton/test_engine.py interprets it."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from quire.engine import devices
from quire.engine.devices import open_device
from quire.engine.options import EngineOptions
from quire.execution.cuda import cuda_device
from quire.execution.cuda.cuda_graphs import GraphSizes
from quire.execution.device import HostDevice
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from support.cuda_engine import check_sharing
from support.random_model import write_random_model

CUDA = EngineOptions(device="cuda")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@needs_gpu
def test_sharing_and_preemption_keep_to_the_margin(tmp_path: Path) -> None:
    check_sharing(lambda **settings: LLM(device="cuda", **settings), write_random_model(tmp_path), margin=1e-3)


@needs_gpu
def test_two_engines_share_a_card(tmp_path: Path) -> None:
    model = write_random_model(tmp_path)
    share = {"device": "cuda", "gpu_memory_utilization": 0.3}
    with LLM(model, **share) as one, LLM(model, **share) as other:
        assert one.kv_stats().total_blocks == other.kv_stats().total_blocks


@needs_gpu
@pytest.mark.parametrize("fault", range(1, 5))
def test_graph_that_cannot_be_captured_is_the_only_one_and_changes_no_answer(
    fault: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A synchronization invalidates a capture; there are two sizes, each with and without a draw."""
    forward, captures = Decoder.forward, list[int]()

    def faulty(self: Decoder, batch: ForwardBatch, cache: KVCache) -> Tensor:
        if torch.cuda.is_current_stream_capturing():
            captures.append(fault)
            if len(captures) in (fault, fault + 1):  # also without early launch
                torch.cuda.synchronize()
        return forward(self, batch, cache)

    model, params = write_random_model(tmp_path), SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    prompts = [[3, 5, 7], [11], [2, 4, 6, 8]]
    with LLM(model, device="cpu") as llm:
        expected = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    monkeypatch.setattr(Decoder, "forward", faulty)
    with LLM(model, device="cuda", capture_graphs=True, cudagraph_capture_sizes=[2, 4], max_num_seqs=4) as llm:
        found = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
        counts = {each.labels["state"]: each.value for each in llm.get_metrics() if each.name == "quire:cuda_graphs"}
    assert found == expected
    assert counts == {"captured": 3, "failed": 1}


def test_cuda_without_a_gpu_is_an_error_that_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for version, what in ((None, "built without CUDA"), ("13.0", "torch sees no GPU")):
        monkeypatch.setattr(torch.version, "cuda", version)
        with pytest.raises(ConfigError, match=rf"device cuda: .*{what}; use cpu or auto"):
            open_device(CUDA)
        for name in ("auto", "cpu"):
            assert isinstance(open_device(EngineOptions(device=name)), HostDevice)


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let torch see a GPU, and an engine's device be what it is made with."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (80 << 30, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a card")
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda *args, **how: SimpleNamespace(**how))
    monkeypatch.delenv("CC", raising=False)


@pytest.mark.usefixtures("a_gpu")
def test_early_launch_is_on_unless_it_is_turned_off() -> None:
    device: Any = open_device(CUDA)
    assert device.launches_early is True
    device = open_device(EngineOptions(device="cuda", early_launch=False))
    assert device.launches_early is False


@pytest.mark.usefixtures("a_gpu")
def test_graphs_are_captured_at_start_unless_that_is_turned_off() -> None:
    """What `None` means is tested with the options: on an imitated GPU, where captures are slow, another thing."""
    for asked in (None, True, False):
        options = EngineOptions(device="cuda", capture_graphs=asked)
        device: Any = open_device(options)
        assert device.captures_graphs is options.captures_at_start


@pytest.mark.usefixtures("a_gpu")
def test_sizes_of_graphs_keep_to_the_budget_of_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    options = EngineOptions(device="cuda", cudagraph_capture_sizes=(8, 4096))
    monkeypatch.setattr(cuda_device, "CudaDevice", lambda utilization, sizes, **how: sizes)
    for gib, name, sizes in ((79, "NVIDIA H100", (8, 4096)), (79, "NVIDIA A100", (8,)), (47, "NVIDIA L40S", (8,))):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gib=gib: (gib << 30, gib << 30))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda name=name: name)
        assert open_device(options) == GraphSizes(sizes, sizes)


@pytest.mark.usefixtures("a_gpu")
def test_what_triton_cannot_compile_its_launcher_without_is_an_error_at_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "ccache gcc")
    with pytest.raises(ConfigError, match=r"device cuda: CC is 'ccache gcc', which Triton runs as one program"):
        open_device(CUDA)
    monkeypatch.setenv("CC", sys.executable)
    assert isinstance(open_device(CUDA), SimpleNamespace)
    monkeypatch.setattr(devices, "sysconfig", SimpleNamespace(
        get_default_scheme=lambda: "posix_local", get_paths={"posix_prefix": {"include": str(tmp_path)}}.__getitem__
    ))  # fmt: skip
    with pytest.raises(ConfigError, match=rf"there is no {tmp_path}/Python.h, .*; install Python's headers"):
        open_device(CUDA)
    (tmp_path / "Python.h").touch()
    assert isinstance(open_device(CUDA), SimpleNamespace)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match=r"device cuda: there is no C compiler.*; install gcc; use cpu or auto"):
        open_device(CUDA)
    assert isinstance(open_device(EngineOptions(device="auto")), HostDevice)
