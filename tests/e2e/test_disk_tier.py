"""The disk tier whole: restarts, scopes, identities, faults, and a server that ends between two turns of a chat."""

import gc
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, SamplingParams
from quire.core.errors import ConfigError
from quire.core.plan import StepResult
from quire.extension.isas import usable_isas
from support.answers import answers_of
from support.server import ServerProcess, running_server

pytestmark = pytest.mark.skipif(not usable_isas(), reason="the C++ kernels were not built")

PROMPT = [3 + number * 7 % 280 for number in range(100)]
GREEDY = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True, logprobs=1)


def ask(
    directory: Path | None, prompt: list[int] = PROMPT, salt: str | None = None, **settings: Any  # noqa: ANN401
) -> tuple[Any, int]:
    """Return the answer of an engine of its own with its logprobs, and the prompt tokens that came from the disk."""
    sizes: dict[str, Any] = {"num_kv_blocks": 64, "max_num_seqs": 4}
    sizes |= {} if directory is None else {"kv_disk_size": "1GiB"}
    with LLM(kv_disk_dir=directory, **sizes | settings) as llm:
        given: dict[str, Any] = {"prompt_token_ids": prompt}
        if salt is not None:
            given["cache_salt"] = salt
        (output,) = llm.generate([given], GREEDY, use_tqdm=False)
        llm._engine.engine.scheduler.check()
        num_loaded = output.metrics.num_disk_tokens
        assert output.num_cached_tokens == num_loaded
        return [(each.token_ids, each.logprobs) for each in output.outputs], num_loaded


def test_restart_changes_no_bit_and_computes_only_the_rest(tmp_path: Path) -> None:
    expected, _ = ask(None)
    assert ask(tmp_path / "kept") == (expected, 0)
    assert ask(tmp_path / "kept") == (expected, 96)


def test_restart_in_the_middle_of_saving_loses_blocks_and_nothing_else(tmp_path: Path) -> None:
    expected, _ = ask(None)
    llm = LLM(kv_disk_dir=tmp_path, kv_disk_size="1GiB", num_kv_blocks=64, max_num_seqs=4, kv_disk_write_rate=400_000)
    llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    shutil.copytree(tmp_path, tmp_path.parent / "copy")  # what a SIGKILL at this point leaves
    llm.close()
    (tmp_path.parent / "copy").chmod(0o700)
    found, num_loaded = ask(tmp_path.parent / "copy")
    assert found == expected
    assert num_loaded <= 96


@pytest.mark.usefixtures("tests_frozen")
def test_engine_that_has_slept_finds_what_it_had_computed(tmp_path: Path) -> None:
    expected, _ = ask(None)
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="1GiB", num_kv_blocks=64, enable_sleep_mode=True) as llm:
        llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
        llm.sleep(level=1)
        llm.wake_up()
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    assert [(each.token_ids, each.logprobs) for each in output.outputs] == expected
    assert output.num_cached_tokens == 96


@pytest.mark.usefixtures("tests_frozen")
def test_requests_and_sessions_leave_no_object_behind(tmp_path: Path) -> None:
    """The plans before a fault are left out: they are bounded in bytes, and that bound is reached slowly."""
    prompts = [{"prompt_token_ids": [3 + (number + place) * 7 % 280 for place in range(40)]} for number in range(20)]
    params = SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True)
    sizes: dict[str, Any] = {"num_kv_blocks": 32, "max_num_seqs": 4, "max_model_len": 64, "fault_bytes": 0}
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="3MiB", **sizes) as llm:

        def num_objects_after_requests() -> int:
            for number in range(3):
                llm.generate(prompts, params, use_tqdm=False)
                session = llm.create_session(prompts[number]["prompt_token_ids"])
                session.save("one")
                session.delete()
                llm.restore_session("one").delete()
            disk = llm._engine.engine.disk
            assert disk is not None
            disk.drain(60.0)        # what waits for a slow disk has objects, too
            gc.collect()
            return len(gc.get_objects())

        for _ in range(2):
            num_objects_after_requests()
        before = num_objects_after_requests()
        for _ in range(3):
            after = num_objects_after_requests()
    assert after - before < 90      # 180 requests


