"""Random weights: tensors that every family reads, the same whichever rows are read, and of unit scale."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from quire.kernels.choice import choose_back_end
from quire.model.config import num_parameters, spec_from_config
from quire.model.dummy_weights import PERIOD, DummyCheckpoint, read_dummy
from quire.model.loader import load_model
from support.random_folder import MIXTURE
from support.zero_model import FAMILIES, LLAMA, config_of, spec_of

BERT: dict[str, object] = {
    "vocab_size": 99, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "num_attention_heads": 6,
    "max_position_embeddings": 32, "type_vocab_size": 2,
}  # fmt: skip
CONFIGS = {name: config_of(name) for name in FAMILIES} | {
    "shared expert": MIXTURE,
    "sinks": LLAMA | {"architectures": ["GptOssForCausalLM"], "num_local_experts": 4, "num_experts_per_tok": 2},
    "norms of heads": LLAMA | {"architectures": ["CohereForCausalLM"], "use_qk_norm": True},
    "rows in groups": LLAMA | {"architectures": ["GPTNeoXForCausalLM"], "head_dim": None, "num_attention_heads": 3},
    "encoder": BERT | {"architectures": ["BertModel"]},
    "classifier": BERT | {"architectures": ["BertForSequenceClassification"], "num_labels": 1},
    "classifier, normed": BERT
    | {"architectures": ["ModernBertForSequenceClassification"], "num_labels": 1, "pad_token_id": 1},
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_tensor_is_read_by_the_model_and_finite(
    tmp_path: Path, name: str, dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    source = read_dummy(tmp_path)
    caplog.clear()
    model = load_model(
        source, dtype=dtype, back_end=choose_back_end(torch.device("cpu"), head_dim=source.spec.head_dim)
    )
    assert model.num_parameters == num_parameters(source.spec)
    assert caplog.messages == [], "tensors that no module reads"


def test_rows_do_not_depend_on_what_is_read_with_them() -> None:
    spec = spec_of("Llama", vocab_size=3 * 2**16, hidden_size=72)
    first, again = DummyCheckpoint(spec), DummyCheckpoint(spec)
    name = "model.embed_tokens.weight"
    whole = first.read(name, 0, 3 * 2**16)
    assert whole.size > 3 * PERIOD
    for start, stop in ((0, 5), (7, 8), (58_000, 60_000), (3 * 2**16 - 9, 3 * 2**16)):
        np.testing.assert_array_equal(again.read(name, start, stop), whole[start:stop])


def test_rows_and_tensors_differ() -> None:
    checkpoint = DummyCheckpoint(spec_of("Llama", vocab_size=4096, hidden_size=4096))
    rows = checkpoint.read("model.embed_tokens.weight", 0, 4096)
    assert len(np.unique(rows, axis=0)) == 4096, "a width that divides 2**22"
    firsts = [checkpoint.read(name, 0, 1).ravel()[:8] for name in checkpoint.names if "norm" not in name]
    assert len(np.unique(firsts, axis=0)) == len(firsts)


def test_numbers_keep_products_at_unit_scale_and_norms_are_ones() -> None:
    checkpoint = DummyCheckpoint(spec_of("Llama", hidden_size=512))
    weight = checkpoint.read("model.layers.1.mlp.up_proj.weight", 0, 100)
    assert weight.mean().item() == pytest.approx(0, abs=0.001)
    assert weight.var(ddof=1).item() * 512 == pytest.approx(1, rel=0.02)
    assert np.abs(weight).max().item() <= (3 / 512) ** 0.5
    np.testing.assert_array_equal(checkpoint.read("model.norm.weight", 0, 512), np.ones(512))


def test_tied_head_has_no_tensor() -> None:
    tied, own = (DummyCheckpoint(spec_of("Llama", tie_word_embeddings=each)) for each in (True, False))
    assert own.names - tied.names == {"lm_head.weight"}
    assert own.shape("lm_head.weight") == (301, 72)
    assert own.location() == own.location("lm_head.weight") == "random weights"
    assert spec_from_config(config_of("Qwen3")).is_head_tied
