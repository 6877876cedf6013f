"""Requests with grammars in an engine: the same bits in any company, no other request's changed, faults their own."""

import json
import random
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from quire import LLM, RequestOutput, SamplingParams, StructuredOutputsParams, branch_seed
from quire.core.errors import ConfigError, InvalidRequestError, RequestFailedError
from quire.core.sequence import Request
from quire.core.structured_outputs import parse_config
from quire.decoding.grammars import compiler, row_state, rows
from quire.decoding.grammars.constrained import ConstrainedDecoding
from quire.engine import assembly
from quire.engine.engine import Engine
from quire.engine.options import EngineOptions
from quire.execution.device import HostDevice
from quire.scheduling.plan_builder import PlanBuilder
from support.answers import Answer, answers_of
from support.pairwise import covering
from support.random_model import write_random_model
from support.steps_in_flight import compute_with_torch, executor_in_flight

SCHEMA = {
    "type": "object",
    "properties": {
        "description": {"type": "string", "maxLength": 12},
        "classification": {"enum": ["something common", "something rare"]},
        "quantity": {"type": "integer", "minimum": 0, "maximum": 999},
    },
    "required": ["description", "classification", "quantity"],
    "additionalProperties": False,
}
JSON = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
KINDS = {
    "json": JSON,
    "json_object": StructuredOutputsParams(json_object=True),
    "regex": StructuredOutputsParams(regex=r"[A-F]{2}-\d{4}(-[a-z]{3}){2,4}"),
    "choice": StructuredOutputsParams(choice=["a first answer", "a second answer", "none"]),
    "grammar": StructuredOutputsParams(
        grammar='start: "Items: " item (", " item){3} "."\nitem: /[a-z]{1,5}/ "=" /[0-9]{2}/'
    ),
}
MODES = ("none", "recompute", "swap")  # modes of preemption
PROMPTS = ["def f(x):", "import os\n", "class A:\n    ", "for i in range(3):"]
SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.0, "seed": 7},
    {"temperature": 0.8, "seed": 8, "top_p": 0.9, "repetition_penalty": 1.2, "presence_penalty": 0.4},
    {"temperature": 1.2, "seed": 9, "top_k": 30, "logprobs": 2, "logit_bias": {40: 3.0}},
)
PLAIN = SamplingParams(max_tokens=30, temperature=0.9, seed=3, ignore_eos=True)


def params(kind: str, **more: Any) -> SamplingParams:  # noqa: ANN401
    return SamplingParams(max_tokens=90, structured_outputs=KINDS[kind], **more)


FORKS = [(PROMPTS[1], params("json", seed=5, n=3)), (PROMPTS[3], params("regex", seed=6, n=2))]


def all_requests() -> list[tuple[str, SamplingParams]]:
    kinds = [params(kind, **how) for how in SAMPLING for kind in KINDS]
    return [(PROMPTS[index % len(PROMPTS)], each) for index, each in enumerate(kinds)]


FEW = slice(None, None, 3)      # a third of the requests: each kind, and each way of sampling, with some of the others


def run(llm: LLM, requests: list[tuple[str, SamplingParams]]) -> list[RequestOutput]:
    prompts, settings = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(settings), use_tqdm=False)


@pytest.fixture(scope="module")
def alone(demo_model: Path) -> list[RequestOutput]:
    """Each request by itself, every token sampled."""
    with LLM(demo_model, max_model_len=160, enable_prefix_caching=False, enable_jump_forward=False) as llm:
        return [run(llm, [each])[0] for each in [*all_requests(), (PROMPTS[0], PLAIN)]]