@pytest.mark.usefixtures("forked_processes")
def test_engines_find_after_a_restart_what_any_of_them_has_stored(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {
        "kv_disk_dir": tmp_path, "kv_disk_size": "1GiB", "data_parallel_size": 2, "num_kv_blocks": 64,
        "max_num_seqs": 4,
    }  # fmt: skip
    prompts = [[number + 2 + place * 7 % 250 for place in range(100)] for number in range(4)]

    def outputs(llm: LLM, order: list[list[int]]) -> list[Any]:
        return [llm.generate([{"prompt_token_ids": each}], GREEDY, use_tqdm=False)[0] for each in order]

    with LLM(**sizes) as llm:
        expected = [answers_of(each) for each in outputs(llm, prompts)]
    assert len([*tmp_path.glob("*/[01]/blocks")]) == 2
    for order in (1, -1):       # routed to one engine each time, and to the other
        with LLM(**sizes) as llm:
            found = outputs(llm, prompts[::order])[::order]
            assert [each.num_cached_tokens for each in found] == [96] * 4
            assert [answers_of(each) for each in found] == expected
            assert llm.kv_stats().disk["bad_blocks"] == 0


def test_salts_are_apart_on_the_disk(tmp_path: Path) -> None:
    assert ask(tmp_path, salt="one")[1] == 0
    assert ask(tmp_path, salt="two")[1] == 0
    assert ask(tmp_path)[1] == 0
    assert ask(tmp_path, salt="one")[1] == 96


@pytest.mark.parametrize("other", [{"dtype": "bfloat16"}, {"kv_cache_dtype": "int8_per_token_head"}, {"block_size": 8},
                                   {"quantization": "int8"}], ids=str)  # fmt: skip
def test_other_bits_are_another_folder(tmp_path: Path, other: dict[str, Any]) -> None:
    ask(tmp_path, dtype="float32")
    assert ask(tmp_path, **{"dtype": "float32"} | other)[1] == 0
    assert ask(tmp_path, dtype="float32")[1] == 96


@pytest.mark.skipif(len(usable_isas()) < 2, reason="one instruction set")
def test_instruction_sets_do_not_read_from_each_other(tmp_path: Path) -> None:
    ask(tmp_path, cpu_isa=usable_isas()[0])
    assert ask(tmp_path, cpu_isa="portable")[1] == 0


def test_prompt_logprobs_are_computed_although_the_prompt_is_stored(tmp_path: Path) -> None:
    ask(tmp_path)
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="1GiB", num_kv_blocks=64) as llm:
        params = SamplingParams(max_tokens=1, prompt_logprobs=1)
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], params, use_tqdm=False)
    assert output.num_cached_tokens == 0
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == len(PROMPT)


def test_stream_that_is_closed_while_its_prefix_loads_leaves_no_block(tmp_path: Path) -> None:
    ask(tmp_path)
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="1GiB", num_kv_blocks=64) as llm:
        engine = llm._engine.engine
        engine.disk._store.finished = list                     # reads do not return
        params = SamplingParams(max_tokens=40, ignore_eos=True)
        stream = llm.stream([{"prompt_token_ids": PROMPT}, {"prompt_token_ids": [5]}], params)
        assert next(stream).prompt_token_ids == [5], "it passes the one that loads"
        assert engine.scheduler.cache.loads.num_loads == 1
        stream.close()  # type: ignore[attr-defined]
        engine.scheduler.check()
        assert llm.kv_stats().used_blocks == 0


