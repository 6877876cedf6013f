"""Vectors of prompts: equal to transformers', and to the bit the same alone, batched, chunked and preempted."""

import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest

from quire import LLM, PoolingParams, SamplingParams
from quire.core.errors import ConfigError, InvalidRequestError, ModelError
from support.embedders import MAX_LEN, WIDTH, expected_embeddings, write_embedder, write_json, write_modules

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
KINDS = ("last", "mean", "cls")


def random_prompts(num: int, seed: int = 0, longest: int = 300) -> list[list[int]]:
    random = Random(seed)
    prompts = [[random.randrange(400) for _ in range(random.randrange(1, longest))] for _ in range(num)]
    prompts[-1] = prompts[0][:40] + prompts[-1]
    return prompts


def embed(llm: LLM, prompts: list[list[int]], **params: float | None) -> np.ndarray:
    outputs = llm.embed(prompts, pooling_params=PoolingParams(**params), use_tqdm=False)  # type: ignore[arg-type]
    return np.array([output.outputs.embedding for output in outputs], dtype=np.float32)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_embeddings_equal_those_of_transformers(tmp_path: Path, family: str, kind: str) -> None:
    folder, prompts = write_embedder(tmp_path / "model", family, kind), random_prompts(9)
    with LLM(folder, dtype="float32", max_num_batched_tokens=256) as llm:
        found = embed(llm, prompts)
    np.testing.assert_allclose(found, expected_embeddings(folder, prompts, kind), atol=1e-4)
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_embeddings_are_the_same_alone_batched_chunked_preempted_and_beside_generation(
    tmp_path: Path, kind: str, dtype: str
) -> None:
    """Generation runs in the steps of the embeddings, and takes their blocks where blocks are few."""
    folder, prompts = write_embedder(tmp_path / "model", "qwen3", kind), random_prompts(9)
    asked, params = random_prompts(6, seed=1, longest=20), replace(GREEDY, max_tokens=90)
    with LLM(folder, dtype=dtype, enable_prefix_caching=False, max_num_batched_tokens=MAX_LEN) as llm:
        alone = np.concatenate([embed(llm, [prompt]) for prompt in prompts])
        answers = [llm.generate(prompt, params, use_tqdm=False)[0].outputs[0].token_ids for prompt in asked]
    few: dict[str, Any] = {"num_kv_blocks": 36, "max_model_len": 400, "max_num_batched_tokens": 8}
    settings: dict[str, dict[str, Any]] = {
        "batched": {}, "chunked": {"max_num_batched_tokens": 24}, "recomputed": few,
        "swapped": few | {"num_swap_blocks": 60, "preemption_mode": "swap"},
    }  # fmt: skip
    for name, changes in settings.items():
        with LLM(folder, dtype=dtype, **changes) as llm:
            for _ in range(2):                            # the second time with hits in the prefix cache
                stream = llm.stream(asked, params)
                next(stream)
                outputs = llm.embed(prompts, use_tqdm=False)
                finished = {output.request_id: output for output in stream if output.finished}
                found = np.array([output.outputs.embedding for output in outputs], dtype=np.float32)
                assert np.array_equal(found, alone), name
                in_order = [finished[key].outputs[0].token_ids for key in sorted(finished, key=int)]
                assert in_order == answers, name
                preempted = [one for output in outputs if output.metrics for one in output.metrics.preemptions]
                assert bool(preempted) == ("num_kv_blocks" in changes), name
                is_swapped = any(one.num_swapped_blocks for one in preempted)
                assert is_swapped == (name == "swapped" and kind == "last"), "a sum is lost with its row"
            assert llm.kv_stats().used_blocks == 0


def test_step_of_embeddings_alone_computes_no_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from quire.model.decoder import Decoder

    def logits(model: Decoder, hidden: object) -> None:
        raise AssertionError("logits were computed")

    with LLM(write_embedder(tmp_path / "model"), dtype="float32") as llm:
        monkeypatch.setattr(Decoder, "logits", logits)
        assert embed(llm, [[1, 2, 3], [4]]).shape == (2, WIDTH)