def test_config_of_an_llm_sets_the_options_of_its_grammars(demo_model: Path) -> None:
    """No blanks and no other properties; a request's own object stays as it is."""
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    config = {"backend": "auto", "disable_any_whitespace": True, "disable_additional_properties": True}
    config |= {"reasoning_parser": "qwen3"}  # vLLM's; without effect
    asked = SamplingParams(max_tokens=40, n=8, seed=5, structured_outputs=StructuredOutputsParams(json=schema))
    for given in (config, json.dumps(config)):
        with LLM(demo_model, max_model_len=160, structured_outputs_config=given) as llm:
            texts = {answer.text for answer in llm.generate("x", asked, use_tqdm=False)[0].outputs}
            assert texts <= {'{"a":1}', '{"a":2}'}
    assert asked.structured_outputs == StructuredOutputsParams(json=schema)
    with LLM(demo_model, max_model_len=160, guided_decoding_disable_any_whitespace=True) as llm:  # vLLM 0.10's
        closed = StructuredOutputsParams(json=schema | {"additionalProperties": False})
        asked.structured_outputs = closed
        texts = {answer.text for answer in llm.generate("x", asked, use_tqdm=False)[0].outputs}
        assert texts <= {'{"a":1}', '{"a":2}'}
    both = {"guided_decoding_disable_any_whitespace": True, "guided_decoding_disable_additional_properties": True}
    with LLM(demo_model, max_model_len=160, **both) as llm:
        wanted = {"disable_any_whitespace": True, "disable_additional_properties": True}
        assert llm._grammar_config == parse_config(json.dumps(wanted))
    with pytest.raises(ConfigError, match="structured_outputs_config; give one of them"):
        LLM(demo_model, structured_outputs_config={"disable_any_whitespace": False}, **both)
    with pytest.raises(ConfigError, match="guided_decoding_disable_any_whitespace must be true or false, got 2"):
        LLM(demo_model, guided_decoding_disable_any_whitespace=2)
    with pytest.raises(ConfigError, match=r"structured_outputs_config.*no_blanks"):
        LLM(demo_model, structured_outputs_config={"no_blanks": True})


def test_outputs_are_what_their_grammars_say(alone: list[RequestOutput]) -> None:
    for output, (_, asked) in zip(alone, all_requests(), strict=False):
        text, reason = output.outputs[0].text, output.outputs[0].finish_reason
        if reason != "stop":
            assert (reason, len(output.outputs[0].token_ids)) == ("length", 90)
        elif asked.structured_outputs in (JSON, KINDS["json_object"]):
            assert isinstance(json.loads(text), dict)
        elif asked.structured_outputs is KINDS["choice"]:
            assert text in ("a first answer", "a second answer", "none")
    assert sum(output.outputs[0].finish_reason == "stop" for output in alone) > len(alone) * 2 // 3


@covering({"mode": MODES, "jumps_forward": (True, False), "method": (None, "ngram", "suffix")})
def test_bits_are_the_same_in_a_crowd(
    demo_model: Path, alone: list[RequestOutput], mode: str, jumps_forward: bool, method: str | None
) -> None:
    """In a pool that is too small for all, with a plain request among them, whose answer is the same, too."""
    requests = [*all_requests(), (PROMPTS[0], PLAIN)]
    room = {"num_kv_blocks": 400} if mode == "none" else {"num_kv_blocks": 24, "preemption_mode": mode}
    if mode == "swap":
        room["num_swap_blocks"] = 200
    with LLM(
        demo_model, max_model_len=160, block_size=8, max_num_batched_tokens=48, enable_jump_forward=jumps_forward,
        spec_method=method, **room,
    ) as llm:  # fmt: skip
        for _ in range(2):  # the second time with hits in the cache
            found = run(llm, requests)
            assert [answers_of(each) for each in found] == [answers_of(each) for each in alone]
        stats = llm.kv_stats()
    assert stats.used_blocks == 0


def test_branches_are_those_of_their_seeds(demo_model: Path) -> None:
    with LLM(demo_model, max_model_len=160) as llm:
        (forked,) = run(llm, [(PROMPTS[1], params("json", seed=5, n=4))])
        single = run(llm, [(PROMPTS[1], params("json", seed=branch_seed(5, index))) for index in range(4)])
    assert [branch.token_ids for branch in forked.outputs] == [each.outputs[0].token_ids for each in single]
    assert len({tuple(branch.token_ids) for branch in forked.outputs}) > 1


def test_forced_tokens_take_fewer_steps(demo_model: Path) -> None:
    counts, tokens = list[int](), list[list[int]]()
    for jumps_forward in (True, False):
        with LLM(demo_model, max_model_len=160, enable_jump_forward=jumps_forward) as llm:
            plans = list[object]()
            llm._engine.engine.on_submit = plans.append
            (output,) = run(llm, [(PROMPTS[0], params("json", seed=1))])
            counts.append(len(plans))
            tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    assert counts[1] == len(tokens[1])
    assert counts[0] <= 0.7 * counts[1]


