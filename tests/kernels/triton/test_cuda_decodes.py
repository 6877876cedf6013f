"""Steps whose decodes the kernel in CUDA C++ computes, and whose chunks Triton's."""

import os
from pathlib import Path

import pytest
import torch

from quire.core.errors import ConfigError
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import cuda_back_end
from quire.kernels.cuda.cuda_attention import CUDA_ATTENTION
from quire.kernels.paged_attention import build_metadata
from quire.kernels.reference.back_ends import REFERENCE
from quire.model.loader import load_model
from support.cuda_threads import run_on_host
from support.paged_cache import Paging, Part, Tokens, attend, plain_spec
from support.random_folder import write_random_folder

HEADS = (4, 2, 24)
STEPS = {"decodes": [(16, 17), (699, 700)], "decodes and chunks": [(16, 17), (30, 70), (299, 300), (0, 3)]}


@pytest.fixture
def back_end(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> BackEnd:
    """Return the back end of --attention-backend cuda; where Triton is interpreted, its kernels run on the CPU, too."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        run_on_host(monkeypatch)
    return cuda_back_end(attention=CUDA_ATTENTION)


@pytest.mark.parametrize("spans", STEPS.values(), ids=STEPS)
@pytest.mark.parametrize("window", [None, 50])
def test_step_matches_the_reference(
    spans: list[tuple[int, int]], window: int | None, back_end: BackEnd, device: torch.device
) -> None:
    """Over tables of one partition and of two."""
    tokens = [Tokens.random(stop, HEADS, torch.float32, seed) for seed, (_, stop) in enumerate(spans)]
    parts = [Part(own, start, stop) for own, (start, stop) in zip(tokens, spans, strict=True)]
    results = attend(parts, Paging(16, 1), window, back_end, device)
    for result, wanted in zip(results, attend(parts, Paging(16, 1), window, REFERENCE), strict=True):
        torch.testing.assert_close(result, wanted, rtol=2e-5, atol=2e-5)


def test_row_of_no_sequence_reads_and_writes_nothing(back_end: BackEnd, device: torch.device) -> None:
    """Graphs pad: decodes with contexts of 0, whose tables hold anything, and chunks with rows of no token."""
    query, cache = torch.randn(3, 2, 16, device=device), torch.randn(3, 16, 1, 16, device=device)
    tables = torch.tensor([[1], [10**6]], dtype=torch.int32, device=device)
    lens = torch.tensor([5, 0], dtype=torch.int32, device=device)
    for starts in ([0, 1, 2], [0, 1, 1]):
        padded = build_metadata(tables, torch.tensor(starts, dtype=torch.int32, device=device), lens, 16)
        alone = build_metadata(tables[:1], padded.query_starts[:2], lens[:1], 16)
        spec = plain_spec(query, 1, 0.3)
        expected = back_end.paged_attention(spec, query[:1], cache, cache, alone)
        found = back_end.paged_attention(spec, query[: starts[-1] + 1], cache, cache, padded)
        assert torch.equal(found[:1], expected)


SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "head_dim": 16, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "torch_dtype": "float32",
}  # fmt: skip
GEMMA2 = SIZES | {
    "architectures": ["Gemma2ForCausalLM"], "model_type": "gemma2", "sliding_window": 5, "query_pre_attn_scalar": 16,
    "attn_logit_softcapping": 2.0,
}  # fmt: skip


def test_what_the_kernel_has_no_form_of_is_refused_by_name(back_end: BackEnd, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="attention_backend cuda does not support softcap on attention scores; use t"):
        load_model(write_random_folder(tmp_path, GEMMA2), back_end=back_end)
    with pytest.raises(ConfigError, match="attention_backend cuda does not support exact True"):
        cuda_back_end(is_exact=True, attention=CUDA_ATTENTION)
    (tmp_path / "odd").mkdir()
    odd = write_random_folder(tmp_path / "odd", SIZES | {"architectures": ["LlamaForCausalLM"], "head_dim": 18})
    with pytest.raises(ConfigError, match="float32 heads of 18, only heads of up to 256 that are multiples of 16 byte"):
        load_model(odd, back_end=back_end, dtype="float32")