def test_last_pooling_uses_the_prefix_cache_and_the_others_do_not(tmp_path: Path) -> None:
    prompt = list(range(100))
    for kind in KINDS:
        with LLM(write_embedder(tmp_path / kind, "llama", kind), dtype="float32") as llm:
            first, second = (llm.embed([prompt], use_tqdm=False)[0] for _ in range(2))
            assert first.outputs == second.outputs
            assert second.num_cached_tokens == (96 if kind == "last" else 0)
            answer = llm.generate([prompt], GREEDY, use_tqdm=False)[0]
            assert answer.num_cached_tokens == 96, "what an embedding computes, generation finds"


def test_text_is_tokenized_and_truncated_with_its_special_token(tmp_path: Path) -> None:
    with LLM(write_embedder(tmp_path / "model"), dtype="float32") as llm:
        text = "the quick brown fox jumps over the lazy dog"
        whole, cut = llm.embed(text, use_tqdm=False)[0], llm.embed(text, truncate_prompt_tokens=5, use_tqdm=False)[0]
        assert whole.prompt_token_ids[-1] == cut.prompt_token_ids[-1] == 1
        assert cut.prompt_token_ids[:4] == whole.prompt_token_ids[:4]
        assert len(cut.prompt_token_ids) == 5
        longest = llm.embed("fox " * 2000, truncate_prompt_tokens=-1, use_tqdm=False)[0]
        assert len(longest.prompt_token_ids) == MAX_LEN
        with pytest.raises(InvalidRequestError, match="maximum context"):
            llm.embed("fox " * 2000, use_tqdm=False)
        for wrong in (0, -2, MAX_LEN + 1):
            with pytest.raises(InvalidRequestError, match="truncate_prompt_tokens"):
                llm.embed(text, truncate_prompt_tokens=wrong, use_tqdm=False)


def test_dimensions_cut_and_normalize_again_where_the_model_has_them(tmp_path: Path) -> None:
    prompts = random_prompts(3)
    with LLM(write_embedder(tmp_path / "plain"), dtype="float32") as llm:
        with pytest.raises(InvalidRequestError, match="dimensions must be unset"):
            embed(llm, prompts, dimensions=8)
        whole, raw = embed(llm, prompts), embed(llm, prompts, use_activation=False)
    np.testing.assert_allclose(raw / np.linalg.norm(raw, axis=1, keepdims=True), whole, atol=1e-6)
    folder = write_embedder(tmp_path / "any", is_matryoshka=True)
    with LLM(folder, dtype="float32") as llm:
        cut = embed(llm, prompts, dimensions=8)
        expected = whole[:, :8] / np.linalg.norm(whole[:, :8], axis=1, keepdims=True)
        np.testing.assert_allclose(cut, expected, atol=1e-6)
        for wrong in (WIDTH + 1, 0):
            with pytest.raises(ValueError, match="dimensions"):
                embed(llm, prompts, dimensions=wrong)
    with LLM(tmp_path / "plain", dtype="float32", hf_overrides={"matryoshka_dimensions": [8, 16]}) as llm:
        assert np.array_equal(embed(llm, prompts, dimensions=8), cut)
        with pytest.raises(InvalidRequestError, match="one of 8, 16"):
            embed(llm, prompts, dimensions=9)


def test_runner_says_whether_a_model_pools(tmp_path: Path) -> None:
    plain, embedder = write_embedder(tmp_path / "plain", kind=None), write_embedder(tmp_path / "embedder", kind="mean")
    with LLM(plain) as llm, pytest.raises(InvalidRequestError, match=r"no 1_Pooling/config\.json; --runner pooling"):
        llm.embed([1, 2])
    with LLM(embedder, runner="generate") as llm, pytest.raises(InvalidRequestError, match="--runner generate"):
        llm.embed([1, 2])
    with LLM(plain, runner="pooling", dtype="float32") as llm:
        found = embed(llm, [[5, 6, 7]])
    np.testing.assert_allclose(found, expected_embeddings(plain, [[5, 6, 7]], "last"), atol=1e-4)


