"""Sequences beyond the original length of a model, by scaled rotary positions."""

from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from support.random_model import MAX_MODEL_LEN, write_random_model

ORIGINAL = MAX_MODEL_LEN // 4
SCALINGS: dict[str, tuple[dict[str, object], dict[str, Any]]] = {
    "yarn": ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL}, {}),
    "linear": ({"rope_type": "linear", "factor": 4.0}, {}),
    "dynamic": ({"rope_type": "dynamic", "factor": 4.0}, {"max_model_len": MAX_MODEL_LEN}),
}
PROMPTS = [[(7 * i * i + 3 * seed) % 290 for i in range(length)] for seed, length in enumerate((300, 3, 158))]
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, use_tqdm=False)]


@pytest.mark.parametrize("name", SCALINGS)
def test_answers_beyond_the_original_length_do_not_depend_on_the_batch(name: str, tmp_path: Path) -> None:
    scaling, asked = SCALINGS[name][0], dict(SCALINGS[name][1])
    folder = write_random_model(tmp_path, max_position_embeddings=ORIGINAL, rope_scaling=scaling)
    with LLM(folder, num_kv_blocks=64, device="cpu", **asked) as llm:
        alone = [tokens_of(llm, [prompt])[0] for prompt in PROMPTS]
        assert llm._engine.ready.limits.max_model_len == MAX_MODEL_LEN
    asked |= {"max_num_batched_tokens": 50, "enable_prefix_caching": False}
    with LLM(folder, num_kv_blocks=64, device="cpu", **asked) as llm:
        assert tokens_of(llm, PROMPTS) == alone


def test_dynamic_scaling_that_nobody_asked_for_leaves_answers_as_they_are(tmp_path: Path) -> None:
    plain, dynamic = tmp_path / "plain", tmp_path / "dynamic"
    for folder, changes in ((plain, {}), (dynamic, {"rope_scaling": SCALINGS["dynamic"][0]})):
        folder.mkdir()
        write_random_model(folder, max_position_embeddings=ORIGINAL, **changes)
    answers = []
    for folder in (plain, dynamic):
        with LLM(folder, num_kv_blocks=64, device="cpu") as llm:
            assert llm._engine.ready.limits.max_model_len == ORIGINAL
            answers.append(tokens_of(llm, PROMPTS[1:2]))
    assert answers[0] == answers[1]


def test_length_beyond_what_the_scaling_provides_is_refused(tmp_path: Path) -> None:
    folder = write_random_model(tmp_path, max_position_embeddings=ORIGINAL, rope_scaling=SCALINGS["linear"][0])
    with pytest.raises(ConfigError, match=r"max_model_len is 641, but the model has only 640 positions"):
        LLM(folder, max_model_len=MAX_MODEL_LEN + 1)


@pytest.mark.parametrize("asked", [{"max_model_len": 128}, {}], ids=str)
def test_four_million_positions_take_the_memory_of_those_in_use(asked: dict[str, Any], tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for folder, positions in ((ours, 2**22), (theirs, MAX_MODEL_LEN)):
        folder.mkdir()
        write_random_model(folder, max_position_embeddings=positions)
    answers = []
    for folder in (ours, theirs):
        with LLM(folder, num_kv_blocks=16, device="cpu", **asked) as llm:
            assert llm._engine.ready.limits.max_model_len == asked.get("max_model_len", 256)
            answers.append(tokens_of(llm, PROMPTS[1:2]))
    assert answers[0] == answers[1]
