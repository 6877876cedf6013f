"""Encoders against transformers, on small random checkpoints; a text's bits are the same alone and among others."""

import json
import os
from dataclasses import replace
from itertools import accumulate
from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire.core.errors import ConfigError, ModelError
from quire.kernels.back_end import BackEnd
from quire.kernels.choice import choose_back_end
from quire.model.config import spec_from_config
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import load_model
from support.on_tensors import taken, tensors
from support.random_parameters import randomize

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers")

VOCAB_SIZE = 160
TOLERANCE = 1e-4
TEXTS = (40, 1, 33, 7, 64)  # tokens: on and beside the borders of blocks of 32
BERT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3,
    "num_attention_heads": 6, "max_position_embeddings": 70,
}  # fmt: skip
DISTILBERT = {
    "vocab_size": VOCAB_SIZE, "dim": 48, "hidden_dim": 80, "n_layers": 3, "n_heads": 6, "max_position_embeddings": 70,
}  # fmt: skip
MODERNBERT = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4,
    "num_attention_heads": 6, "max_position_embeddings": 70, "local_attention": 16, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2,
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, object]]] = {
    "bert": ("Bert", BERT),
    "bert, every option": (
        "Bert",
        BERT | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-3, "type_vocab_size": 3, "num_labels": 3},
    ),
    "distilbert": ("DistilBert", DISTILBERT),
    "distilbert, relu, one label": ("DistilBert", DISTILBERT | {"activation": "relu", "num_labels": 1}),
    "roberta": ("Roberta", BERT | {"type_vocab_size": 1, "pad_token_id": 1}),
    "roberta, other padding, types": ("Roberta", BERT | {"type_vocab_size": 2, "pad_token_id": 4, "num_labels": 1}),
    "xlm_roberta": ("XLMRoberta", BERT | {"type_vocab_size": 1, "pad_token_id": 1, "num_labels": 1}),
    "xlm_roberta, gelu by tanh": (
        "XLMRoberta",
        BERT | {"type_vocab_size": 1, "pad_token_id": 1, "hidden_act": "gelu_fast", "layer_norm_eps": 1e-3},
    ),
    "modernbert": ("ModernBert", MODERNBERT | {"num_labels": 1}),
    "modernbert, every option": (
        "ModernBert",
        MODERNBERT
        | {"hidden_activation": "silu", "norm_eps": 1e-3, "norm_bias": True, "attention_bias": True, "mlp_bias": True,
           "classifier_bias": True, "classifier_activation": "gelu_new", "classifier_pooling": "mean",
           "layer_types": ["sliding_attention", "full_attention", "full_attention", "sliding_attention"],
           "rope_parameters": {
               "full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 400.0},
               "sliding_attention": {"rope_type": "default", "rope_theta": 30.0},
           }},
    ),
}  # fmt: skip


def make_reference(case: str, end: str) -> "transformers.PreTrainedModel":
    """Return a transformers model with random parameters."""
    name, config = CASES[case]
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}{end}")(getattr(transformers, f"{name}Config")(**config)).eval()
    randomize(model)
    return model


def random_texts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(5, VOCAB_SIZE, (count,), generator=generator).tolist() for count in TEXTS]


def states_of(encoder: Decoder, texts: list[list[int]], second: list[int] | None = None) -> list[Tensor]:
    """Compute texts in one step, each from place `second` on as the second text of a pair; return their states."""
    lengths, int32 = [len(text) for text in texts], torch.int32
    types = None
    if second is not None:
        types = torch.cat([(torch.arange(n) >= at).long() for n, at in zip(lengths, second, strict=True)])
    batch = ForwardBatch(
        torch.tensor([token for text in texts for token in text]),
        torch.cat([torch.arange(length) for length in lengths]),
        torch.full((sum(lengths),), -1),
        torch.tensor([0, *accumulate(lengths)], dtype=int32),
        torch.tensor(lengths, dtype=int32),
        torch.zeros(len(texts), 1, dtype=int32),
        token_types=types,
    )
    return list(tensors(encoder.forward(taken(encoder, batch), KVCache([], [], 16))).split(lengths))


def reference_states(model: "transformers.PreTrainedModel", text: list[int], second: int | None = None) -> Tensor:
    types = {} if second is None else {"token_type_ids": (torch.arange(len(text)) >= second).long()[None]}
    with torch.no_grad():
        return model(torch.tensor([text]), **types)[0][0].float()


