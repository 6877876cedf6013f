"""LLM with several engines in processes of their own: the answers of one engine, to the bit, errors and clean ends."""

import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, BeamSearchParams, LoRARequest, RequestOutput, SamplingParams
from quire.core.errors import ConfigError, InvalidRequestError, ModelError, UnknownPrefixError
from quire.core.outputs import KVStats
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.fleet import offline_fleet as engines
from quire.engine.fleet.fleet import FleetSettings
from quire.engine.fleet.offline_fleet import BlockingFleet, total
from quire.engine.messages import EngineDeadError
from quire.engine.options import EngineOptions
from quire.extension.isas import usable_isas
from support.embedders import write_embedder, write_reranker
from support.peft_folders import write_adapter
from support.random_model import write_random_model
from support.server import is_running, wait_until
from support.stopping import stopped

pytestmark = pytest.mark.usefixtures("forked_processes")

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
SEEDLESS = SamplingParams(temperature=1.0, max_tokens=12, n=2, stop=["e"])
LONG = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
PROMPTS = ["def area(", *([5 + number, 6, 7, 8] for number in range(7))]
CHAT = [[{"role": "user", "content": text}] for text in ("Hello", "What is 2 + 2?", "Name a colour.")]
SETTINGS: dict[str, Any] = {"num_kv_blocks": 256, "max_model_len": 1024, "stall_limit": 600.0}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="module")
def fleet(demo_model: Path) -> Iterator[LLM]:
    with LLM(demo_model, **SETTINGS, data_parallel_size=2) as llm:
        yield llm
        pids = pids_of(llm)
    assert not any(is_running(pid) for pid in pids)


def pids_of(llm: LLM) -> list[int]:
    assert isinstance(llm._runner, BlockingFleet)
    return [engine._connection.engine.process.pid for engine in llm._runner._client.engines]  # type: ignore[attr-defined]


def bits(outputs: list[RequestOutput]) -> list[object]:
    """Return all of outputs that does not depend on caches and clocks."""
    return [
        (each.request_id, each.prompt, each.prompt_token_ids, each.prompt_logprobs, list(map(asdict, each.outputs)))
        for each in outputs
    ]


def engines_of(outputs: list[RequestOutput]) -> set[int]:
    return {each.metrics.engine for each in outputs if each.metrics is not None}


def answers(llm: LLM, prompts: list[Any] = PROMPTS) -> tuple[list[object], list[RequestOutput]]:
    """Return the bits of answers of many kinds to eight prompts, and the outputs."""
    found = llm.generate(prompts, [GREEDY, SEEDLESS] * 4, use_tqdm=False)
    found += llm.chat(CHAT, SEEDLESS, use_tqdm=False)
    found += llm.beam_search(prompts[:3], BeamSearchParams(3, 5), use_tqdm=False)
    pattern = SamplingParams(max_tokens=12, structured_outputs=StructuredOutputsParams(regex="(ab|cd)+"))
    found += llm.generate(prompts[:2], pattern, use_tqdm=False)
    return bits(found), found


def test_all_that_is_generated_has_the_bits_of_one_engine(demo_model: Path, fleet: LLM) -> None:
    with LLM(demo_model, **SETTINGS) as llm:
        assert llm.vocab_size == fleet.vocab_size
        expected, _ = answers(llm)
    found, outputs = answers(fleet)
    assert found == expected
    assert engines_of(outputs) == {0, 1}
    assert fleet.kv_stats().used_blocks == 0
    assert fleet.kv_stats().total_blocks == 256