def test_end_of_the_grammar_ends_the_request_where_max_tokens_does(demo_model: Path) -> None:
    with LLM(demo_model, max_model_len=160) as llm:
        (whole,) = run(llm, [(PROMPTS[0], params("choice", temperature=0.0))])
        num_tokens = len(whole.outputs[0].token_ids)
        for jump in (0, 1):
            exact = SamplingParams(max_tokens=num_tokens - jump, temperature=0.0, structured_outputs=KINDS["choice"])
            (cut,) = run(llm, [(PROMPTS[0], exact)])
            assert cut.outputs[0].finish_reason == ("length" if jump else "stop")
            assert whole.outputs[0].text.startswith(cut.outputs[0].text)
            assert (cut.outputs[0].text == whole.outputs[0].text) == (not jump)


def test_stop_strings_and_tokens_and_min_tokens_hold_within_a_grammar(demo_model: Path) -> None:
    with LLM(demo_model, max_model_len=160) as llm:
        assert llm.tokenizer is not None
        [dot] = llm.tokenizer.encode(".", add_special_tokens=False)
        words = StructuredOutputsParams(regex="([a-z]{3} ){3}end[.]( [a-z]{3}){5}")
        settings = [
            SamplingParams(max_tokens=60, seed=2, structured_outputs=words, **more)
            for more in ({"stop": "end"}, {"stop_token_ids": [dot]}, {"min_tokens": 3})
        ]
        cut, ended, short = (each.outputs[0] for each in run(llm, [(PROMPTS[0], each) for each in settings]))
        assert (cut.finish_reason, cut.stop_reason) == ("stop", "end")
        assert not cut.text.endswith("end")
        assert ended.stop_reason in (dot, None)
        assert ended.text.startswith(cut.text)
        assert short.text.startswith(cut.text)
        (brief,) = run(llm, [(PROMPTS[0], params("choice", min_tokens=50))])
        assert brief.outputs[0].text in ("a first answer", "a second answer", "none"), "it ends before min_tokens"


def test_grammar_that_cannot_be_used_fails_its_request_alone(demo_model: Path) -> None:
    broken = SamplingParams(structured_outputs=StructuredOutputsParams(grammar='start: "a" b\nb: "c" unknown_rule'))
    with LLM(demo_model, max_model_len=160) as llm:
        (expected,) = run(llm, [(PROMPTS[0], PLAIN)])
        stream = llm.stream([PROMPTS[0]], PLAIN)
        first = next(stream)
        with pytest.raises((RequestFailedError, InvalidRequestError), match="unknown_rule"):
            run(llm, [(PROMPTS[1], broken)])
        assert [first, *stream][-1].outputs == expected.outputs
        assert run(llm, [(PROMPTS[2], params("choice"))])[0].outputs[0].finish_reason == "stop"
        assert llm.kv_stats().used_blocks == 0


def test_limit_that_is_exceeded_in_the_output_refuses_the_request(demo_model: Path) -> None:
    """The parser has a row of 2,000 items at most; this grammar needs more behind its first two letters."""
    words = " | ".join(f'"w{number}"' for number in range(2500))
    wide = StructuredOutputsParams(grammar=f'start: /[a-z]{{2}}/ "-" word\nword: {words}\n')
    with LLM(demo_model, max_model_len=160) as llm:
        (expected,) = run(llm, [(PROMPTS[0], PLAIN)])
        stream = llm.stream([PROMPTS[0]], PLAIN)
        first = next(stream)
        with pytest.raises(InvalidRequestError, match=r"structured_outputs cannot be used: .* max is 2000") as error:
            run(llm, [(PROMPTS[1], SamplingParams(structured_outputs=wide))])
        assert error.value.param == "structured_outputs"
        assert [first, *stream][-1].outputs == expected.outputs
        assert llm.kv_stats().used_blocks == 0


