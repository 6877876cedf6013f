"""The offline API on the demo model: forms of input, order, refusals, closing."""

import inspect
import json
import math
import re
import shutil
from collections.abc import Iterator
from dataclasses import fields, replace
from itertools import count
from pathlib import Path
from typing import Any, get_type_hints

import pytest

import quire
from quire import LLM, BeamSearchParams, LoRARequest, RepetitionDetectionParams, SamplingParams
from quire.core.errors import (
    ConfigError,
    ContextLengthError,
    DeadlineExceededError,
    InvalidRequestError,
    ModelError,
    UnknownPrefixError,
)
from quire.core.options import declared_options
from quire.engine.metrics.page import Counter, Gauge, Histogram
from quire.engine.options import EngineOptions
from quire.engine.options.keywords import EngineSettings, VllmSettings
from quire.engine.requests.output_processor import OutputProcessor
from quire.engine.requests.pinned_prefixes import PinnedPrefixes
from quire.model.decoder import Decoder
from quire_vllm.translation import ROWS
from support.faults import raising

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)


@pytest.fixture(scope="module")
def shared_llm(demo_model: Path) -> Iterator[LLM]:
    with LLM(str(demo_model), max_model_len=256, max_num_seqs=16) as llm:
        yield llm


@pytest.fixture
def llm(shared_llm: LLM) -> Iterator[LLM]:
    """The module's engine; whatever a test did to it, the next request must be served and nothing left behind."""
    yield shared_llm
    assert shared_llm.kv_stats().used_blocks == 0
    assert len(shared_llm.generate("def f(", GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6


def test_an_llm_says_what_it_is(demo_model: Path) -> None:
    with LLM(demo_model, num_kv_blocks=64) as llm:
        blocks = "0 of 64 KV blocks of 16 tokens in use"
        assert repr(llm) == f"<LLM {demo_model}: bfloat16 on cpu, {blocks}, 0 running, 0 waiting>"
        assert "blocks in use</th><td>0 of 64<" in llm._repr_html_()
    assert repr(llm) == f"<LLM {demo_model}, closed>"
    assert "closed" in llm._repr_html_()
    assert "LLM" in dir(quire)
    assert "Any" not in dir(quire)


def test_misspelt_settings_are_told_with_the_nearest() -> None:
    near = {"modle": "; did you mean model?", "max_model_length": "; did you mean max_model_len?", "colour": ""}
    near |= {each[:-1]: f"; did you mean {each}?" for each in ("trust_remote_code", "num_gpu_blocks_override")}
    for given, told in near.items():
        with pytest.raises(TypeError) as raised:
            LLM(**{given: 1})
        assert str(raised.value) == f"LLM() got an unexpected keyword argument '{given}'{told}"


def test_misspelt_parameters_are_told_with_the_nearest() -> None:
    for params, given, told in (
        (SamplingParams, {"temprature": 1.0}, "temperature"), (BeamSearchParams, {"beam_with": 2}, "beam_width"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"got an unexpected keyword argument .*; did you mean {told}"):
            params(**given)
    with pytest.raises(TypeError, match="missing 2 required positional arguments"):
        BeamSearchParams()  # type: ignore[call-arg]
    assert [*inspect.signature(SamplingParams).parameters] == [field.name for field in fields(SamplingParams)]


def test_keyword_arguments_have_the_types_of_their_options() -> None:
    own = inspect.signature(LLM.__init__).parameters
    typed, vllm = get_type_hints(EngineSettings), get_type_hints(VllmSettings).keys()
    typed = {name: hint for name, hint in typed.items() if name not in vllm}
    options = {option.name: option.hint for option in declared_options(EngineOptions)}
    assert typed == {name: hint for name, hint in options.items() if name not in own}
    named = {*options, "structured_outputs_config"}
    assert vllm == {row.name for row in ROWS.values() if row.is_engine and row.does == "renamed" and row.own in named}
    assert options.keys() == typed.keys() | own.keys() - {"self", "settings", "structured_outputs_config"}


def test_tokenizer_of_an_adapter_is_the_model_s(llm: LLM) -> None:
    assert llm.get_tokenizer(LoRARequest("a", 1, "folder")) is llm.get_tokenizer(None) is llm.tokenizer
    with pytest.raises(InvalidRequestError, match="lora_request must be a LoRARequest or None, got 'a'"):
        llm.get_tokenizer("a")  # type: ignore[arg-type]


def test_every_form_of_prompt_is_the_same_prompt(llm: LLM) -> None:
    assert llm.tokenizer is not None
    text = "import os\n"
    ids = llm.tokenizer.encode(text)
    forms: list[Any] = [text, {"prompt": text}, ids, {"prompt_token_ids": ids}, tuple(ids)]
    outputs = llm.generate(forms, GREEDY, use_tqdm=False)
    assert {tuple(output.outputs[0].token_ids) for output in outputs} == {tuple(outputs[0].outputs[0].token_ids)}
    assert [output.prompt for output in outputs] == [text, text, None, None, None]
    assert llm.generate(ids, GREEDY, use_tqdm=False)[0].prompt_token_ids == ids


def test_prompt_that_was_asked_before_is_found_in_the_cache(demo_model: Path) -> None:
    prompt = list(range(10, 50))
    for enabled, expected in ((True, [0, 32, 32, 0]), (False, [0, 0, 0, 0])):
        with LLM(str(demo_model), max_model_len=256, enable_prefix_caching=enabled) as llm:
            salted: Any = {"prompt_token_ids": prompt, "cache_salt": "x"}
            outputs = [llm.generate(one, GREEDY, use_tqdm=False)[0] for one in (prompt, prompt, prompt, salted)]
            stats = llm.kv_stats()
            stream = llm.stream(salted, GREEDY)
            next(stream)
            assert llm.kv_stats().blocks_by_owner == {"salt-2d711642": 3}  # the beginning of the SHA-256 of "x"
        assert [output.num_cached_tokens for output in outputs] == expected
        assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 1
        assert (stats.prefix_queries_tokens, stats.prefix_hits_tokens) == ((160, 64) if enabled else (0, 0))
        assert (stats.used_blocks, stats.cached_blocks) == (0, 4 if enabled else 0)


def test_outputs_keep_the_order_of_prompts_and_their_own_parameters(llm: LLM) -> None:
    lengths = [9, 1, 30, 4, 17]
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in lengths]
    outputs = llm.generate([f"x = {i}" for i in range(5)], params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == lengths
    assert [output.prompt for output in outputs] == [f"x = {i}" for i in range(5)]
    assert all(output.finished and output.outputs[0].finish_reason == "length" for output in outputs)


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert llm.generate([], GREEDY) == []


def test_text_is_the_decoded_tokens(llm: LLM) -> None:
    assert llm.tokenizer is not None
    output = llm.generate("class Stack:\n", SamplingParams(max_tokens=40, seed=3), use_tqdm=False)[0].outputs[0]
    assert output.text == llm.tokenizer.decode(output.token_ids)


def test_stream_adds_up_to_what_generate_returns(llm: LLM) -> None:
    params = SamplingParams(max_tokens=30, seed=5, n=2)
    whole = llm.generate(["def read(path):", "x"], params, use_tqdm=False)
    seen: dict[str, Any] = {}
    for output in llm.stream(["def read(path):", "x"], params):
        for branch in output.outputs:
            key = f"{output.request_id}/{branch.index}"
            assert branch.text.startswith(seen.get(key, ""))
            seen[key] = branch.text
    assert list(seen.values()) == [branch.text for output in whole for branch in output.outputs]


def test_two_streams_may_be_read_in_turn(llm: LLM) -> None:
    expected = [llm.generate(p, GREEDY, use_tqdm=False)[0].outputs[0].token_ids for p in ("a = ", "b = ")]
    streams = [llm.stream("a = ", GREEDY), llm.stream("b = ", GREEDY)]
    last: list[Any] = [None, None]
    for _ in range(20):
        for i, stream in enumerate(streams):
            last[i] = next(stream, last[i])
    assert [output.outputs[0].token_ids for output in last] == expected


def test_streams_may_begin_in_another_order_than_they_were_made(demo_model: Path) -> None:
    """Requests that begin first arrived first, also when blocks run out and the latest arrival has to give way."""
    params = SamplingParams(temperature=0.0, max_tokens=50, ignore_eos=True)
    with LLM(str(demo_model), num_kv_blocks=12, block_size=8) as llm:
        expected = [llm.generate([5 + i] * 8, params, use_tqdm=False)[0].outputs[0].token_ids for i in range(4)]
        streams = [llm.stream([5 + i] * 8, params) for i in range(4)]
        for i in (3, 1, 0, 2):
            next(streams[i])
        outputs = [list(stream)[-1] for stream in streams]
    assert [output.outputs[0].token_ids for output in outputs] == expected
    preemptions = [output.metrics.num_preemptions for output in outputs if output.metrics]
    assert preemptions[3] == 0 < max(preemptions)


def test_failed_step_ends_its_own_call_and_no_other_stream(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = SamplingParams(n=3, seed=4, max_tokens=12, ignore_eos=True)
    expected = [branch.token_ids for branch in llm.generate([5] * 21, params, use_tqdm=False)[0].outputs]
    for num_before in (1, 2, 5):
        stream = llm.stream([5] * 21, params)
        for _ in range(num_before):
            next(stream)
        with monkeypatch.context() as patch:
            patch.setattr(Decoder, "forward", raising(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                llm.generate(["x", "y"], params, use_tqdm=False)
        assert [branch.token_ids for branch in list(stream)[-1].outputs] == expected


def test_deadlines_end_answers_and_fail_those_without_a_token(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    times, params = count(), replace(GREEDY, max_tokens=100)
    (whole,) = llm.generate("def f(", params, use_tqdm=False)
    monkeypatch.setattr(llm._engine.engine, "_clock", lambda: next(times) / 10)
    (cut,) = llm.generate("def f(", replace(params, deadline_ms=900, ttft_deadline_ms=200), use_tqdm=False)
    (answer,) = cut.outputs
    assert (answer.finish_reason, answer.stop_reason) == ("length", "deadline")
    assert answer.token_ids == whole.outputs[0].token_ids[:8]
    assert whole.outputs[0].text.startswith(answer.text)
    with pytest.raises(DeadlineExceededError, match=re.escape("within 100 ms (ttft_deadline_ms)")):
        llm.generate("def f(", replace(params, deadline_ms=900, ttft_deadline_ms=100), use_tqdm=False)


@pytest.mark.parametrize("max_tokens", [2, 12], ids=["its last token", "some token"])
def test_stream_whose_tokens_were_lost_says_so_and_never_hangs(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, max_tokens: int
) -> None:
    stream = llm.stream([5] * 21, SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    next(stream)
    with monkeypatch.context() as patch:
        patch.setattr(OutputProcessor, "process", raising(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.generate("x", GREEDY, use_tqdm=False)
    with pytest.raises(RuntimeError, match="failed step"):
        next(stream)


def test_stream_left_early_is_aborted(llm: LLM) -> None:
    stream = llm.stream(["x"] * 3, SamplingParams(max_tokens=200, ignore_eos=True))
    next(stream)
    assert llm.kv_stats().used_blocks > 0
    stream.close()
    assert llm.kv_stats().used_blocks == 0


def test_stop_strings_end_the_text_where_they_begin(llm: LLM) -> None:
    free = llm.generate("def f(x):\n", SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)[0].outputs[0]
    stop = free.text[10:13]
    cut = SamplingParams(temperature=0.0, max_tokens=40, stop=stop)
    output = llm.generate("def f(x):\n", cut, use_tqdm=False)[0].outputs[0]
    assert output.text == free.text[: free.text.index(stop)]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.token_ids == free.token_ids[: len(output.token_ids)]


@pytest.mark.parametrize(("min_tokens", "num_tokens"), [(0, 4), (7, 7)])
def test_repeating_pattern_ends_an_answer(llm: LLM, min_tokens: int, num_tokens: int) -> None:
    params = SamplingParams(
        n=2, allowed_token_ids=[5], max_tokens=40, min_tokens=min_tokens, ignore_eos=True, stop=["never there"],
        repetition_detection=RepetitionDetectionParams(max_pattern_size=3, min_count=4),
    )  # fmt: skip
    for output in llm.generate("def f(x):\n", params, use_tqdm=False)[0].outputs:
        assert output.token_ids == [5] * num_tokens
        assert llm.tokenizer is not None
        assert output.text == llm.tokenizer.decode(output.token_ids)
        assert (output.finish_reason, output.stop_reason) == ("repetition", "repetition_detected")


def test_logprobs_hold_the_chosen_token_and_the_likeliest(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=2, max_tokens=8, logprobs=3, prompt_logprobs=1)
    output = llm.generate("import sys\nimport", params, use_tqdm=False)[0]
    answer = output.outputs[0]
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert token in entries
        assert {1, 2, 3} <= {entry.rank for entry in entries.values()}
        assert all(entry.logprob <= 0 for entry in entries.values())
    total = sum(entries[token].logprob for token, entries in zip(answer.token_ids, answer.logprobs, strict=True))
    assert answer.cumulative_logprob == pytest.approx(total)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def test_logprobs_of_named_tokens(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, logprob_token_ids=[9, 300])
    answer = llm.generate("import sys", params, use_tqdm=False)[0].outputs[0]
    assert answer.logprobs is not None
    for token, entries in zip(answer.token_ids, answer.logprobs, strict=True):
        assert list(entries) == list(dict.fromkeys([token, 9, 300]))
        assert entries[token].rank == 1


def test_parameters_may_be_changed_between_calls(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, truncate_prompt_tokens=2)
    outputs = llm.generate([[5, 6, 7], "def f(a, b)"], params, use_tqdm=False)
    assert [len(output.prompt_token_ids) for output in outputs] == [2, 2]
    assert outputs[0].prompt_token_ids == [6, 7]
    chat = llm.chat([{"role": "user", "content": "hi"}], params, use_tqdm=False)[0]
    assert len(chat.prompt_token_ids) == 2
    params.max_tokens, params.truncate_prompt_tokens = 5, -1
    (output,) = llm.generate([[5] * 1000], params, use_tqdm=False)
    assert len(output.prompt_token_ids) == 255  # max_model_len, but for one token
    params.temperature = -1.0
    with pytest.raises(ValueError, match="temperature must be"):
        llm.generate([[5]], params, use_tqdm=False)


def test_prompt_logprobs_do_not_depend_on_chunks(demo_model: Path) -> None:
    prompt = [7 + i * 13 % 900 for i in range(60)]
    params = SamplingParams(temperature=0.0, max_tokens=2, prompt_logprobs=2)
    found = []
    for budget in (2048, 7):
        with LLM(str(demo_model), max_model_len=256, max_num_batched_tokens=budget) as llm:
            found.append(llm.generate(prompt, params, use_tqdm=False)[0].prompt_logprobs)
    assert found[0] == found[1]


def test_chat_answers_each_conversation(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Write a function"}]
    outputs = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    single = llm.chat(conversation, GREEDY, use_tqdm=False)
    assert [output.outputs[0].text for output in outputs] == [single[0].outputs[0].text] * 2
    assert single[0].prompt is not None
    assert "Write a function" in single[0].prompt


def test_chat_goes_on_with_the_last_message(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "Write a function"}, {"role": "assistant", "content": "def add("}]
    output = llm.chat(
        conversation, GREEDY, add_generation_prompt=False, continue_final_message=True, use_tqdm=False
    )[0]
    assert output.prompt is not None
    assert output.prompt.endswith("def add(")
    with pytest.raises(InvalidRequestError, match="add_generation_prompt"):
        llm.chat(conversation, GREEDY, continue_final_message=True, use_tqdm=False)


def test_chat_shows_tools_to_the_model(llm: LLM) -> None:
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    output = llm.chat([{"role": "user", "content": "hi"}], GREEDY, tools=[tool], use_tqdm=False)[0]
    assert output.prompt is not None
    assert "get_weather" in output.prompt
    with pytest.raises(InvalidRequestError, match=re.escape("tools[0] must be of the form")):
        llm.chat([{"role": "user", "content": "hi"}], GREEDY, tools=[{}], use_tqdm=False)


def test_chat_takes_a_template_and_its_variables(llm: LLM) -> None:
    conversation = [{"role": "user", "content": "hi"}]
    how: dict[str, Any] = {"chat_template": "{{ mood }} {{ messages[0].content }}", "use_tqdm": False}
    output = llm.chat(conversation, GREEDY, chat_template_kwargs={"mood": "Oh,"}, **how)[0]
    assert output.prompt == "Oh, hi"
    with pytest.raises(InvalidRequestError, match="none of the arguments of chat, got tools"):
        llm.chat(conversation, GREEDY, chat_template_kwargs={"tools": []}, **how)


BAD_MESSAGES: list[Any] = [
    None, [], "hi", {"role": "user", "content": "hi"}, [1], [[]], [[1]], [{"role": "user", "content": "hi"}, []],
    [{"content": "hi"}], iter([]), [{"role": "user", "content": "\ud800"}],
]  # fmt: skip


@pytest.mark.parametrize("messages", BAD_MESSAGES)
def test_bad_messages_are_refused(llm: LLM, messages: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequestError):
        llm.chat(messages, GREEDY, use_tqdm=False)


def test_pinned_prefix_is_computed_once_and_kept_until_it_is_unpinned(demo_model: Path) -> None:
    text = "import os\n"
    with LLM(str(demo_model), max_model_len=128, num_kv_blocks=32) as llm:
        assert llm.tokenizer is not None
        ids = llm.tokenizer.encode(text)
        first, second = llm.pin_prefix(text), llm.pin_prefix({"prompt_token_ids": [*ids, 5]})
        assert (first.num_tokens, first.num_blocks) == (len(ids), 1)
        assert first.id != second.id
        assert llm.pinned_prefixes() == [first, second]
        assert llm.kv_stats().pinned_blocks == 2
        prompts = [[*ids, 7, 8], [*ids, 5, 6]]
        outputs = llm.generate(prompts, GREEDY, use_tqdm=False)
        assert [output.num_cached_tokens for output in outputs] == [len(ids), len(ids) + 1]
        llm.unpin_prefix(first.id)
        with pytest.raises(UnknownPrefixError, match=f"no pinned prefix '{first.id}'"):
            llm.unpin_prefix(first.id)
        assert llm.pinned_prefixes() == [second]
        llm.unpin_prefix(second.id)
        assert llm.kv_stats().used_blocks == llm.kv_stats().pinned_blocks == 0


def test_pin_draws_no_seed_of_others(demo_model: Path) -> None:
    params, found = SamplingParams(max_tokens=12, ignore_eos=True), []
    for pins in (False, True):
        with LLM(str(demo_model), max_model_len=128, num_kv_blocks=32) as llm:
            if pins:
                llm.pin_prefix("def ")
            output = llm.generate("def f", params, use_tqdm=False)[0]
            found.append((output.request_id, output.outputs[0].token_ids))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("prefix", "told"),
    [
        ([1] * 128, r"has 128 tokens, but .* 128 tokens \(max_model_len\)"),
        ([1] * 100, r"100 tokens takes 7 KV blocks of 16 .* all 12 \(num_kv_blocks\) 0 are pinned .* 128 needs 8"),
        ([], "prompt is empty"),
        ([4096], "prompt token ids must be integers from 0 to 4095, got 4096"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt must be a string of 1 to 1024 characters"),
    ],
)
def test_prefix_that_cannot_be_pinned_is_refused(demo_model: Path, prefix: Any, told: str) -> None:  # noqa: ANN401
    with LLM(str(demo_model), max_model_len=128, num_kv_blocks=12) as llm:
        with pytest.raises(InvalidRequestError, match=told):
            llm.pin_prefix(prefix)
        assert llm.pinned_prefixes() == []
        assert len(llm.generate("x", GREEDY, use_tqdm=False)) == 1


def test_limits_follow_what_is_pinned(demo_model: Path) -> None:
    params = SamplingParams(n=4, max_tokens=30, ignore_eos=True)  # two blocks for each branch
    with LLM(str(demo_model), max_model_len=64, num_kv_blocks=10) as llm:
        pinned = llm.pin_prefix([5] * 40)
        with pytest.raises(ContextLengthError, match=r"may need 8 KV .* are 10 \(num_kv_blocks\), 3 of them pinned"):
            llm.generate([6], params, use_tqdm=False)
        most = llm.generate([6], replace(params, max_tokens=None), use_tqdm=False)[0]
        assert [len(branch.token_ids) for branch in most.outputs] == [15] * 4
        llm.unpin_prefix(pinned.id)
        assert len(llm.generate([6], params, use_tqdm=False)[0].outputs) == 4


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
def test_pin_that_fails_leaves_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch, fault: type[BaseException]) -> None:
    for place in (Decoder, OutputProcessor, PinnedPrefixes):
        with monkeypatch.context() as patch:
            patch.setattr(place, "forward" if place is Decoder else "process" if place is OutputProcessor else "add",
                          raising(fault))
            with pytest.raises(fault):
                llm.pin_prefix([5] * 40)
        assert llm.kv_stats().used_blocks == 0
        assert llm.pinned_prefixes() == []
        assert not llm._engine.engine.scheduler.has_requests


def test_pins_of_other_calls_run_beside_a_stream(llm: LLM) -> None:
    stream = llm.stream("def f(", GREEDY)
    next(stream)
    pinned = llm.pin_prefix([5] * 20)
    assert [output.finished for output in stream][-1]
    llm.unpin_prefix(pinned.id)


def test_lower_priority_runs_first(demo_model: Path) -> None:
    params, talk = SamplingParams(max_tokens=2), [{"role": "user", "content": "a"}]
    with LLM(str(demo_model), max_num_seqs=1, num_kv_blocks=64) as llm:
        for outputs in (
            llm.generate(["a"] * 4, params, use_tqdm=False, priority=[2, 0, -1, 0]),
            llm.chat([talk] * 4, params, use_tqdm=False, priority=[2, 0, -1, 0]),
            sorted(
                (output for output in llm.stream(["a"] * 4, params, priority=[2, 0, -1, 0]) if output.finished),
                key=lambda output: int(output.request_id),
            ),
        ):
            began_s = [output.metrics.first_scheduled_s for output in outputs if output.metrics is not None]
            assert sorted(range(4), key=began_s.__getitem__) == [2, 1, 3, 0]
        for wrong, told in (([1], "priority must be one for all"), ([0, 0, 0, 101], "priority must be an integer")):
            with pytest.raises(InvalidRequestError, match=told):
                llm.generate(["a"] * 4, priority=wrong)


def test_metrics_are_in_order(llm: LLM) -> None:
    metrics = llm.generate("x", GREEDY, use_tqdm=False)[0].metrics
    assert metrics is not None
    assert metrics.first_scheduled_s is not None
    assert metrics.first_token_s is not None
    assert metrics.finished_s is not None
    assert metrics.arrival_s <= metrics.first_scheduled_s <= metrics.first_token_s <= metrics.finished_s
    assert metrics.queue_s is not None
    assert metrics.num_preemptions == 0


BAD_PROMPTS: list[Any] = [
    None, 5, 2.5, b"bytes", [[]], [1, "2"], [[1, -1]], [[1, 10**9]], [[1, True]], [[1.0]], {"text": "x"},
    {"prompt": 5}, {"prompt_token_ids": "abc"}, {"prompt": "a", "prompt_token_ids": [1]}, [None], "\ud800",
    [list(range(300))],
]  # fmt: skip


@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda p: repr(p)[:30])
def test_bad_prompt_is_refused_and_nothing_else_disturbed(llm: LLM, prompt: Any) -> None:  # noqa: ANN401
    with pytest.raises(InvalidRequestError) as refused:
        llm.generate(prompt, GREEDY, use_tqdm=False)
    assert refused.value.param == "prompt"


def test_one_bad_prompt_among_good_ones_starts_nothing(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError):
        llm.generate(["fine", "fine too", [10**9]], GREEDY, use_tqdm=False)


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"n": 17}, r"n is 17, but at most 16"),
        ({"logprobs": 21}, r"logprobs must be at most 20.*got 21"),
        ({"prompt_logprobs": 21}, r"prompt_logprobs must be at most 20"),
        ({"stop_token_ids": [4096]}, r"stop_token_ids .*4096"),
        ({"logit_bias": {5000: 1.0}}, r"logit_bias .*4096"),
        ({"allowed_token_ids": [1, 99999]}, r"allowed_token_ids .*4096"),
    ],
)
def test_parameters_beyond_the_engine_are_refused(llm: LLM, params: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        llm.generate("x", SamplingParams(**params), use_tqdm=False)


def test_answer_is_cut_at_max_model_len(llm: LLM) -> None:
    params = SamplingParams(max_tokens=1000, temperature=0, ignore_eos=True)
    cut, short = llm.generate([[5] * 250, [5] * 200], params, use_tqdm=False)
    assert [len(each.outputs[0].token_ids) for each in (cut, short)] == [6, 56]
    assert cut.outputs[0].finish_reason == "length"
    (beams,) = llm.beam_search([[5] * 250], BeamSearchParams(2, 256, ignore_eos=True), use_tqdm=False)
    assert [len(each.token_ids) for each in beams.outputs] == [6, 6]


def test_parameters_of_another_kind_are_refused(llm: LLM) -> None:
    with pytest.raises(InvalidRequestError, match="must be SamplingParams, got dict"):
        llm.generate("x", {"temperature": 1}, use_tqdm=False)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="got 1 for 2 prompts"):
        llm.generate(["x", "y"], [GREEDY], use_tqdm=False)
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=math.nan)


def test_parameters_of_many_prompts_are_checked_once(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each of several; a priority makes them others."""
    checked, check = list[SamplingParams](), SamplingParams.check_vocabulary

    def checking(params: SamplingParams, vocab_size: int) -> None:
        checked.append(params)
        check(params, vocab_size)

    monkeypatch.setattr(SamplingParams, "check_vocabulary", checking)
    other = SamplingParams(max_tokens=2)
    llm.generate([[5], [6], [7]], GREEDY, use_tqdm=False)
    llm.generate([[5], [6], [7]], [GREEDY, GREEDY, other], use_tqdm=False, priority=[0, 1, 1])
    assert [params == other for params in checked] == [False, False, False, True]


def test_unbounded_request_gets_the_most_that_fits(llm: LLM) -> None:
    output = llm.generate("x", SamplingParams(max_tokens=None, ignore_eos=True), use_tqdm=False)[0]
    assert len(output.prompt_token_ids) + len(output.outputs[0].token_ids) == 256


def test_beam_search_returns_as_many_outputs_as_beams_the_best_first(llm: LLM) -> None:
    params = BeamSearchParams(beam_width=3, max_tokens=8, length_penalty=0.0)
    outputs = llm.beam_search(["def f(", [5, 6, 7]], params, use_tqdm=False)
    assert [output.prompt for output in outputs] == ["def f(", None]
    for output in outputs:
        assert [each.index for each in output.outputs] == [0, 1, 2]
        logprobs = [each.cumulative_logprob or 0.0 for each in output.outputs]
        assert logprobs == sorted(logprobs, reverse=True)
        assert len({tuple(each.token_ids) for each in output.outputs}) == 3
        assert all(each.text and each.logprobs is None for each in output.outputs)
        assert {each.finish_reason for each in output.outputs} <= {"stop", "length"}


def test_beam_search_without_max_tokens_goes_on_as_long_as_fits(llm: LLM) -> None:
    (output,) = llm.beam_search([list(range(5, 235))], BeamSearchParams(2, None, ignore_eos=True), use_tqdm=False)
    assert [len(each.token_ids) for each in output.outputs] == [26, 26]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (BeamSearchParams(17, 4), r"beam_width must be at most 16 \(max_num_seqs\), got 17"),
        (SamplingParams(n=2), "params must be BeamSearchParams, got SamplingParams"),
    ],
    ids=["width", "type"],
)
def test_beam_search_that_cannot_run_is_refused(llm: LLM, params: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        llm.beam_search(["def f(", "x"], params, use_tqdm=False)  # type: ignore[arg-type]


def test_closed_llm_refuses_every_call(demo_model: Path) -> None:
    llm = LLM(str(demo_model), max_model_len=64)
    llm.close()
    llm.close()
    beam = BeamSearchParams(beam_width=2, max_tokens=4)
    for call in (
        lambda: llm.generate("x"),
        lambda: llm.generate(None),  # type: ignore[arg-type]
        lambda: llm.chat([]),
        lambda: llm.chat("x"),  # type: ignore[arg-type]
        lambda: llm.stream("x"),
        lambda: llm.beam_search("x", beam),
        lambda: llm.beam_search([], None),  # type: ignore[arg-type]
        llm.kv_stats,
        lambda: llm.pin_prefix("x"),
        lambda: llm.unpin_prefix("x"),
        llm.pinned_prefixes,
        llm.__enter__,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            call()


def test_same_seed_same_tokens_other_seed_other_tokens(demo_model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    found = []
    for seed in (0, 0, 1):
        with LLM(str(demo_model), max_model_len=128, seed=seed) as llm:
            found.append([o.outputs[0].token_ids for o in llm.generate(["x = ", "y = "], params, use_tqdm=False)])
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_broken_model_folders_are_refused(demo_model: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        LLM(str(tmp_path))
    broken = tmp_path / "broken"
    shutil.copytree(demo_model, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"architectures": ["NoSuchModel"], "model_type": "no"}))
    with pytest.raises(ModelError, match="NoSuchModel"):
        LLM(str(broken))
    (broken / "config.json").write_text(json.dumps(config))
    (broken / "tokenizer.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        LLM(str(broken))


def test_model_without_a_tokenizer_takes_token_ids_only(demo_model: Path, tmp_path: Path) -> None:
    for name in ("config.json", "model.safetensors"):
        shutil.copy(demo_model / name, tmp_path / name)
    with LLM(str(tmp_path), max_model_len=64) as llm:
        assert len(llm.generate([5, 6, 7], GREEDY, use_tqdm=False)[0].outputs[0].token_ids) == 6
        for call in (
            lambda: llm.generate("text", GREEDY),
            lambda: llm.chat([{"role": "user", "content": "hi"}], GREEDY),
            lambda: llm.generate([5], SamplingParams(stop="x")),
            lambda: llm.generate([5], SamplingParams(bad_words=["x"])),
        ):
            with pytest.raises(InvalidRequestError, match="no tokenizer"):
                call()


def test_setting_that_cannot_work_is_refused(demo_model: Path) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len is 4096.*2048 positions"):
        LLM(str(demo_model), max_model_len=4096)
    with pytest.raises(TypeError):
        LLM(str(demo_model), no_such_setting=1)


def test_refused_call_does_not_change_what_later_requests_draw(demo_model: Path) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True)
    found = []
    for is_disturbed in (False, True):
        with LLM(demo_model, max_model_len=64) as llm:
            if is_disturbed:
                with pytest.raises(InvalidRequestError):
                    llm.generate(["fine", [10**9]], params, use_tqdm=False)
                with pytest.raises(InvalidRequestError):
                    llm.generate(["fine", "too long " * 60], params, use_tqdm=False)
            found.append(llm.generate("x = ", params, use_tqdm=False)[0].outputs[0].token_ids)
    assert found[0] == found[1]


def test_signature_offers_every_setting_with_its_default() -> None:
    offered = {name: p.default for name, p in inspect.signature(LLM).parameters.items()}
    assert offered == {field.name: field.default for field in fields(EngineOptions)}


def test_metrics_count_what_requests_were_given(demo_model: Path) -> None:
    with LLM(str(demo_model), max_model_len=128, num_kv_blocks=32) as llm:
        llm.generate([[5, 6, 7], [8, 9]], SamplingParams(max_tokens=4, n=2, ignore_eos=True), use_tqdm=False)
        found = {(metric.name, *metric.labels.values()): metric for metric in llm.get_metrics()}
        name = str(demo_model)
    counts = {key[0]: metric.value for key, metric in found.items() if isinstance(metric, Counter)}
    assert (counts["vllm:prompt_tokens"], counts["vllm:generation_tokens"]) == (5, 16)
    ended = found["vllm:request_success", name, "0", "length"]
    assert isinstance(ended, Counter)
    assert ended.value == 4
    tokens = found["vllm:request_generation_tokens", name, "0"]
    assert isinstance(tokens, Histogram)
    assert (tokens.count, tokens.sum, tokens.buckets["5.0"], tokens.buckets["+Inf"]) == (2, 16.0, 0, 2)
    running = found["vllm:num_requests_running", name, "0"]
    assert isinstance(running, Gauge)
    assert running.value == 0
    with pytest.raises(RuntimeError, match="closed"):
        llm.get_metrics()