# An address of its own for each process of tests: all of 127.0.0.0/8 is this machine.
HOST = f"127.{1 + os.getpid() // 65536 % 250}.{os.getpid() // 256 % 256}.{os.getpid() % 256}"


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "int8_per_token_head"])
def test_prompts_that_are_computed_apart_change_no_bit(demo_model: Path, kv_cache_dtype: str) -> None:
    salted: list[Any] = [
        {"prompt_token_ids": [5 + (number + 3 * place) % 280 for place in range(90)], "cache_salt": str(number % 2)}
        for number in range(8)
    ]
    scored = replace(SEEDLESS, logprobs=3, presence_penalty=0.5, min_tokens=2, logit_bias={7: 2.0})

    def all_answers(llm: LLM) -> tuple[list[object], list[RequestOutput]]:
        found, outputs = answers(llm, salted)
        more = llm.generate(salted, scored, use_tqdm=False)
        return found + bits(more), outputs + more

    settings: dict[str, Any] = SETTINGS | {"kv_cache_dtype": kv_cache_dtype, "num_kv_blocks": 900}
    with LLM(demo_model, **settings) as llm:
        expected, _ = all_answers(llm)
    with LLM(demo_model, **settings, data_parallel_size=3, prefill_engines=2, prefill_least_tokens=33, kv_host=HOST,
             kv_port=15200) as llm:  # fmt: skip
        assert isinstance(llm._runner, BlockingFleet)
        decodes = llm._runner._client.engines[2]
        wait_until(lambda: decodes.state.kv is not None and decodes.state.kv.transfer.get("peers_connected") == 2)
        found, outputs = all_answers(llm)
        assert found == expected
        assert engines_of(outputs) == {2}
        fetched = [each.metrics.num_peer_tokens for each in outputs if each.metrics is not None]
        num_fetched = sum(map(bool, fetched))
        assert num_fetched >= 4, "each prompt without prompt_logprobs, once"
        moved = llm.kv_stats().transfer
        assert moved["tickets_made"] >= moved["tickets_redeemed"] >= num_fetched
        wait_until(lambda: llm.kv_stats().used_blocks == 0 and llm.kv_stats().transfer["held_blocks"] == 0)


WRONG_APART: list[tuple[dict[str, Any], str]] = [
    ({"data_parallel_size": 1, "prefill_engines": 1}, "prefill_engines 1 must be below data_parallel_size 1"),
    ({"prefill_engines": 2}, "prefill_engines 2 must be below data_parallel_size 2"),
    ({"prefill_engines": 1, "enable_prefix_caching": False}, "prefill_engines 1 needs enable_prefix_caching True"),
    ({"prefill_engines": 1, "tensor_parallel_size": 2}, "prefill_engines 1 needs tensor_parallel_size 1, got 2"),
    ({"prefill_engines": 2, "kv_port": 65535, "data_parallel_size": 3}, "must leave a port for each of 2"),
    ({"prefill_engines": 1, "kv_role": "both"}, "does not go with kv_role 'both'"),
    ({"prefill_least_tokens": 0}, "prefill_least_tokens"),
]


@pytest.mark.parametrize(("settings", "message"), WRONG_APART)
def test_engines_for_prompts_that_cannot_be_are_an_error(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineOptions("model", **{"data_parallel_size": 2} | settings)


def test_engines_of_one_server_listen_to_no_other_machine(demo_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_host 0\.0\.0\.0 must be an address of this machine alone"):
        LLM(demo_model, **SETTINGS, data_parallel_size=2, prefill_engines=1, kv_host="0.0.0.0")


def test_streams_give_growing_outputs_of_all_requests_and_end_early(fleet: LLM) -> None:
    prompts = PROMPTS[:4]
    expected = {o.request_id[-1]: o for o in fleet.generate(prompts, LONG, use_tqdm=False)}
    assert len(expected) == 4
    last: dict[str, RequestOutput] = {}
    for output in fleet.stream(prompts, LONG):
        if (before := last.get(output.request_id)) is not None:
            assert not before.finished
            assert output.outputs[0].token_ids[: len(before.outputs[0].token_ids)] == before.outputs[0].token_ids
        last[output.request_id] = output
    in_order = [last[name].outputs[0].token_ids for name in sorted(last, key=int)]
    assert in_order == [each.outputs[0].token_ids for each in expected.values()]
    outputs = fleet.stream(prompts, LONG)
    next(outputs)
    beside = fleet.generate(prompts[:1], GREEDY, use_tqdm=False)     # while the others run
    assert beside[0].finished
    outputs.close()  # type: ignore[attr-defined]
    assert fleet.kv_stats().used_blocks == 0


def test_refused_calls_start_nothing_and_use_no_numbers(fleet: LLM) -> None:
    before = int(fleet.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].request_id)
    grammar = SamplingParams(structured_outputs=StructuredOutputsParams(regex="("))
    refused: dict[str, Any] = {"prompt": ([5] * 2000, GREEDY), "structured_outputs": ([5, 6], grammar)}
    for param, (prompt, params) in refused.items():
        with pytest.raises(InvalidRequestError) as raised:
            fleet.generate([PROMPTS[0], prompt], [GREEDY, params], use_tqdm=False)
        assert raised.value.param == param
    with pytest.raises(InvalidRequestError, match="enable_lora"):
        fleet.generate(PROMPTS[0], GREEDY, lora_request=LoRARequest("a", 1, "nowhere"), use_tqdm=False)
    assert int(fleet.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].request_id) == before + 1