def test_grammar_that_cannot_be_compiled_is_refused_before_anything_runs(demo_model: Path) -> None:
    broken = SamplingParams(structured_outputs=StructuredOutputsParams(grammar="start: unknown_rule"))
    with LLM(demo_model, max_model_len=160) as llm:
        plans = list[object]()
        llm._engine.engine.on_submit = plans.append
        with pytest.raises(InvalidRequestError, match="unknown_rule") as error:
            run(llm, [(PROMPTS[0], PLAIN), (PROMPTS[1], broken)])
        assert (error.value.param, plans) == ("structured_outputs", [])


def test_allowed_tokens_outside_of_the_grammar_fail_the_request(demo_model: Path) -> None:
    with LLM(demo_model, max_model_len=160) as llm:
        with pytest.raises(InvalidRequestError, match="leave no token") as error:
            run(llm, [(PROMPTS[0], params("choice", allowed_token_ids=[3]))])
        assert error.value.param == "allowed_token_ids"


def test_bad_words_that_the_grammar_asks_for_fail_the_request(demo_model: Path) -> None:
    with LLM(demo_model, max_model_len=160) as llm:
        asked = SamplingParams(structured_outputs=StructuredOutputsParams(regex="[ab]"), bad_words=["a", "b"])
        with pytest.raises(InvalidRequestError, match="its grammar and bad_words leave no token") as error:
            run(llm, [(PROMPTS[0], asked)])
        assert error.value.param == "bad_words"


def test_lists_of_tokens_choose_among_the_spellings_of_a_text_that_must_follow(demo_model: Path) -> None:
    """Where a text is forced, its first token alone is allowed: not where the request names tokens."""
    constraint = StructuredOutputsParams(choice=["return value"])
    with LLM(demo_model, max_model_len=160) as llm:
        tokenizer = llm.get_tokenizer()
        spelt = (tokenizer.encode(letter, add_special_tokens=False) for letter in "return value")
        letters = sorted({token for tokens in spelt for token in tokens})
        [plain] = run(llm, [(PROMPTS[0], SamplingParams(structured_outputs=constraint))])
        long = plain.outputs[0].token_ids[0]
        assert len(tokenizer.decode([long])) > 1
        lists: list[dict[str, Any]] = [
            {"allowed_token_ids": letters}, {"logit_bias": {long: -100}}, {"bad_words": ["return"]},
        ]  # fmt: skip
        for fields in lists:
            asked = SamplingParams(structured_outputs=constraint, temperature=0.0, max_tokens=40, **fields)
            [output] = run(llm, [(PROMPTS[0], asked)])
            assert output.outputs[0].text == "return value"
            assert long not in output.outputs[0].token_ids, fields


def test_models_without_a_tokenizer_refuse_grammars(tmp_path: Path) -> None:
    with LLM(write_random_model(tmp_path)) as llm:
        with pytest.raises(InvalidRequestError, match="has no tokenizer") as error:
            llm.generate([[5, 6]], params("json"), use_tqdm=False)
        assert error.value.param == "structured_outputs"


@pytest.fixture
def held_compiler(demo_model: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[LLM, threading.Event]]:
    """Yield an engine whose grammars are not compiled before the event is set."""
    may_compile, compile_grammar = threading.Event(), compiler.CompiledGrammar

    def compile_later(*given: Any, **options: Any) -> compiler.CompiledGrammar:  # noqa: ANN401
        assert may_compile.wait(60)
        return compile_grammar(*given, **options)

    monkeypatch.setattr(compiler, "CompiledGrammar", compile_later)
    with LLM(demo_model, max_model_len=160) as llm:
        yield llm, may_compile
        may_compile.set()