def test_embedder_without_normalization_and_with_a_pooling_mode_as_text(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model", kind="last", normalizes=False)
    write_json(folder / "1_Pooling/config.json", {"pooling_mode": "mean", "embedding_dimension": WIDTH})
    with LLM(folder, dtype="float32") as llm:
        found = embed(llm, [[5, 6, 7]])
    expected = expected_embeddings(folder, [[5, 6, 7]], "mean", normalizes=False)
    np.testing.assert_allclose(found, expected, atol=1e-4)
    (folder / "modules.json").unlink()
    with LLM(folder, dtype="float32") as llm:
        np.testing.assert_allclose(np.linalg.norm(embed(llm, [[5, 6, 7]])), 1, atol=1e-6)


def test_base_model_without_a_head_gives_embeddings_alone(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model", "llama", None, architectures=["LlamaModel"])
    with LLM(folder, dtype="float32") as llm:
        found = embed(llm, [[5, 6, 7]])
        with pytest.raises(InvalidRequestError, match="the model generates no text"):
            llm.generate([5, 6, 7], GREEDY)
    np.testing.assert_allclose(found, expected_embeddings(folder, [[5, 6, 7]], "last"), atol=1e-4)
    with pytest.raises(ModelError, match="no output head, and gives no vectors"):
        LLM(folder, runner="generate")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"1_Pooling/config.json": {"pooling_mode_max_tokens": True}}, "pooling_mode must be one of"),
        ({"1_Pooling/config.json": {"pooling_mode": "mean", "word_embedding_dimension": 3}}, "must be 72, got 3"),
        ({"1_Pooling/config.json": []}, "expected a JSON object"),
        ({"modules.json": [{"type": "a.Pooling", "path": "../x"}]}, "not a plain file name"),
        ({"modules.json": [{"type": "a.Pooling", "path": "1_Pooling"}, {"type": "a.Dense", "path": "2"}]}, "'Dense'"),
        ({"modules.json": {}}, "expected a list"),
        ({"modules.json": [{"path": "1_Pooling"}]}, "type and path"),
        ({"config.json": {"is_causal": False}}, "bidirectional"),
        ({"config.json": {"matryoshka_dimensions": [0]}}, "matryoshka_dimensions must be a list"),
    ],
)
def test_what_is_not_pooled_here_is_refused_by_name(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    folder = write_embedder(tmp_path / "model")
    for name, content in changed.items():
        old = json.loads((folder / name).read_text()) if name == "config.json" else None
        write_json(folder / name, content if old is None else old | content)
    with pytest.raises(ModelError, match=message):
        LLM(folder, runner="pooling")


def test_settings_are_checked(tmp_path: Path) -> None:
    for wrong in ("[]", "{", '{"vocab_size": 3}', '{"classifier_from_token": ["no"]}'):
        with pytest.raises((ConfigError, ModelError), match=r"hf_overrides|classifier_from_token"):
            LLM(write_embedder(tmp_path / "model"), runner="pooling", hf_overrides=wrong)
    for wrong in ({"use_activation": 1}, {"task": "classify"}, {"dimensions": True}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            PoolingParams(**wrong)  # type: ignore[arg-type]


def test_hub_folders_have_modules_behind_links(tmp_path: Path) -> None:
    """In the hub's cache the files of a snapshot are links to blobs beside it."""
    source = write_embedder(tmp_path / "source", kind="mean")
    snapshot, blobs = tmp_path / "models--a--b/snapshots/0", tmp_path / "models--a--b/blobs"
    (snapshot / "1_Pooling").mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(path for path in source.rglob("*") if path.is_file()):
        (blobs / str(number)).write_bytes(path.read_bytes())
        (snapshot / path.relative_to(source)).symlink_to(blobs / str(number))
    with LLM(snapshot, dtype="float32") as llm:
        assert embed(llm, [[5, 6]]).shape == (1, WIDTH)
    (snapshot / "1_Pooling/config.json").unlink()
    (snapshot / "1_Pooling/config.json").symlink_to(source / "1_Pooling/config.json")
    with pytest.raises(ModelError, match="outside of the model folder"):
        LLM(snapshot, runner="pooling")


def test_modules_of_a_reranker_of_another_family_are_refused(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model", "llama", None)
    write_modules(folder, ("Transformer", ""), ("LogitScore", "1_LogitScore"))
    with pytest.raises(ModelError, match="rerankers are supported of the architecture Qwen3ForCausalLM"):
        LLM(folder, runner="pooling")