def test_pins_and_metrics_are_of_all_engines(fleet: LLM) -> None:
    pins = [fleet.pin_prefix([first] * 40) for first in (50, 60)]
    assert fleet.pinned_prefixes() == pins
    assert fleet.kv_stats().pinned_blocks == 6
    again = fleet.generate([[50] * 40 + [1], [60] * 40 + [1]], replace(GREEDY, prompt_logprobs=None), use_tqdm=False)
    assert [each.num_cached_tokens for each in again] == [40, 40]
    for pin in pins:
        fleet.unpin_prefix(pin.id)
    assert fleet.kv_stats().pinned_blocks == 0
    with pytest.raises(UnknownPrefixError):
        fleet.unpin_prefix(pins[0].id)
    values = {m.labels["engine"]: m for m in fleet.get_metrics() if m.name == "vllm:generation_tokens"}
    assert set(values) == {"0", "1"}


def test_states_of_caches_are_added() -> None:
    first = KVStats(16, 8, 3, 1, 4, 0, 2, 5, {"1": 3, "2": 0}, blocks_by_owner={"a": 3}, swap_s=0.5)
    second = KVStats(16, 8, 2, 0, 6, 1, 1, 0, {"1": 1, "2": 1}, blocks_by_owner={"b": 2}, swap_s=0.25)
    added = KVStats(16, 16, 5, 1, 10, 1, 3, 5, {"1": 4, "2": 1}, blocks_by_owner={"a": 3, "b": 2}, swap_s=0.75)
    assert total([first, second]) == added
    assert total([first]) == first


def test_dead_engine_fails_the_call_and_is_started_again(demo_model: Path) -> None:
    with LLM(demo_model, **SETTINGS, data_parallel_size=2) as llm:
        expected = bits(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
        dead, living = pids_of(llm)
        with stopped(dead):     # no answer ends before the kill
            outputs = llm.stream(PROMPTS[:4], LONG)
            next(outputs)
            os.kill(dead, signal.SIGKILL)
            with pytest.raises(EngineDeadError, match="killed by signal 9"):
                for _ in outputs:
                    pass
        assert len(llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)) == 1      # taken by the other one
        assert llm.kv_stats().used_blocks == 0
        wait_until(lambda: is_running(pids_of(llm)[0]) and llm.kv_stats().total_blocks == 256)
        found = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [row[1:] for row in bits(found)] == [row[1:] for row in expected]  # type: ignore[index]
        pids = [*pids_of(llm), living]
        unread = llm.stream(PROMPTS[:1], LONG)
        next(unread)
    assert not any(is_running(pid) for pid in pids)
    wait_until(lambda: not any(each.name.startswith("engine stop") for each in threading.enumerate()))
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        next(unread)
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        llm.kv_stats()


