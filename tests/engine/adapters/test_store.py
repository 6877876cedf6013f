"""The store: loads beside the steps, limits in memory and in steps, the oldest evicted, failures of one request."""

import shutil
import threading
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from quire import LLM, LoRARequest, RequestOutput, SamplingParams
from quire.core.errors import ConfigError, InvalidRequestError
from quire.core.lora import AdapterUse
from quire.engine.adapters import store as store_module
from quire.engine.adapters.store import AdapterStore
from quire.engine.options import EngineOptions
from quire.kernels.reference.back_ends import TORCH
from quire.model.loader import load_model
from support.peft_folders import write_adapter
from support.random_model import write_random_model

PROMPTS = [[5, 6, 7], [8, 9], [10, 11, 12, 13], [20]]
PARAMS = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model."""
    return write_random_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def adapters(model: Path, tmp_path: Path) -> list[LoRARequest]:
    """Write an adapter for each prompt."""
    folders = [write_adapter(tmp_path / f"adapter {seed}", model, seed) for seed in range(len(PROMPTS))]
    return [LoRARequest(folder.name, number, str(folder)) for number, folder in enumerate(folders, 1)]


def store_of(llm: LLM) -> AdapterStore:
    store = llm._engine.engine.adapters
    assert isinstance(store, AdapterStore)
    return store


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def alone(model: Path, adapters: list[LoRARequest]) -> list[list[int]]:
    with LLM(model, enable_lora=True, max_loras=8) as llm:
        each = zip(PROMPTS, adapters, strict=True)
        return [tokens(llm.generate([prompt], PARAMS, use_tqdm=False, lora_request=own))[0] for prompt, own in each]


@pytest.mark.parametrize(("max_loras", "max_cpu_loras"), [(1, 1), (1, 2), (2, 3), (4, None), (None, 2)])
def test_limits_hold_up_requests_and_change_no_token(
    max_loras: int | None, max_cpu_loras: int | None, model: Path, adapters: list[LoRARequest]
) -> None:
    expected = alone(model, adapters)
    with LLM(model, enable_lora=True, max_loras=max_loras, max_cpu_loras=max_cpu_loras) as llm:
        store, engine, most_running, most_in_memory = store_of(llm), llm._engine.engine, 0, 0
        found: dict[str, RequestOutput] = {}
        for output in llm.stream(PROMPTS * 2, PARAMS, lora_request=[*adapters, None, *adapters[1:]]):
            found[output.request_id] = output
            running = {each.scope.adapter for each in engine.scheduler.queues.running} - {None}
            most_running, most_in_memory = max(most_running, len(running)), max(most_in_memory, store.num_in_memory)
        assert most_running <= (max_loras or 2)
        assert most_in_memory <= (max_cpu_loras or 4)
        assert store.num_bytes > 0
        in_order = [found[number].outputs[0].token_ids for number in sorted(found, key=int)]
    assert in_order[:4] == expected
    assert in_order[5:] == expected[1:]
    assert in_order[4] != expected[0]


def test_use_names_the_adapters_of_running_and_of_waiting_requests(model: Path, adapters: list[LoRARequest]) -> None:
    with LLM(model, enable_lora=True, max_loras=2) as llm:
        store = store_of(llm)
        assert store.use() == AdapterUse(2, 0, 0, (), ())
        outputs = llm.stream(PROMPTS * 2, PARAMS, lora_request=[*adapters, *adapters[:2], None, adapters[3]])
        next(outputs)
        names = [each.lora_name for each in adapters]
        assert store.use() == AdapterUse(2, 2, 4, tuple(names[:2]), tuple(names)), "they wait behind the third"
        assert len(list(outputs)) > 0
        assert store.use() == AdapterUse(2, 0, 0, (), ())


def test_use_shows_so_many_names_and_counts_all(
    model: Path, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "MAX_SHOWN_NAMES", 1)
    with LLM(model, enable_lora=True, max_loras=2) as llm:
        outputs = llm.stream(PROMPTS, PARAMS, lora_request=adapters)
        next(outputs)
        names = [each.lora_name for each in adapters]
        assert store_of(llm).use() == AdapterUse(2, 2, 2, (names[0],), (names[2],))
        outputs.close()


def test_requests_without_an_adapter_run_while_one_is_loaded(
    model: Path, adapters: list[LoRARequest], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step loop goes on; the request that waits says for what."""
    with LLM(model, enable_lora=True, max_loras=1) as llm:
        (expected,) = tokens(llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False, lora_request=adapters[0]))
        llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False, lora_request=adapters[1])  # evicts the first
        store, may_load = store_of(llm), threading.Event()
        load = AdapterStore._load

        def load_later(self: AdapterStore, adapter: object) -> None:
            may_load.wait(60)
            load(self, adapter)  # type: ignore[arg-type]

        monkeypatch.setattr(AdapterStore, "_load", load_later)
        outputs = llm.stream([PROMPTS[0], PROMPTS[1]], PARAMS, lora_request=[adapters[0], None])
        ended = []
        for output in outputs:
            if output.finished:
                ended.append(output)
                assert llm._engine.engine.scheduler.queues.wait_reasons.current == "adapter" or may_load.is_set()
                may_load.set()
        assert [each.request_id for each in ended] == ["3", "2"]
        assert ended[1].outputs[0].token_ids == expected
        assert store.num_in_memory == 1