@pytest.mark.parametrize("case", CASES)
def test_hidden_states_equal_transformers_and_have_the_same_bits_alone(
    case: str, tmp_path: Path, back_end: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_reference(case, "Model")
    reference.save_pretrained(tmp_path)
    encoder = load_model(tmp_path, back_end=back_end)
    assert encoder.kv_geometry.layers == ()
    assert "not used" not in caplog.text
    found = states_of(encoder, random_texts())
    for text, states in zip(random_texts(), found, strict=True):
        torch.testing.assert_close(states, reference_states(reference, text), rtol=0, atol=TOLERANCE)
        assert torch.equal(states_of(encoder, [text])[0], states)
    assert torch.equal(torch.cat(states_of(encoder, random_texts()[::-1])[::-1]), torch.cat(found))


@pytest.mark.parametrize("case", CASES)
def test_bfloat16_error_is_at_most_1_2_times_that_of_transformers(case: str, tmp_path: Path, back_end: BackEnd) -> None:
    rounded = make_reference(case, "Model").bfloat16()
    rounded.save_pretrained(tmp_path)
    encoder = load_model(tmp_path, back_end=back_end)
    found = [states.float() for states in states_of(encoder, random_texts())]
    theirs = [reference_states(rounded, text) for text in random_texts()]
    exact = torch.cat([reference_states(rounded.float(), text) for text in random_texts()])
    errors = [(torch.cat(states) - exact).square().mean().sqrt() for states in (found, theirs)]
    assert errors[0] <= 1.2 * errors[1]
    for text, own in zip(random_texts(), found, strict=True):
        assert torch.equal(states_of(encoder, [text])[0].float(), own)


@pytest.mark.parametrize("case", CASES)
def test_classifiers_equal_transformers(
    case: str, tmp_path: Path, back_end: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_reference(case, "ForSequenceClassification")
    reference.save_pretrained(tmp_path)
    encoder, texts, second = load_model(tmp_path, back_end=back_end), random_texts(), [9, 1, 20, 3, 63]
    assert "not used" not in caplog.text
    has_types = encoder.spec.num_token_types > 1
    assert encoder.spec.classifier is not None
    all_states, is_mean = states_of(encoder, texts, second), encoder.spec.classifier.pooling == "mean"
    pooled = torch.stack([states.mean(dim=0) if is_mean else states[0] for states in all_states])
    logits = tensors(encoder.logits(taken(encoder, pooled))).clone()
    for text, at, row in zip(texts, second, logits, strict=True):
        expected = reference_states(reference, text, at if has_types else None)
        torch.testing.assert_close(row, expected, rtol=0, atol=TOLERANCE)
    alone = tensors(encoder.logits(taken(encoder, pooled[2:3])))
    assert torch.equal(alone[0], logits[2])


@pytest.mark.parametrize("case", ["roberta", "modernbert"])
def test_masked_language_models_are_their_base_models(
    case: str, tmp_path: Path, back_end: BackEnd, caplog: pytest.LogCaptureFixture
) -> None:
    reference = make_reference(case, "ForMaskedLM")
    reference.save_pretrained(tmp_path)
    encoder = load_model(tmp_path, back_end=back_end)
    assert not encoder.spec.has_head
    assert "not used" not in caplog.text
    (states,) = states_of(encoder, random_texts()[:1])
    expected = reference_states(reference.base_model, random_texts()[0])
    torch.testing.assert_close(states, expected, rtol=0, atol=TOLERANCE)


def test_states_equal_those_of_a_padded_batch(tmp_path: Path, back_end: BackEnd) -> None:
    reference, texts = make_reference("modernbert", "Model"), random_texts()
    reference.save_pretrained(tmp_path)
    lengths = torch.tensor([len(text) for text in texts])
    padded = torch.tensor([text + [0] * (int(lengths.max()) - len(text)) for text in texts])
    mask = torch.arange(padded.shape[1]) < lengths[:, None]
    with torch.no_grad():
        expected = reference(padded, attention_mask=mask.long())[0]
    found = states_of(load_model(tmp_path, back_end=back_end), texts)
    for row, length, states in zip(expected, lengths, found, strict=True):
        torch.testing.assert_close(states, row[:length], rtol=0, atol=TOLERANCE)


def test_older_and_newer_names_of_rotary_keys_are_the_same() -> None:
    config = {"architectures": ["ModernBertModel"], **MODERNBERT}
    rope = {"full_attention": {"rope_theta": 5e4}, "sliding_attention": {"rope_type": "default", "rope_theta": 300.0}}
    newer = spec_from_config({**config, "rope_parameters": rope, "layer_types": [
        "full_attention", "sliding_attention", "full_attention", "sliding_attention",
    ]})  # fmt: skip
    older = {"global_rope_theta": 5e4, "local_rope_theta": 300.0, "global_attn_every_n_layers": 2}
    assert spec_from_config({**config, **older}) == newer
    assert [rotary.theta for rotary in newer.rotaries] == [5e4, 300.0]
    assert newer.windows == (None, 9, None, 9)
    assert [rotary.theta for rotary in spec_from_config(config).rotaries] == [160_000.0, 10_000.0]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"is_decoder": True}, "is_decoder"),
        ({"position_embedding_type": "relative_key"}, "position_embedding_type must be one of absolute"),
        ({"hidden_act": "tanh"}, "hidden_act"),
        ({"architectures": ["RobertaModel"], "max_position_embeddings": 2}, "must be above pad_token_id"),
        ({"architectures": ["BertLMHeadModel"]}, "unknown architecture 'BertLMHeadModel'"),
        ({"architectures": ["ModernBertModel"], "hidden_activation": "relu"}, "hidden_activation must be one of gelu"),
        ({"architectures": ["ModernBertModel"], "rope_scaling": {"type": "linear"}}, "rope_scaling = .* not supported"),
        ({"architectures": ["ModernBertModel"], "classifier_pooling": "max"}, "classifier_pooling must be one of cls"),
    ],
)
def test_what_is_not_served_is_refused(changed: dict[str, object], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        spec_from_config({"architectures": ["BertModel"], **BERT, **changed})


def test_other_devices_are_refused(tmp_path: Path) -> None:
    make_reference("bert", "Model").save_pretrained(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["architectures"] == ["BertModel"]
    back_end = choose_back_end(torch.device("cpu"))
    with pytest.raises(ConfigError, match="device cuda does not support attention in both directions yet"):
        load_model(tmp_path, back_end=replace(back_end, name="cuda"))