@pytest.mark.usefixtures("tests_frozen")
def test_engines_end_with_the_object_and_with_the_process(demo_model: Path) -> None:
    llm = LLM(demo_model, **SETTINGS, data_parallel_size=2)
    pids = pids_of(llm)
    del llm
    gc.collect()
    assert not any(is_running(pid) for pid in pids)
    script = (
        "import sys; from quire import LLM; llm = LLM(sys.argv[1], max_model_len=64, data_parallel_size=2);"
        "print(*[e._connection.engine.process.pid for e in llm._runner._client.engines])"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, str(demo_model)], capture_output=True, text=True, timeout=300, check=True
    )
    assert run.stderr == ""
    wait_until(lambda: not any(is_running(int(pid)) for pid in run.stdout.split()))


@pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")
def test_each_engine_may_have_several_ranks_and_adapters(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    folder = write_random_model(tmp_path / "model")
    write_adapter(tmp_path / "adapter", folder, 1)
    settings: dict[str, Any] = {"num_kv_blocks": 64, "max_model_len": 96, "enable_lora": True, "stall_limit": 600.0}
    adapters = [None, LoRARequest("a", 1, str(tmp_path / "adapter"))] * 2
    prompts = [[5, 9, 11, 200, 31] * 9, [7] * 40, [5, 9, 11], [3] * 20]
    with LLM(folder, **settings) as llm:
        expected = bits(llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False))
    with LLM(folder, **settings, data_parallel_size=2, tensor_parallel_size=2) as llm:
        found = llm.generate(prompts, GREEDY, lora_request=adapters, use_tqdm=False)
        pids = pids_of(llm)
    assert bits(found) == expected
    assert engines_of(found) == {0, 1}
    assert not any(is_running(pid) for pid in pids)


def test_scores_are_those_of_one_engine(tmp_path: Path) -> None:
    folder = write_reranker(tmp_path / "model")
    texts = [f"text {number}, some words" for number in range(6)]

    def scores(llm: LLM) -> list[float]:
        return [each.outputs.score for each in llm.score("a question", texts, use_tqdm=False)]

    with LLM(folder, num_kv_blocks=64) as llm:
        expected = scores(llm)
    assert len(set(expected)) == len(texts)
    with LLM(folder, num_kv_blocks=64, data_parallel_size=2) as llm:
        assert scores(llm) == expected


def test_vectors_are_those_of_one_engine(tmp_path: Path) -> None:
    folder = write_embedder(tmp_path / "model", "qwen3", "last")
    prompts = [[number + 1, 5, 9] * 7 for number in range(6)]

    def vectors(llm: LLM) -> list[list[float]]:
        return [each.outputs.embedding for each in llm.embed(prompts, use_tqdm=False)]

    with LLM(folder, num_kv_blocks=64) as llm:
        expected = vectors(llm)
    with LLM(folder, num_kv_blocks=64, data_parallel_size=2) as llm:
        assert vectors(llm) == expected


def test_what_several_engines_do_not_have_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nnodes 2 does not go with data_parallel_size 2: start replicas on several"):
        LLM(data_parallel_size=2, nnodes=2, tensor_parallel_size=2)
    with pytest.raises(ConfigError, match="num_kv_blocks is 1, but each of 2 engines"):
        LLM(data_parallel_size=2, num_kv_blocks=1)
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(tmp_path, data_parallel_size=2)


def test_time_limits_are_those_of_the_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[FleetSettings] = []

    async def connect(processes: object, settings: FleetSettings) -> None:
        given.append(settings)
        raise EngineDeadError("not started")

    monkeypatch.setattr(engines, "spawn_engines", lambda options: [])
    monkeypatch.setattr(engines, "connect_fleet", connect)
    with pytest.raises(EngineDeadError, match="not started"):
        LLM(data_parallel_size=2, start_timeout=7.0, stall_limit=3.0)
    assert [(each.start_timeout_s, each.options.stall_limit) for each in given] == [(7.0, 3.0)]