def test_others_run_while_a_grammar_is_compiled(held_compiler: tuple[LLM, threading.Event]) -> None:
    """Requests before and behind it take as many steps as without it; it is admitted when its grammar is there."""
    llm, may_compile = held_compiler
    plans = list[object]()
    llm._engine.engine.on_submit = plans.append
    stream = llm.stream([PROMPTS[0]], params("choice", temperature=0.0))
    prepared = llm._prepare(llm._tokenize([PROMPTS[0]]), params("choice", temperature=0.0))[0]
    llm._engine.engine.add(prepared.request)
    (plain,) = run(llm, [(PROMPTS[1], PLAIN)])
    assert len(plans) == len(plain.outputs[0].token_ids) == 30
    scheduler = llm._engine.engine.scheduler
    assert scheduler.queues.waiting == [prepared.request]
    assert llm._engine.engine.step() == []
    assert scheduler.queues.wait_reasons.current == "grammar"
    assert len(plans) == 30, "nothing to compute"
    may_compile.set()
    [*_, output] = stream
    assert output.outputs[0].finish_reason == "stop"
    assert output.metrics is not None
    llm._engine.engine.abort(prepared.request.request_id)


def test_request_can_be_aborted_while_its_grammar_is_compiled(held_compiler: tuple[LLM, threading.Event]) -> None:
    llm, may_compile = held_compiler
    stream = llm.stream([PROMPTS[0]], params("choice"))
    prepared = llm._prepare(llm._tokenize([PROMPTS[0]]), params("choice"))[0]
    engine: Engine = llm._engine.engine
    engine.add(prepared.request)
    engine.step()
    assert engine.abort(prepared.request.request_id)
    assert not engine.scheduler.has_requests
    engine.scheduler.check()
    may_compile.set()
    assert [*stream][-1].outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_state_is_made_again_after_each_preemption(demo_model: Path, mode: Any) -> None:  # noqa: ANN401
    """Preempted in every step that has a new token, and resumed from its tokens alone."""
    num_swap_blocks = 100 if mode == "swap" else None
    with LLM(demo_model, max_model_len=160, preemption_mode=mode, num_swap_blocks=num_swap_blocks) as llm:
        (expected,) = run(llm, [(PROMPTS[0], params("json", seed=4))])
        scheduler = llm._engine.engine.scheduler
        plan_running: Callable[[PlanBuilder, PlanBuilder, int], int] = scheduler.planner.plan_running
        seen = dict[int, int]()

        def preempt_first(step: PlanBuilder, last: PlanBuilder, budget: int) -> int:
            requests: list[Request] = scheduler.queues.running[::-1]
            for request in requests:
                if seen.get(request.request_id) != (length := request.live[0].num_output_tokens) > 0:
                    seen[request.request_id] = length
                    scheduler.planner.preempt(step, request)
            return plan_running(step, last, budget)

        scheduler.planner.plan_running = preempt_first  # type: ignore[method-assign]
        (found,) = run(llm, [(PROMPTS[0], params("json", seed=4))])
        assert found.outputs == expected.outputs
        assert llm.kv_stats().preemptions[mode] > 5


@cache
def answers_at_once(model: Path, *, by_torch: bool) -> list[list[Answer]]:
    """Return the answers of FORKS; those of `by_torch`, which have other bits than our kernels, after the others."""
    with pytest.MonkeyPatch.context() as patch:
        if by_torch:
            compute_with_torch(patch)
        with LLM(model, max_model_len=160) as llm:
            others = [*all_requests()[FEW], (PROMPTS[0], PLAIN)] if by_torch else []
            return [answers_of(each) for each in run(llm, [*others, *FORKS])]


@covering({"mode": MODES, "is_async": (False, True), "method": (None, "ngram")})
def test_bits_are_the_same_where_masks_are_late(
    demo_model: Path, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch, mode: str, is_async: bool,
    method: str | None,
) -> None:  # fmt: skip
    """Every third mask, by chance, is late: in decodes, behind prompts in chunks, in forks, behind forced tokens."""
    room = {"num_kv_blocks": 400} if mode == "none" else {"num_kv_blocks": 36, "preemption_mode": mode}
    if mode == "swap":
        room["num_swap_blocks"] = 200
    settings: dict[str, Any] = {
        "max_model_len": 160, "block_size": 8, "max_num_batched_tokens": 48, "spec_method": method, **room,
    }  # fmt: skip
    expected = [*map(answers_of, () if is_async else [*alone[:-1][FEW], alone[-1]])]
    expected += answers_at_once(demo_model, by_torch=is_async)
    if is_async:
        compute_with_torch(monkeypatch)
    rng, is_ready = random.Random(3), rows._is_ready
    monkeypatch.setattr(rows, "_is_ready", lambda entry: rng.random() < 0.7 and is_ready(entry))
    for name in ("MASKS_WAIT_S", "MASK_WAIT_S"):
        monkeypatch.setattr(rows, name, 0.0)
    if is_async:
        monkeypatch.setattr(HostDevice, "executor", executor_in_flight)
    with LLM(demo_model, **settings) as llm:
        for _ in range(2):  # the second time with hits in the cache
            found = run(llm, [*all_requests()[FEW], (PROMPTS[0], PLAIN), *FORKS])
            assert [answers_of(each) for each in found] == expected
        stats, grammars = llm.kv_stats(), llm._engine.engine.grammars
        assert isinstance(grammars, ConstrainedDecoding)
        assert grammars.rows.num_late > 100
    assert stats.used_blocks == 0