def test_step_that_fails_changes_no_answer_of_a_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = ask(None)
    ask(tmp_path)
    with LLM(kv_disk_dir=tmp_path, kv_disk_size="1GiB", num_kv_blocks=64) as llm:
        engine = llm._engine.engine
        collect, left = engine.executor.collect, [1]

        def fail_once() -> StepResult:
            if left.pop() if left else 0:
                engine.executor._plans.clear()
                raise RuntimeError("a fault")
            return collect()

        monkeypatch.setattr(engine.executor, "collect", fail_once)
        with pytest.raises(RuntimeError, match="a fault"):
            llm.generate([{"prompt_token_ids": [9, 9]}], SamplingParams(max_tokens=2), use_tqdm=False)
        engine.scheduler.check()
        (output,) = llm.generate([{"prompt_token_ids": PROMPT}], GREEDY, use_tqdm=False)
    assert [(each.token_ids, each.logprobs) for each in output.outputs] == expected
    assert output.num_cached_tokens == 96


def test_read_only_folder_turns_the_tier_off_and_serves(tmp_path: Path) -> None:
    expected, _ = ask(None)
    (tmp_path / "file").write_text("")
    assert ask(tmp_path / "file" / "kept") == (expected, 0)


@pytest.mark.parametrize(("settings", "message"), [
    ({"kv_disk_size": "1GiB"}, "kv_disk_size '1GiB' needs kv_disk_dir"),
    ({"kv_disk_dir": "x", "kv_disk_size": "lots"}, "kv_disk_size must be bytes such as 512MiB or 4GiB, got 'lots'"),
    ({"kv_disk_dir": "x", "kv_disk_write_rate": 0}, "kv_disk_write_rate must be at least 1"),
    ({"kv_disk_dir": ""}, "kv_disk_dir is empty"),
    ({"kv_disk_dir": "x", "enable_prefix_caching": False}, "kv_disk_dir 'x' needs enable_prefix_caching"),
    ({"kv_disk_dir": "x", "memory_policy": "contiguous-max"}, "kv_disk_dir 'x' needs memory_policy 'paged'"),
    ({"kv_disk_dir": "x", "tensor_parallel_size": 2}, "kv_disk_dir 'x' needs tensor_parallel_size 1, got 2"),
    ({"kv_disk_dir": "x", "device": "cuda"}, "kv_disk_dir 'x' is not served on device 'cuda'"),
    ({"kv_disk_dir": "x", "record": "y"}, "record 'y' does not go with kv_disk_dir 'x'"),
])  # fmt: skip
def test_settings_that_it_does_not_reach_are_refused_by_name(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        LLM(**settings)
    assert message in str(raised.value)


def test_size_below_one_block_is_refused_with_the_least(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="the least is"):
        ask(tmp_path, kv_disk_size=1000)


def test_chat_goes_on_after_a_restart_of_the_server(tmp_path: Path) -> None:
    flags = ["--kv-disk-dir", str(tmp_path / "kept"), "--kv-disk-size", "64MiB", "--num-kv-blocks", "64"]
    body = {"model": "quire-demo", "prompt": PROMPT, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    texts = []
    for num_stored in (0, 96):
        with running_server(*flags) as server:
            answer = server.post("/v1/completions", body).json()
            texts.append(answer["choices"][0]["text"])
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == num_stored
            (explained,) = server.get(f"/v1/requests/{answer['id']}/explain").json()["prompts"]
            assert explained["num_disk_tokens"] == num_stored
            assert metric(server, "vllm:external_prefix_cache_hits_total") == num_stored
            server.signal(signal.SIGTERM)
            assert server.wait() == 0
    assert texts[0] == texts[1]


def metric(server: ServerProcess, name: str, label: str = "") -> float:
    """Return the sample of a server's page with this name and label."""
    lines = server.get("/metrics").text.splitlines()
    (found,) = [line for line in lines if line.startswith(name + "{") and label in line]
    return float(found.rpartition(" ")[2])