def test_adapter_of_a_running_request_stays_when_its_folder_is_gone(model: Path, adapters: list[LoRARequest]) -> None:
    (expected,) = alone(model, adapters)[:1]
    with LLM(model, enable_lora=True, max_loras=1) as llm:
        last: RequestOutput | None = None
        for output in llm.stream([PROMPTS[0]], PARAMS, lora_request=adapters[0]):
            shutil.rmtree(adapters[0].lora_path, ignore_errors=True)
            last = output
        assert last is not None
        assert last.outputs[0].token_ids == expected
        with pytest.raises(InvalidRequestError, match=r"no file adapter_config.json") as refused:
            llm.generate(PROMPTS[:1], PARAMS, use_tqdm=False, lora_request=adapters[0])
        assert refused.value.param == "lora_request"


def test_adapter_that_changes_while_its_request_waits_fails_that_request_alone(
    model: Path, adapters: list[LoRARequest]
) -> None:
    with LLM(model, enable_lora=True, max_loras=1) as llm:
        outputs = llm.stream(PROMPTS[:2], PARAMS, lora_request=adapters[:2])
        next(outputs)                                   # after the first: the second waits, and is not in memory
        write_adapter(Path(adapters[1].lora_path), model, seed=77)
        with pytest.raises(InvalidRequestError, match="its LoRA adapter cannot be loaded any more"):
            list(outputs)
        (again,) = llm.generate(PROMPTS[1:2], PARAMS, use_tqdm=False, lora_request=adapters[1])
        assert again.finished
        llm._engine.engine.scheduler.check()


def test_refusals_name_the_setting(model: Path, adapters: list[LoRARequest]) -> None:
    with LLM(model) as llm, pytest.raises(InvalidRequestError, match="enable_lora is off"):
        llm.generate(PROMPTS[:1], PARAMS, lora_request=adapters[0])
    with pytest.raises(ConfigError, match="max_cpu_loras must be at least max_loras 4, got 2"):
        LLM(model, enable_lora=True, max_loras=4, max_cpu_loras=2)
    with pytest.raises(ConfigError, match="enable_lora needs batching 'continuous' and memory_policy 'paged'"):
        LLM(model, enable_lora=True, memory_policy="contiguous-max")
    with LLM(model, enable_lora=True, max_lora_rank=4) as llm:
        with pytest.raises(InvalidRequestError, match=r"down_proj has rank 8, which is greater than max_lora_rank 4"):
            llm.generate(PROMPTS[:1], PARAMS, lora_request=adapters[0])
        with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest"):
            llm.generate(PROMPTS[:1], PARAMS, lora_request="a")  # type: ignore[arg-type]
        with pytest.raises(InvalidRequestError, match="got 2 for 1 prompts"):
            llm.generate(PROMPTS[:1], PARAMS, lora_request=[None, None])
    for *fields, refused in (("", 1, "x", "lora_name"), ("a", 0, "x", "lora_int_id"), ("a", 1, "", "lora_path")):
        with pytest.raises(InvalidRequestError, match=refused):
            LoRARequest(*fields)  # type: ignore[arg-type]


def test_slots_that_do_not_fit_a_device_are_refused_at_start(model: Path) -> None:
    def none_left(*sizes: object) -> NoReturn:
        raise torch.OutOfMemoryError("CUDA out of memory")

    loaded = load_model(model, back_end=replace(TORCH, adapter_slots=none_left))
    options = EngineOptions(enable_lora=True, max_loras=900, max_lora_rank=64)
    with pytest.raises(ConfigError, match="max_loras 900 and max_lora_rank 64 need more memory than cpu has left"):
        store_module.make_slots(options, loaded)