@pytest.fixture
def held_masks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], threading.Event]]:
    """Yield a function that has the next mask wait for the event that it returns."""
    held, fill = list[threading.Event](), row_state._fill_mask
    waiting = list[threading.Event]()

    def hold() -> threading.Event:
        held.append(threading.Event())
        waiting.append(held[-1])
        return held[-1]

    def fill_later(*given: Any) -> None:  # noqa: ANN401
        if waiting:
            assert waiting.pop().wait(60)
        fill(*given)

    monkeypatch.setattr(row_state, "_fill_mask", fill_later)
    yield hold
    for event in held:
        event.set()


@pytest.mark.parametrize("is_async", [False, True], ids=["one step at a time", "two in flight"])
def test_slow_mask_delays_no_other_request(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, held_masks: Callable[[], threading.Event], is_async: bool
) -> None:
    """Other requests, with grammars and without, take as many steps as without it; then it goes on where it was."""
    if is_async:
        compute_with_torch(monkeypatch)
        monkeypatch.setattr(HostDevice, "executor", executor_in_flight)
    with LLM(demo_model, max_model_len=160, enable_jump_forward=False) as llm:
        asked = [(PROMPTS[0], params("regex", temperature=0.0)), (PROMPTS[1], params("choice", seed=4))]
        expected = run(llm, [*asked, (PROMPTS[0], PLAIN)])
        stream = llm.stream([PROMPTS[0]], params("regex", temperature=0.0))
        given = [next(stream) for _ in range(3)]
        may_fill, plans = held_masks(), list[object]()
        llm._engine.engine.on_submit = plans.append
        (plain,) = run(llm, [(PROMPTS[0], PLAIN)])
        assert len(plans) <= len(plain.outputs[0].token_ids) + is_async, "no step without a token, but one in flight"
        assert answers_of(plain) == answers_of(expected[2])
        (other,) = run(llm, [(PROMPTS[1], params("choice", seed=4))])
        assert answers_of(other) == answers_of(expected[1])
        [request] = llm._engine.engine.scheduler.queues.running
        assert request.live[0].num_output_tokens in (3, 4)
        may_fill.set()
        [*_, last] = [*given, *stream]
        assert answers_of(last) == answers_of(expected[0])
        assert llm.kv_stats().used_blocks == 0


def test_row_that_never_gets_its_mask_fails(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, held_masks: Callable[[], threading.Event]
) -> None:
    monkeypatch.setattr(rows, "MAX_MASK_S", 0.05)
    with LLM(demo_model, max_model_len=160) as llm:
        held_masks()
        with pytest.raises(RequestFailedError, match=r"no mask was filled in 0\.05 s"):
            run(llm, [(PROMPTS[0], params("regex"))])
        monkeypatch.undo()
        assert run(llm, [(PROMPTS[2], params("choice"))])[0].outputs[0].finish_reason == "stop"
        assert llm.kv_stats().used_blocks == 0


def test_engine_process_reads_the_vocabulary_at_its_start(demo_model: Path) -> None:
    """Reading one holds the interpreter lock: later it would stop the steps of other requests."""
    options = EngineOptions(str(demo_model), num_kv_blocks=8)
    for is_process in (True, False):
        grammars = assembly.assemble(options, loads_tokenizer=not is_process).engine.grammars
        assert isinstance(grammars, ConstrainedDecoding)
        assert grammars.is_loading == is_process
