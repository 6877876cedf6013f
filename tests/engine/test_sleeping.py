"""Sleep of the engines of an LLM: memory is given back, answers have the same bits, and misuse is refused."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError, EngineAsleepError, InvalidRequestError, ModelError
from quire.engine.options import EngineOptions

pytestmark = pytest.mark.usefixtures("tests_frozen")

PROMPTS = ["def area(" * count for count in range(1, 12)]
PARAMS = SamplingParams(temperature=0.8, seed=3, max_tokens=16, logprobs=2, ignore_eos=True)


def resident_bytes() -> int:
    return 1024 * int(Path("/proc/self/status").read_text().partition("RssAnon:")[2].split()[0])


def answers(llm: LLM) -> list[Any]:
    return [(each.token_ids, each.logprobs) for output in llm.generate(PROMPTS, PARAMS) for each in output.outputs]


def values_of(llm: LLM) -> dict[str, Any]:
    return {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}


@pytest.mark.usefixtures("forked_processes")
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"data_parallel_size": 2},
        {"tensor_parallel_size": 2},
        {"spec_method": "ngram", "spec_tokens": 4, "enable_lora": True, "quantization": "int8"},
    ],
    ids=str,
)
def test_answers_are_the_same_after_each_sleep(settings: dict[str, Any]) -> None:
    with LLM(num_kv_blocks=512, max_num_seqs=8, enable_sleep_mode=True, **settings) as llm:
        expected, blocks = answers(llm), llm.kv_stats().total_blocks
        for level in (1, 2, 1):
            llm.sleep(level)
            assert repr(llm) == "<LLM quire-demo: asleep>"
            with pytest.raises(EngineAsleepError, match="sleeps"):
                llm.generate("def ")
            llm.wake_up()
            assert not llm.is_sleeping
            assert llm.kv_stats().total_blocks == blocks
            assert llm.kv_stats().prefix_hits_tokens == 0
            assert answers(llm) == expected
        llm.sleep()     # and closed asleep


def test_memory_of_each_part_is_given_back() -> None:
    with LLM(num_kv_blocks=2048, max_model_len=2048, enable_sleep_mode=True) as llm:
        llm.sleep(2)
        asleep = resident_bytes()
        llm.wake_up(["weights"])
        assert llm.is_sleeping
        weights_bytes, kv_bytes = llm._runner.ready.weights_bytes, llm._runner.ready.kv_bytes_per_token * 1900
        assert resident_bytes() - asleep > 0.8 * weights_bytes
        llm.wake_up(["kv_cache"])
        llm.generate({"prompt_token_ids": [7] * 1900}, SamplingParams(max_tokens=1))
        awake = resident_bytes()
        llm.sleep(1)
        assert awake - resident_bytes() > kv_bytes
        llm.sleep(2)
        assert awake - resident_bytes() > kv_bytes + 0.8 * weights_bytes


def test_pinned_prefixes_are_lost_and_counters_go_on() -> None:
    with LLM(num_kv_blocks=64, max_model_len=256, enable_sleep_mode=True) as llm:
        llm.pin_prefix("def area(radius):")
        llm.generate("def ", SamplingParams(max_tokens=4, ignore_eos=True))
        before = values_of(llm)
        llm.sleep()
        assert values_of(llm)["vllm:generation_tokens"] == before["vllm:generation_tokens"]
        assert llm.pinned_prefixes() == []
        llm.wake_up()
        llm.generate("def ", SamplingParams(max_tokens=4, ignore_eos=True))
        assert values_of(llm)["vllm:generation_tokens"] == before["vllm:generation_tokens"] + 4
        assert llm.kv_stats().pinned_blocks == 0


def test_open_iterators_and_bad_arguments_are_refused() -> None:
    with LLM(num_kv_blocks=64, enable_sleep_mode=True) as llm:
        stream = llm.stream("def ", SamplingParams(max_tokens=8, ignore_eos=True))
        next(stream)
        with pytest.raises(InvalidRequestError, match="requests are open"):
            llm.sleep()
        assert len(list(stream)) == 7
        with pytest.raises(InvalidRequestError, match="level must be 1"):
            llm.sleep(3)
        for tags in ("weights", ["scheduling"]):
            with pytest.raises(InvalidRequestError, match="tags must be"):
                llm.wake_up(tags)
        llm.wake_up()
    with LLM(num_kv_blocks=64) as llm, pytest.raises(ConfigError, match=r"LLM\(enable_sleep_mode=True\)"):
        llm.sleep()
    for settings in ({"nnodes": 2}, {"distributed_executor_backend": "ray"}):
        with pytest.raises(ConfigError, match="enable_sleep_mode True: ranks on several machines"):
            EngineOptions(enable_sleep_mode=True, tensor_parallel_size=2, **settings)


def test_files_of_another_model_do_not_wake_an_llm(demo_model: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(demo_model, tmp_path / "demo"))
    config = folder / "generation_config.json"
    with LLM(folder, num_kv_blocks=64, enable_sleep_mode=True, skip_tokenizer_init=True) as llm:
        before = config.read_text()
        llm.sleep(2)
        config.write_text(json.dumps(json.loads(before) | {"eos_token_id": 7}))
        with pytest.raises(ModelError, match="another model than before the sleep: eos_token_ids"):
            llm.wake_up()
        assert llm.is_sleeping
        config.write_text(before)
        llm.wake_up()
        assert llm.generate({"prompt_token_ids": [3, 4]}, SamplingParams(max_tokens=2))
