"""Encoders and cross-encoders behind `LLM`: equal to transformers', the same bits in any batch, no KV cache."""

import math
from pathlib import Path
from random import Random

import numpy as np
import pytest
import torch

from quire import LLM, PoolingParams
from quire.core.errors import ConfigError, ContextLengthError, InvalidRequestError, ModelError
from quire.text.tokenizer import Tokenizer
from support.embedders import expected_embeddings, write_json
from support.encoders import CLS, LONGEST, write_encoder

TEXTS = ["the quick brown fox", "jumps over", "the lazy dog: stop stopping the stops", "café"]
QUERY = "the quick brown fox jumps"


def random_prompts(num: int) -> list[list[int]]:
    random = Random(0)
    return [[random.randrange(5, 300) for _ in range(random.randrange(1, LONGEST + 1))] for _ in range(num)]


def embed(llm: LLM, prompts: list[list[int]]) -> np.ndarray:
    outputs = llm.embed(prompts, use_tqdm=False)
    return np.array([output.outputs.embedding for output in outputs], dtype=np.float32)


@pytest.mark.parametrize(
    ("family", "kind"), [("Bert", "mean"), ("Roberta", "cls"), ("DistilBert", None), ("ModernBert", "mean")]
)
def test_embeddings_equal_transformers_alone_and_batched(tmp_path: Path, family: str, kind: str | None) -> None:
    folder, prompts = write_encoder(tmp_path, family, kind=kind), random_prompts(9)
    with LLM(folder, dtype="float32", max_num_batched_tokens=LONGEST, max_num_seqs=4) as llm:
        found = embed(llm, prompts)
        assert np.array_equal(found, np.concatenate([embed(llm, [prompt]) for prompt in prompts]))
        stats = llm.kv_stats()
        assert (stats.total_blocks, stats.used_blocks, stats.usage) == (0, 0, 0.0)
    with LLM(folder, dtype="float32") as llm:
        assert np.array_equal(found, embed(llm, prompts))
        assert llm.embed(TEXTS[:1])[0].prompt_token_ids[0] == CLS
        with pytest.raises(ContextLengthError, match=rf"has {LONGEST + 1} tokens, .* length is {LONGEST} tokens"):
            llm.embed([[7] * (LONGEST + 1)])
        with pytest.raises(InvalidRequestError, match="the model generates no text"):
            llm.generate(TEXTS[0])
        assert len(llm.embed([[7] * LONGEST])) == 1
    np.testing.assert_allclose(found, expected_embeddings(folder, prompts, kind or "cls"), atol=1e-4)


def test_bits_are_the_same_in_bfloat16_and_int8_weights_load(tmp_path: Path) -> None:
    folder, prompts = write_encoder(tmp_path, "Bert", kind="mean"), random_prompts(7)
    for settings in ({"dtype": "bfloat16"}, {"dtype": "float32", "quantization": "int8"}):
        with LLM(folder, **settings) as llm:  # type: ignore[arg-type]
            together = embed(llm, prompts)
            assert np.array_equal(together, np.concatenate([embed(llm, [prompt]) for prompt in prompts]))


@pytest.mark.parametrize(
    ("family", "changes"),
    [("Bert", {}), ("XLMRoberta", {}), ("ModernBert", {}), ("ModernBert", {"classifier_pooling": "mean"})],
)
def test_scores_of_cross_encoders_equal_transformers(tmp_path: Path, family: str, changes: dict[str, object]) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = write_encoder(tmp_path, family, end="ForSequenceClassification", num_labels=1, **changes)
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = Tokenizer.from_folder(folder)
    with LLM(folder, dtype="float32") as llm:
        outputs = llm.score(QUERY, TEXTS)
        alone = [llm.score(QUERY, text)[0].outputs.score for text in TEXTS]
        raw = llm.score(QUERY, TEXTS, pooling_params=PoolingParams(use_activation=False))
        cut = llm.score(QUERY, TEXTS[2], truncate_prompt_tokens=9)[0].prompt_token_ids
        with pytest.raises(InvalidRequestError, match="the model scores pairs of texts: it gives no embeddings"):
            llm.embed(TEXTS)
        with pytest.raises(InvalidRequestError, match="without an instruction"):
            llm.score(QUERY, TEXTS, instruction="find it")
        with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens must be at least"):
            llm.score(QUERY, TEXTS, truncate_prompt_tokens=3)
        with pytest.raises(ContextLengthError, match="maximum context length"):
            llm.score(QUERY * 30, TEXTS)
    for text, output, logit in zip(TEXTS, outputs, raw, strict=True):
        ids, second = tokenizer.encode_pair(QUERY, text, 0, keeps_last=False)
        assert (second > 0) == (family == "Bert")
        assert output.prompt_token_ids == ids
        types = {"token_type_ids": torch.arange(len(ids))[None].ge(second).long()} if second else {}
        with torch.inference_mode():
            expected = model(torch.tensor([ids]), **types).logits.item()
        assert logit.outputs.score == pytest.approx(expected, abs=1e-4)
        assert output.outputs.score == pytest.approx(1 / (1 + math.exp(-expected)), abs=1e-4)
    assert alone == [output.outputs.score for output in outputs]
    assert len(cut) == 9


