"""What FlashInfer's wrappers are given, held against the reference by a stand-in that attends from that alone."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from quire import LLM
from quire.core.errors import ConfigError
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import cuda_back_end
from quire.kernels.cuda import flashinfer_attention
from quire.kernels.cuda.flashinfer_attention import FLASHINFER_ATTENTION, FlashInferAttention, pages_of
from quire.kernels.paged_attention import build_metadata
from quire.kernels.reference.back_ends import REFERENCE, TORCH
from quire.model.loader import load_model
from support import flashinfer_stand_in
from support.cuda_engine import PROMPTS, differences_beyond_margin, tokens_of
from support.paged_cache import Paging, Part, Tokens, attend, plain_spec
from support.random_folder import write_random_folder
from support.random_model import write_random_model
from support.steps_in_flight import executor_in_flight

HEADS = (6, 2, 64)
STEPS = {"decodes": [(16, 17), (0, 1), (269, 270)], "decodes and chunks": [(16, 17), (30, 70), (0, 32), (299, 300)]}
HOWS = [{}, {"softcap": 1.5}]


@pytest.fixture
def attention() -> FlashInferAttention:
    return FlashInferAttention(flashinfer_stand_in)


@pytest.fixture
def back_end(attention: FlashInferAttention) -> BackEnd:
    return replace(TORCH, paged_attention=attention, attention=FLASHINFER_ATTENTION)


@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("window", [None, 50])
@pytest.mark.parametrize("more", HOWS, ids=str)
@pytest.mark.parametrize("block_size", [8, 32])
def test_step_matches_the_reference(
    spans: list[tuple[int, int]], window: int | None, more: dict[str, float], block_size: int, back_end: BackEnd
) -> None:
    """Over tables with garbage wherever no query looks, which the wrappers are not given."""
    tokens = [Tokens.random(stop, HEADS, torch.float16, seed) for seed, (_, stop) in enumerate(spans)]
    parts = [Part(own, start, stop) for own, (start, stop) in zip(tokens, spans, strict=True)]
    results = attend(parts, Paging(block_size, 1), window, back_end, **more)
    for result, wanted in zip(results, attend(parts, Paging(block_size, 1), window, REFERENCE, **more), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-3, atol=2e-3)


def int32(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def test_pages_are_the_blocks_of_the_contexts_end_to_end() -> None:
    tables = torch.tensor([[7, 3, -1], [5, 99, 99], [2, 9, 4]], dtype=torch.int32)
    pages = pages_of(build_metadata(tables, int32(0, 1, 9, 10), int32(17, 8, 48), 16))
    assert torch.equal(pages.query_starts, int32(0, 1, 9, 10))
    assert torch.equal(pages.indptr, int32(0, 2, 3, 6))
    assert torch.equal(pages.indices, int32(7, 3, 5, 2, 9, 4))
    assert torch.equal(pages.last_page_len, int32(1, 8, 16))


def test_pages_behind_a_window_are_replaced_by_the_first_that_is_seen() -> None:
    tables = torch.tensor([[-1, 99, 4]], dtype=torch.int32)
    assert torch.equal(pages_of(build_metadata(tables, int32(0, 1), int32(40), 16), 8).indices, int32(4, 4, 4))
    assert torch.equal(pages_of(build_metadata(tables, int32(0, 1), int32(40), 16), 9).indices, int32(99, 99, 4))


def test_row_of_no_sequence_reads_block_0() -> None:
    tables = torch.tensor([[4], [99]], dtype=torch.int32)
    pages = pages_of(build_metadata(tables, int32(0, 1, 18), int32(3, 0), 16))
    assert torch.equal(pages.indptr, int32(0, 1, 3))
    assert torch.equal(pages.indices, int32(4, 0, 0))


def test_equal_layers_share_a_plan(attention: FlashInferAttention) -> None:
    query, cache = torch.randn(2, 4, 64).half(), torch.randn(3, 16, 2, 64).half()
    for step in range(1, 3):
        metadata = build_metadata(int32(1, 2)[:, None], int32(0, 1, 2), int32(5, 9), 16)
        for window in (None, 4, None, 4):
            attention(plain_spec(query, 2, window=window), query, cache, cache, metadata)
        assert [wrapper.plans for wrapper in attention._wrappers.values()] == [step, step]
    assert not any(wrapper.use_tensor_cores for wrapper in attention._wrappers.values())


def test_answers_of_an_engine_are_those_of_the_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, back_end: BackEnd
) -> None:
    """Two steps in flight, chunks and decodes; the stand-in serves any size, the model's heads of 16 too."""
    model = write_random_model(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        own = replace(back_end, attention=None)  # flashinfer refuses such heads
        patch.setattr("quire.engine.loading.choose_back_end", lambda *args, **how: own)
        patch.setattr("quire.execution.device.HostDevice.executor", executor_in_flight)
        llm = LLM(model, device="cpu", dtype="float32", num_kv_blocks=32, max_num_batched_tokens=16)
    with llm:
        answers = tokens_of(llm, PROMPTS[:2])
    for prompt, (tokens,) in zip(PROMPTS, answers, strict=False):
        assert not differences_beyond_margin(model, prompt, tokens, margin=1e-3)


def test_missing_package_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(ConfigError, match="needs the package flashinfer: pip install flashinfer-python"):
        cuda_back_end(attention=FLASHINFER_ATTENTION)
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    monkeypatch.setattr(flashinfer_attention, "_has", lambda program: True)
    back_end = cuda_back_end(head_dim=64, attention=FLASHINFER_ATTENTION)
    assert isinstance(back_end.paged_attention, FlashInferAttention)
    assert not back_end.is_capturable


def test_what_compiles_its_kernels_is_looked_for_at_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the first step that needs a kernel would fail."""
    pytest.importorskip("triton")
    monkeypatch.setitem(sys.modules, "flashinfer", flashinfer_stand_in)
    for name in ("PATH", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.setenv(name, str(tmp_path))
    with pytest.raises(ConfigError, match=r"there is no (nvcc and no )?ninja; install flashinfer-jit-cache"):
        cuda_back_end(attention=FLASHINFER_ATTENTION)
    (tmp_path / "bin").mkdir()
    for program in (tmp_path / "ninja", tmp_path / "bin/nvcc"):
        program.touch(mode=0o755)
    assert isinstance(cuda_back_end(attention=FLASHINFER_ATTENTION).paged_attention, FlashInferAttention)
    for program in (tmp_path / "ninja", tmp_path / "bin/nvcc"):
        program.unlink()
    monkeypatch.setattr(flashinfer_attention, "find_spec", lambda name: name == "flashinfer_jit_cache" or None)
    assert isinstance(cuda_back_end(attention=FLASHINFER_ATTENTION).paged_attention, FlashInferAttention)


SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 64, "num_hidden_layers": 1,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "torch_dtype": "bfloat16",
    "architectures": ["LlamaForCausalLM"],
}  # fmt: skip
REFUSED = {
    "bfloat16 heads of 80, only float16 and bfloat16 heads of 64, 128 or 256": {"head_dim": 80},
    "float32 heads of 64": {"torch_dtype": "float32"},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_flashinfer_has_no_form_of_is_refused_by_name(message: str, back_end: BackEnd, tmp_path: Path) -> None:
    config = SIZES | REFUSED[message]
    folder = write_random_folder(tmp_path, config, dtype=getattr(torch, str(config["torch_dtype"])))
    with pytest.raises(ConfigError, match=f"attention_backend flashinfer does not support {message}"):
        load_model(folder, back_end=back_end)
