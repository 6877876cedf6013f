"""Answers end at the end-of-sequence token of the tokenizer, too: chat fine-tunes often change it there alone."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

from quire import LLM, SamplingParams

PROMPT = "def add(first, second):"


def test_answer_ends_at_the_tokenizers_end_of_sequence_token(demo_model: Path, tmp_path: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(str(demo_model), num_kv_blocks=16, device="cpu") as llm:
        (output,) = llm.generate([PROMPT], greedy, use_tqdm=False)
        assert llm.tokenizer is not None
        tokens = list(output.outputs[0].token_ids)
        vocabulary = json.loads((demo_model / "tokenizer.json").read_text())["model"]["vocab"]
    names = {index: text for text, index in vocabulary.items()}
    folder = tmp_path / "model"
    shutil.copytree(demo_model, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    last = next(index for index in range(2, len(tokens)) if tokens[index] not in tokens[:index])
    config["eos_token"] = names[tokens[last]]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    with LLM(str(folder), num_kv_blocks=16, device="cpu") as llm:
        (ended,) = llm.generate([PROMPT], greedy, use_tqdm=False)
        (longer,) = llm.generate([PROMPT], replace(greedy, ignore_eos=True), use_tqdm=False)
    assert list(ended.outputs[0].token_ids) == tokens[: last + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", None)
    assert list(longer.outputs[0].token_ids)[: len(tokens)] == tokens


def test_answer_ended_by_a_further_end_of_sequence_token_tells_which(demo_model: Path) -> None:
    greedy = SamplingParams(temperature=0.0, max_tokens=12)
    with LLM(str(demo_model), num_kv_blocks=16, device="cpu") as llm:
        (output,) = llm.generate([PROMPT], greedy, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    last = next(index for index in range(2, len(tokens)) if tokens[index] not in tokens[:index])
    ends = json.dumps({"eos_token_id": [0, tokens[last]]})
    with LLM(str(demo_model), num_kv_blocks=16, device="cpu", override_generation_config=ends) as llm:
        (ended,) = llm.generate([PROMPT], greedy, use_tqdm=False)
    assert list(ended.outputs[0].token_ids) == tokens[: last + 1]
    assert (ended.outputs[0].finish_reason, ended.outputs[0].stop_reason) == ("stop", tokens[last])