def test_activation_of_the_folder_is_the_default(tmp_path: Path) -> None:
    identity = {"activation_fn": "torch.nn.modules.linear.Identity", "version": "5"}
    folder = write_encoder(
        tmp_path, "Bert", end="ForSequenceClassification", num_labels=1, sentence_transformers=identity
    )
    with LLM(folder, dtype="float32") as llm:
        raw, default, activated = (
            llm.score(QUERY, TEXTS[0], pooling_params=PoolingParams(use_activation=each))[0].outputs.score
            for each in (False, None, True)
        )
    assert default == raw
    assert activated == pytest.approx(1 / (1 + math.exp(-raw)))


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"max_num_batched_tokens": 10, "max_model_len": 20}, ConfigError, "max_num_batched_tokens is 10, but prompts"),
        ({"num_kv_blocks": 8}, ConfigError, "num_kv_blocks is set, but the model keeps no keys and values"),
        ({"tensor_parallel_size": 2}, ConfigError, "tensor_parallel_size 2: not supported for an encoder"),
        ({"data_parallel_size": 2}, ConfigError, "data_parallel_size 2: not supported for an encoder"),
        ({"enable_lora": True}, ConfigError, "enable_lora True: not supported for an encoder"),
        ({"kv_cache_dtype": "fp8"}, ConfigError, "kv_cache_dtype 'fp8': not supported for an encoder"),
        ({"runner": "generate"}, ModelError, "the model is an encoder, and gives no vectors: it runs with --runner"),
        ({"max_model_len": LONGEST + 1}, ConfigError, f"the model has only {LONGEST} positions"),
    ],
    ids=str,
)
def test_what_an_encoder_does_not_have_is_refused(
    settings: dict[str, object], error: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(error, match=message):
        LLM(write_encoder(tmp_path, "Bert"), **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(("length", "longest"), [(20, 20), (None, LONGEST), (5 * LONGEST, LONGEST)])
def test_longest_text_is_that_of_sentence_transformers(tmp_path: Path, length: int | None, longest: int) -> None:
    folder = write_encoder(tmp_path, "Bert", kind="mean")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": length, "do_lower_case": False})
    with LLM(folder) as llm:
        assert len(llm.embed([[7] * longest])) == 1
        with pytest.raises(ContextLengthError, match=rf"length is {longest} tokens"):
            llm.embed([[7] * (longest + 1)])
        cut = llm.embed([[7] * (longest + 9)], truncate_prompt_tokens=-1, use_tqdm=False)
        assert len(cut[0].prompt_token_ids) == longest
    with LLM(folder, max_model_len=30) as llm:
        assert len(llm.embed([[7] * 30])) == 1


@pytest.mark.parametrize(("end", "changes"), [("Model", {}), ("ForSequenceClassification", {"num_labels": 1})])
def test_texts_are_lowercased_if_the_folder_says_so(tmp_path: Path, end: str, changes: dict[str, object]) -> None:
    folder = write_encoder(tmp_path, "Bert", end=end, kind="mean" if end == "Model" else None, **changes)
    capitals = [text.upper() for text in TEXTS[:3]]

    def vectors(llm: LLM, texts: list[str]) -> list[object]:
        if end == "Model":
            prompts = [*texts, {"prompt": texts[0]}, [7, 8]]
            return [output.outputs.embedding for output in llm.embed(prompts)]  # type: ignore[arg-type]
        return [output.outputs.score for output in llm.score(texts[0], texts)]

    with LLM(folder, dtype="float32") as llm:
        lower = vectors(llm, TEXTS[:3])
        assert vectors(llm, capitals) != lower
    write_json(folder / "sentence_bert_config.json", {"do_lower_case": True})
    with LLM(folder, dtype="float32") as llm:
        assert vectors(llm, capitals) == lower


def test_length_that_is_no_size_is_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "Bert", kind="mean")
    write_json(folder / "sentence_bert_config.json", {"max_seq_length": 0})
    with pytest.raises(ModelError, match=r"sentence_bert_config.json: max_seq_length must be an integer from 1"):
        LLM(folder)


def test_budget_that_is_set_limits_texts(tmp_path: Path) -> None:
    with LLM(write_encoder(tmp_path, "Bert"), max_num_batched_tokens=12) as llm:
        assert len(llm.embed([[7] * 12, [8] * 11])) == 2
        with pytest.raises(ContextLengthError, match="length is 12 tokens"):
            llm.embed([[7] * 13])


def test_classifiers_of_several_labels_are_refused(tmp_path: Path) -> None:
    folder = write_encoder(tmp_path, "Bert", end="ForSequenceClassification", num_labels=3)
    with pytest.raises(ModelError, match=r"classifiers are served of one label, .* got 3"):
        LLM(folder)
