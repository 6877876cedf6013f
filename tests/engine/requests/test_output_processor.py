"""Outputs of requests: whole characters, cut at stop strings, with token ids and logprobs cut at the same token."""

import math
import random
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest

from quire.core.deltas import Admission, FinishReason, SequenceDelta, TokenLogprobs
from quire.core.logprob_table import LogprobTable
from quire.core.outputs import MAX_PREEMPTIONS_KEPT, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.sequence import Request
from quire.core.token_ids import pack_tokens
from quire.engine.requests.input_processor import PreparedRequest, TokenizedPrompt
from quire.engine.requests.output_processor import (
    PART_TOKENS,
    SLICE_UNITS,
    CompletionBuilder,
    OutputKind,
    OutputProcessor,
    ProcessedStep,
)
from quire.text.tokenizer import Tokenizer
from support.small_tokenizers import byte_fallback, byte_level, save

PROMPT = "the quick"
ARRIVAL_S, STEP_S = 100.0, 0.5


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(save(byte_level(), tmp_path_factory.mktemp("byte_level")))


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_folder(save(byte_fallback(), tmp_path_factory.mktemp("byte_fallback")))


def tokens_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special_tokens=False)


def logprobs_of(token: int) -> TokenLogprobs:
    """Return the chosen token, of rank 3, and two others before it."""
    return TokenLogprobs([token, token + 1, token + 2], [-token / 100, -0.25, -0.5], [3, 1, 2])


def start(tokenizer: Tokenizer | None, kind: OutputKind = "cumulative", **params: object) -> OutputProcessor:
    """Return a processor with one request of id 7 that the client calls "mine"."""
    processor = OutputProcessor(tokenizer)
    prompt = [5, 6] if tokenizer is None else tokenizer.encode(PROMPT)
    prepared = prepare(7, prompt, SamplingParams(**{"max_tokens": 1000} | params))  # type: ignore[arg-type]
    processor.add(prepared, external_id="mine", arrival_s=ARRIVAL_S, kind=kind)
    return processor


def prepare(request_id: int, prompt: list[int], params: SamplingParams) -> PreparedRequest:
    token_ids = pack_tokens(prompt)
    return PreparedRequest(Request(request_id, token_ids, params, 0, 1000), TokenizedPrompt(PROMPT, token_ids))


def outputs_of(processor: OutputProcessor, step: ProcessedStep) -> list[RequestOutput]:
    return [processor.output(request_id) for request_id in step.ready]


def run(
    processor: OutputProcessor,
    token_ids: Sequence[int],
    *,
    tokens_per_step: int = 1,
    reason: FinishReason = "length",
    stop_reason: int | None = None,
    with_logprobs: bool = False,
) -> tuple[list[RequestOutput], list[tuple[int, int]]]:
    """Send the tokens of branch 0, the last with `reason`; return all outputs and all branches to finish."""
    outputs, finish = [], []
    for begin in range(0, len(token_ids), tokens_per_step):
        own = list(token_ids[begin : begin + tokens_per_step])
        delta = SequenceDelta(7, 0, own, [logprobs_of(token) for token in own] if with_logprobs else None)
        if begin + tokens_per_step >= len(token_ids):
            delta.finish_reason, delta.stop_reason = reason, stop_reason
        step = processor.process([delta], ARRIVAL_S + STEP_S * (begin + 1))
        outputs += outputs_of(processor, step)
        finish += step.stopped
    return outputs, finish


def text_of(tokenizer: Tokenizer, tokens: Sequence[int], **params: object) -> str:
    outputs, _ = run(start(tokenizer, kind="final", **params), tokens)
    return outputs[-1].outputs[0].text


@pytest.mark.parametrize("is_late", [False, True])
def test_request_that_a_deadline_has_ended_has_missed_it(is_late: bool) -> None:
    processor = start(None, deadline_ms=1000)
    processor.process([SequenceDelta(7, 0, [5])], ARRIVAL_S + STEP_S)
    last = SequenceDelta(7, 0, [6], finish_reason="length", is_late=is_late)
    step = processor.process([last], ARRIVAL_S + 2 * STEP_S)
    assert [each.met_deadline for each in step.finished] == [not is_late]


# --- without stop strings ---------------------------------------------------------------------------------------------


def test_request_that_is_not_streamed_gives_one_output(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, " brown fox 日本 😀")
    (output,), finish = run(start(tokenizer, kind="final"), tokens)
    assert (output.request_id, output.prompt, output.finished) == ("mine", PROMPT, True)
    assert output.prompt_token_ids == tokenizer.encode(PROMPT)
    (choice,) = output.outputs
    assert (choice.index, choice.text, choice.token_ids) == (0, " brown fox 日本 😀", tokens)
    assert (choice.finish_reason, choice.stop_reason, finish) == ("length", None, [])
    assert (choice.logprobs, choice.cumulative_logprob, output.prompt_logprobs) == (None, None, None)


def test_stream_grows_and_ends_as_the_whole(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, " brown fox 日本 😀")
    outputs, _ = run(start(tokenizer), tokens)
    assert len(outputs) == len(tokens)
    texts = [output.outputs[0].text for output in outputs]
    assert [output.outputs[0].token_ids for output in outputs] == [tokens[: n + 1] for n in range(len(tokens))]
    assert all(later.startswith(earlier) for earlier, later in pairwise(texts))
    assert not any("\ufffd" in text for text in texts)
    assert texts[-1] == " brown fox 日本 😀"
    assert [output.finished for output in outputs] == [False] * (len(tokens) - 1) + [True]


def test_earlier_outputs_do_not_change_later(tokenizer: Tokenizer) -> None:
    outputs, _ = run(start(tokenizer, logprobs=0), tokens_of(tokenizer, " the fox"), with_logprobs=True)
    first = outputs[0].outputs[0]
    assert (len(first.token_ids), len(first.logprobs or []), first.finish_reason) == (1, 1, None)
    assert outputs[0].metrics is not None
    assert outputs[0].metrics.finished_s is None


def test_unfinished_character_shows_only_at_the_end(tokenizer: Tokenizer) -> None:
    *most, _ = tokens_of(tokenizer, "x🦊")
    outputs, _ = run(start(tokenizer), most)
    assert [output.outputs[0].text for output in outputs[:-1]] == ["x"] * (len(most) - 1)
    assert outputs[-1].outputs[0].text == "x\ufffd"


def test_text_continues_the_prompt(sentencepiece: Tokenizer) -> None:
    assert text_of(sentencepiece, tokens_of(sentencepiece, "stop")) == " stop"


def test_end_of_sequence_token_is_a_token_but_no_text(tokenizer: Tokenizer) -> None:
    eos = tokens_of(tokenizer, "</s>")[-1]
    tokens = [*tokens_of(tokenizer, " fox"), eos]
    for skip in (True, False):
        outputs, _ = run(start(tokenizer, skip_special_tokens=skip), tokens, reason="stop")
        choice = outputs[-1].outputs[0]
        assert (choice.text, choice.token_ids[-1], choice.finish_reason) == (" fox", eos, "stop")
        assert choice.stop_reason is None


def test_stop_token_is_shown_when_stops_are_included(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, " fox the")
    for include, text in ((False, " fox"), (True, " fox the")):
        outputs, _ = run(
            start(tokenizer, include_stop_str_in_output=include), tokens, reason="stop", stop_reason=tokens[-1]
        )
        choice = outputs[-1].outputs[0]
        assert (choice.text, choice.token_ids, choice.stop_reason) == (text, tokens, tokens[-1])


def test_special_tokens_are_skipped_or_shown(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, " fox</s> the")
    assert text_of(tokenizer, tokens) == " fox the"
    assert text_of(tokenizer, tokens, skip_special_tokens=False) == " fox</s> the"


@pytest.mark.parametrize("has_tokenizer", [True, False])
def test_without_text_all_else_is_there(tokenizer: Tokenizer, has_tokenizer: bool) -> None:
    processor = start(tokenizer if has_tokenizer else None, detokenize=False, logprobs=1)
    outputs, _ = run(processor, [8, 9], with_logprobs=True)
    choice = outputs[-1].outputs[0]
    assert (choice.text, choice.token_ids, choice.finish_reason) == ("", [8, 9], "length")
    assert choice.logprobs is not None
    assert [candidate.decoded_token for candidate in choice.logprobs[0].values()] == [None] * 3


# --- stop strings -----------------------------------------------------------------------------------------------------


def test_stop_string_across_tokens_cuts_everything_at_the_token_that_completes_it(tokenizer: Tokenizer) -> None:
    text = " one E"
    tokens = [*tokens_of(tokenizer, text), *tokens_of(tokenizer, "N"), *tokens_of(tokenizer, "D, and"), 9, 9]
    last = len(tokens_of(tokenizer, text)) + 2  # the token that begins with D
    processor = start(tokenizer, stop="END", logprobs=2)
    outputs, finish = run(processor, tokens, with_logprobs=True)
    choice = outputs[-1].outputs[0]
    assert choice.text == " one "
    assert choice.token_ids == tokens[:last]
    assert choice.logprobs is not None
    assert [next(iter(position)) for position in choice.logprobs] == tokens[:last]
    assert choice.cumulative_logprob == pytest.approx(sum(-token / 100 for token in tokens[:last]))
    assert (choice.finish_reason, choice.stop_reason, outputs[-1].finished) == ("stop", "END", True)
    assert finish == [(7, 0)], "the engine is told, once"
    assert len(outputs) == last, "what came later is ignored"


def test_stop_string_inside_a_token_cuts_the_text_after_it(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, " stop")
    assert len(tokens) == 1
    assert text_of(tokenizer, tokens, stop=["to"]) == " s"
    assert text_of(tokenizer, tokens, stop=["to"], include_stop_str_in_output=True) == " sto"


def test_stop_string_in_the_engines_last_token_needs_no_finish(tokenizer: Tokenizer) -> None:
    outputs, finish = run(start(tokenizer, stop="op"), tokens_of(tokenizer, " the stop"))
    choice = outputs[-1].outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason, finish) == (" the st", "stop", "op", [])


def test_stop_string_in_the_middle_of_a_delta_leaves_the_rest_out(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, " one END two")
    processor = start(tokenizer, stop="END", logprobs=0)
    outputs, finish = run(processor, tokens, tokens_per_step=len(tokens), with_logprobs=True)
    choice = outputs[-1].outputs[0]
    assert choice.text == " one "
    assert tokenizer.decode(choice.token_ids) == " one END"
    assert len(choice.logprobs or []) == len(choice.token_ids)
    assert (choice.finish_reason, finish) == ("stop", [])


def test_prompt_is_not_searched_for_stop_strings(tokenizer: Tokenizer) -> None:
    assert text_of(tokenizer, tokens_of(tokenizer, "k fox"), stop="quick") == "k fox"


def test_beginning_of_a_stop_string_never_leaks_and_is_released_at_the_end(tokenizer: Tokenizer) -> None:
    tokens = [token for text in (" a #", "#", "b", "#") for token in tokens_of(tokenizer, text)]
    outputs, _ = run(start(tokenizer, stop="###"), tokens)
    texts = [output.outputs[0].text for output in outputs]
    assert texts[-4:] == [" a ", " a ", " a ##b", " a ##b#"]


def test_stop_token_releases_what_was_held_back(tokenizer: Tokenizer) -> None:
    tokens = [*tokens_of(tokenizer, " a ##"), tokens_of(tokenizer, "</s>")[-1]]
    outputs, _ = run(start(tokenizer, stop="###"), tokens, reason="stop")
    choice = outputs[-1].outputs[0]
    assert (choice.text, choice.finish_reason, choice.stop_reason) == (" a ##", "stop", None)


def test_stop_string_counts_from_min_tokens_on(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, "##")[:1] * 2 + tokens_of(tokenizer, " the") + tokens_of(tokenizer, "##")[:1] * 2
    hashes = tokenizer.decode(tokens[:2])
    for min_tokens, kept in ((2, 2), (3, 5), (4, 5), (5, 5), (6, 5)):
        outputs, finish = run(start(tokenizer, stop=hashes, min_tokens=min_tokens), [*tokens, tokens[2]])
        choice = outputs[-1].outputs[0]
        assert len(choice.token_ids) == (kept if min_tokens < 6 else 6), f"min_tokens={min_tokens}"
        assert (choice.finish_reason == "stop") == (min_tokens < 6) == bool(finish)


@pytest.mark.parametrize("kind", ["tokenizer", "sentencepiece"])
def test_random_texts_and_stops_against_a_plain_oracle(kind: str, request: pytest.FixtureRequest) -> None:
    tokenizer: Tokenizer = request.getfixturevalue(kind)
    rng = random.Random(kind)
    words = [" the", " stop", "stops", "日本", " 😀", "é", "e\u0301", "\n", "#", " fox", "ab", "</s>"]
    num_stopped = 0
    for _ in range(300):
        tokens = [token for _ in range(rng.randint(1, 4)) for token in tokens_of(tokenizer, rng.choice(words))]
        text = tokenizer.decode([*tokenizer.encode(PROMPT), *tokens]).removeprefix(PROMPT)
        begins = rng.choices(range(len(text) + 1), k=rng.randint(1, 3))
        stops = [text[begin : begin + rng.randint(1, 6)] or "zz" for begin in begins]
        params = {"stop": stops, "include_stop_str_in_output": rng.random() < 0.3}
        expected_text, expected_tokens, expected_stop = oracle(tokenizer, tokens, **params)
        whole, _ = run(start(tokenizer, kind="final", **params), tokens, tokens_per_step=rng.randint(1, 3))
        outputs, _ = run(start(tokenizer, **params), tokens)
        for output in (whole[-1], outputs[-1]):
            choice = output.outputs[0]
            assert (choice.text, len(choice.token_ids)) == (expected_text, expected_tokens), stops
            assert choice.stop_reason == expected_stop
        assert all(expected_text.startswith(output.outputs[0].text) for output in outputs), "text was taken back"
        num_stopped += expected_stop is not None
    assert num_stopped > 50


def oracle(
    tokenizer: Tokenizer, tokens: list[int], stop: list[str], include_stop_str_in_output: bool
) -> tuple[str, int, str | None]:
    """Decode each prefix of the output as a whole and look for stop strings in it, character by character."""
    prompt = tokenizer.encode(PROMPT)
    for num_tokens in range(1, len(tokens) + 1):
        text = tokenizer.decode([*prompt, *tokens[:num_tokens]]).removeprefix(PROMPT)
        text = text if num_tokens == len(tokens) else text.rstrip("\ufffd")
        for end in range(1, len(text) + 1):
            found = [string for string in stop if text[:end].endswith(string)]
            if found:
                longest = max(found, key=len)
                start_of_stop = end - len(longest)
                return text[: end if include_stop_str_in_output else start_of_stop], num_tokens, longest
    return text, len(tokens), None


# --- logprobs ---------------------------------------------------------------------------------------------------------


def test_logprobs_hold_the_chosen_token_first_with_its_text(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, " the stop")
    outputs, _ = run(start(tokenizer, logprobs=2), tokens, with_logprobs=True)
    choice = outputs[-1].outputs[0]
    assert choice.logprobs is not None
    for token, position in zip(tokens, choice.logprobs, strict=True):
        assert list(position) == [token, token + 1, token + 2]
        assert (position[token].logprob, position[token].rank) == (-token / 100, 3)
        assert position[token].decoded_token == tokenizer.token_text(token)
    assert choice.cumulative_logprob == pytest.approx(sum(-token / 100 for token in tokens))


def test_chosen_token_among_the_most_likely_is_listed_once(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, logprobs=2)
    record = TokenLogprobs([4, 3, 4], [-1.0, -0.5, -1.0], [2, 1, 2])
    (output,) = outputs_of(processor, processor.process([SequenceDelta(7, 0, [4], [record])], ARRIVAL_S))
    assert output.outputs[0].logprobs is not None
    assert list(output.outputs[0].logprobs[0]) == [4, 3]


def test_prompt_logprobs_have_nothing_for_the_first_token(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, prompt_logprobs=2, n=2)
    (output,) = outputs_of(processor, processor.process([SequenceDelta(7, 1, [4])], ARRIVAL_S))
    assert output.prompt_logprobs is None, "they ride on branch 0"
    delta = SequenceDelta(7, 0, [4], prompt_logprobs=LogprobTable.of(map(logprobs_of, (11, 12))))
    (output,) = outputs_of(processor, processor.process([delta], ARRIVAL_S))
    assert output.prompt_logprobs is not None
    first, *others = output.prompt_logprobs
    assert first is None
    assert [list(position or ()) for position in others] == [[11, 12, 13], [12, 13, 14]]


def test_prompt_of_one_token_has_one_empty_prompt_logprob(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, prompt_logprobs=1)
    (output,) = outputs_of(processor, processor.process([SequenceDelta(7, 0, [4])], ARRIVAL_S))
    assert output.prompt_logprobs == [None]


# --- branches and ends ------------------------------------------------------------------------------------------------


def test_answers_of_a_beam_search_come_at_once_with_the_sums_of_their_logprobs(tokenizer: Tokenizer) -> None:
    processor, tokens = start(tokenizer, "final", n=2), tokens_of(tokenizer, " brown fox")
    sums = {0: -1.25, 1: -math.inf}
    deltas = [
        SequenceDelta(7, index, tokens, finish_reason="length", cumulative_logprob=value)
        for index, value in sums.items()
    ]
    (output,) = outputs_of(processor, processor.process(deltas, ARRIVAL_S + 1))
    assert [each.cumulative_logprob for each in output.outputs] == list(sums.values())
    assert [each.text for each in output.outputs] == [" brown fox"] * 2
    assert [each.logprobs for each in output.outputs] == [None, None]


def test_request_ends_with_its_last_branch(tokenizer: Tokenizer) -> None:
    the, stop = tokens_of(tokenizer, " the")[0], tokens_of(tokenizer, " stop")[0]
    processor = start(tokenizer, kind="final", n=3, stop=" stop")
    step = processor.process([SequenceDelta(7, index, [the]) for index in range(3)], 101.0)
    assert (step.ready, step.stopped) == ([], [])
    deltas = [
        SequenceDelta(7, 0, [the], finish_reason="length"),
        SequenceDelta(7, 1, [stop]),
        SequenceDelta(7, 2, [the]),
    ]
    step = processor.process(deltas, 102.0)
    assert (step.ready, step.stopped) == ([], [(7, 1)])
    late = SequenceDelta(7, 1, [the], finish_reason="length")
    step = processor.process([late, SequenceDelta(7, 2, [the], finish_reason="stop", stop_reason=the)], 103.0)
    (output,) = outputs_of(processor, step)
    assert [choice.text for choice in output.outputs] == [" the the", " the", " the the"]
    assert [choice.finish_reason for choice in output.outputs] == ["length", "stop", "stop"]
    assert [choice.stop_reason for choice in output.outputs] == [None, " stop", the]
    assert [choice.index for choice in output.outputs] == [0, 1, 2]


def test_streamed_request_with_branches_gives_one_output_per_step(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, n=2)
    step = processor.process([SequenceDelta(7, index, tokens_of(tokenizer, " the")) for index in range(2)], 101.0)
    assert [[choice.text for choice in output.outputs] for output in outputs_of(processor, step)] == [[" the", " the"]]


def test_requests_do_not_mix(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer)
    processor.add(prepare(8, [4], SamplingParams()), external_id="other", arrival_s=0.0, kind="cumulative")
    step = processor.process(
        [SequenceDelta(8, 0, tokens_of(tokenizer, " fox")), SequenceDelta(7, 0, tokens_of(tokenizer, " the"))], 101.0
    )
    texts = [(output.request_id, output.outputs[0].text) for output in outputs_of(processor, step)]
    assert texts == [("other", " fox"), ("mine", " the")]


def test_abort_gives_what_was_there_and_ignores_what_comes(tokenizer: Tokenizer) -> None:
    the = tokens_of(tokenizer, " the")[0]
    processor = start(tokenizer, n=2, stop="ee")
    processor.process([SequenceDelta(7, 0, [the], finish_reason="length"), SequenceDelta(7, 1, [the])], 101.0)
    ended = processor.abort(7, 102.0)
    assert ended is not None
    assert (ended.num_output_tokens, ended.finish_reasons) == (2, ["length", "abort"])
    assert processor.abort(7, 103.0) is None
    output = processor.output(7)
    assert output.finished
    assert [choice.finish_reason for choice in output.outputs] == ["length", "abort"]
    assert [choice.text for choice in output.outputs] == [" the", " the"], "held back text is released"
    assert output.metrics is not None
    assert output.metrics.finished_s == 102.0
    assert processor.process([SequenceDelta(7, 1, [the])], 103.0).ready == []
    with pytest.raises(KeyError):
        processor.abort(7, 104.0)


def test_id_is_free_again_after_the_end(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer)
    run(processor, [9])
    processor.add(prepare(7, [4], SamplingParams()), external_id="next", arrival_s=0.0)
    assert run(processor, [9])[0][0].request_id == "next"


# --- deltas -----------------------------------------------------------------------------------------------------------


def test_deltas_join_to_what_the_whole_gives(tokenizer: Tokenizer) -> None:
    tokens = tokens_of(tokenizer, " brown fox 日本 😀 stop here")
    params = {"stop": " here", "logprobs": 0}
    (whole,), _ = run(start(tokenizer, kind="final", **params), tokens, with_logprobs=True)
    deltas, _ = run(start(tokenizer, kind="delta", **params), tokens, with_logprobs=True)
    choices = [choice for delta in deltas for choice in delta.outputs]
    (expected,) = whole.outputs
    assert "".join(choice.text for choice in choices) == expected.text == " brown fox 日本 😀 stop"
    assert [token for choice in choices for token in choice.token_ids] == expected.token_ids
    assert [entry for choice in choices for entry in choice.logprobs or []] == expected.logprobs
    assert [choice.finish_reason for choice in choices[:-1]] == [None] * (len(choices) - 1)
    last = choices[-1]
    assert (last.finish_reason, last.stop_reason) == (expected.finish_reason, expected.stop_reason) == ("stop", " here")
    assert last.cumulative_logprob == expected.cumulative_logprob


def test_slow_reader_finds_everything_in_one_delta(tokenizer: Tokenizer) -> None:
    brown, fox = tokens_of(tokenizer, " brown")[0], tokens_of(tokenizer, " fox")[0]
    processor = start(tokenizer, kind="delta", n=3, prompt_logprobs=0)
    processor.process([SequenceDelta(7, 2, [brown]), SequenceDelta(7, 0, [fox])], 101.0)
    processor.process([SequenceDelta(7, 2, [fox])], 102.0)
    first = processor.output(7)
    assert [(choice.index, choice.token_ids) for choice in first.outputs] == [(0, [fox]), (2, [brown, fox])]
    assert first.prompt_logprobs == [None]
    processor.process([SequenceDelta(7, 0, [brown])], 103.0)
    second = processor.output(7)
    assert [(choice.index, choice.token_ids) for choice in second.outputs] == [(0, [brown])]
    assert second.prompt_logprobs is None, "given once"


# --- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_tell_when_things_happened(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer)
    processor.record_scheduled([], [Admission(7, 0)], 100.2)
    outputs, _ = run(processor, [9, 9])
    first, last = outputs[0].metrics, outputs[1].metrics
    assert first is not None
    assert last is not None
    assert (first.arrival_s, first.first_scheduled_s, first.first_token_s) == (100.0, 100.2, 100.5)
    assert first.queue_s == pytest.approx(0.2)
    assert (first.finished_s, last.first_token_s, last.finished_s) == (None, 100.5, 101.0)
    processor.record_scheduled([], [Admission(7, 2)], 105.0)  # ended: nothing to note


def test_preemptions_are_counted_and_the_first_admission_stays(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer)
    processor.record_scheduled([], [Admission(7, 0)], 100.2)
    processor.record_scheduled([], [Admission(7, 2)], 100.4)
    metrics = run(processor, [9])[0][0].metrics
    assert metrics is not None
    assert (metrics.first_scheduled_s, metrics.num_preemptions) == (100.2, 2)


def test_preemption_costs_the_time_to_the_next_token_or_to_the_next_preemption(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer)
    processor.record_scheduled([], [Admission(7, 0)], 100.0)
    processor.process([SequenceDelta(7, 0, [9])], 101.0)
    processor.record_scheduled([7], [], 102.0)
    processor.record_scheduled([], [Admission(7, 1)], 103.0)
    told = processor.output(7).metrics
    assert told is not None
    assert [(each.returned_s, each.cost_s) for each in told.preemptions] == [(103.0, None)], "it computes them again"
    processor.record_scheduled([7], [], 104.0)
    processor.record_scheduled([], [Admission(7, 2)], 105.0)
    for now_s in (106.5, 107.0):
        processor.process([SequenceDelta(7, 0, [9])], now_s)
    assert [each.cost_s for each in told.preemptions] == [2.0, 2.5]


def test_only_the_last_preemptions_are_kept_and_all_are_counted(tokenizer: Tokenizer) -> None:
    processor, number = start(tokenizer), MAX_PREEMPTIONS_KEPT + 5
    processor.record_scheduled([], [Admission(7, 0)], 100.0)
    for nth in range(1, number + 1):
        processor.record_scheduled([7], [], 100.0 + nth)
        if nth < number:
            processor.record_scheduled([], [Admission(7, nth)], 100.5 + nth)
    processor.process([SequenceDelta(7, 0, [9])], 1000.0)
    told = processor.output(7).metrics
    assert told is not None
    assert told.num_preemptions == number, "the last one counts although the request is still away"
    assert [each.preempted_s for each in told.preemptions] == [100.0 + nth for nth in range(6, number + 1)]
    assert (told.preemptions[-2].returned_s, told.preemptions[-1].returned_s) == (99.5 + number, None)


def test_tokens_found_in_the_cache_are_told(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer)
    processor.record_scheduled([], [Admission(7, 0, 3)], 100.2)
    processor.record_scheduled([], [Admission(7, 1, 3)], 100.4)
    assert run(processor, [9])[0][0].num_cached_tokens == 3


def test_step_tells_first_tokens_gaps_and_ends(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, n=2)
    first = processor.process([SequenceDelta(7, 0, [9]), SequenceDelta(7, 1, [9])], 101.0)
    (metrics,) = first.first_tokens
    assert (metrics.first_token_s, first.num_prompt_tokens) == (101.0, len(tokenizer.encode(PROMPT)))
    assert (first.itl_s, first.finished) == ([], [])
    second = processor.process([SequenceDelta(7, index, [9], finish_reason="length") for index in (0, 1)], 101.5)
    assert (second.first_tokens, second.itl_s) == ([], [0.5, 0.5])
    (ended,) = second.finished
    assert (ended.num_output_tokens, ended.finish_reasons) == (4, ["length", "length"])
    assert ended.metrics.finished_s == 101.5


def test_step_counts_the_tokens_that_users_get(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, stop=["jumps"])
    tokens = tokens_of(tokenizer, "fox jumps over")
    step = processor.process([SequenceDelta(7, 0, tokens)], 101.0)
    late = processor.process([SequenceDelta(7, 0, tokens)], 102.0)
    (output,) = outputs_of(processor, step)
    assert 0 < step.num_output_tokens == len(output.outputs[0].token_ids) < len(tokens)
    assert late.num_output_tokens == 0


def test_step_is_processed_in_slices_of_bounded_work(tokenizer: Tokenizer) -> None:
    """256 streams of 20 candidates each, and one beam search whose answers are whole."""
    processor = OutputProcessor(tokenizer, is_packed=True)
    for request_id in range(256):
        prepared = prepare(request_id, [5], SamplingParams(logprobs=20))
        processor.add(prepared, external_id="x", arrival_s=0.0, kind="delta")
    processor.add(prepare(256, [5], SamplingParams(n=2)), external_id="x", arrival_s=0.0)
    record = TokenLogprobs([7, *range(20)], [-1.0] * 21, [*range(1, 22)])
    deltas = [SequenceDelta(request_id, 0, [7], [record]) for request_id in range(256)]
    deltas += [SequenceDelta(256, index, [7] * 10_000, finish_reason="length") for index in range(2)]
    looks: list[int] = []
    num_gaps = 0
    for step in processor.process_in_slices(deltas, 101.0):
        looks.append(step.num_output_tokens + 21 * len(step.ready))
        num_gaps += len(step.itl_s)
        for request_id in step.ready:
            processor.output(request_id)
    assert max(looks) <= SLICE_UNITS + PART_TOKENS
    assert sum(looks) == 256 * 22 + 21 + 20_000
    assert num_gaps == 0, "a delta in parts has no time between them"
    assert len(processor) == 256


def test_request_may_be_dropped_between_slices(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer, kind="delta")
    slices = processor.process_in_slices([SequenceDelta(7, 0, [9] * 4000, finish_reason="length")], 101.0)
    assert next(slices).ready == [7]
    processor.drop(7)
    assert all(not (step.ready or step.finished or step.failed) for step in slices)


def test_request_that_waits_holds_no_branches(tokenizer: Tokenizer) -> None:
    """1,024 may wait, with 64 branches and 64 stop strings each."""
    params = SamplingParams(n=64, stop=[f"{'x' * 1000}{number}" for number in range(64)])
    processor = OutputProcessor(tokenizer)
    tracemalloc.start()
    for request_id in range(64):
        processor.add(prepare(request_id, [5], params), external_id="x", arrival_s=0.0)
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 64 * 4096
    processor.process([SequenceDelta(3, 5, [9])], 101.0)
    assert len(processor._requests[3].branches) == 1


def test_module_loads_no_torch() -> None:
    source = Path(__file__).parents[2] / "src"
    check = "import sys, quire.engine.requests.output_processor; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True, env={"PYTHONPATH": str(source)}, timeout=60)


@pytest.mark.parametrize("index", [0, 1])
def test_request_fails_whichever_of_its_branches_has_ended(tokenizer: Tokenizer, index: int) -> None:
    processor = start(tokenizer, n=2)
    processor.process([SequenceDelta(7, index, [5], finish_reason="length"), SequenceDelta(7, 1 - index, [5])], 1.0)
    step = processor.process([SequenceDelta(7, 0, [], error="no device")], 2.0)
    assert [(request_id, str(error)) for request_id, error in step.failed] == [(7, "no device")]
    assert len(processor) == 0


def test_request_that_has_ended_cannot_fail(tokenizer: Tokenizer) -> None:
    processor = start(tokenizer)
    ended, error = SequenceDelta(7, 0, [5], finish_reason="length"), SequenceDelta(7, 0, [], error="no device")
    step = processor.process([ended, error], 1.0)
    assert (step.ready, list(step.failed)) == ([7], [])


def test_fault_in_one_request_takes_nothing_from_the_others(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = start(tokenizer)
    processor.add(prepare(8, [5], SamplingParams(n=2)), external_id="b", arrival_s=100.0)
    fault, extend = RuntimeError("no such byte"), CompletionBuilder.extend

    def failing(branch: CompletionBuilder, delta: SequenceDelta) -> None:
        if (delta.request_id, delta.index) == (8, 1):
            raise fault
        extend(branch, delta)

    monkeypatch.setattr(CompletionBuilder, "extend", failing)
    tokens = tokens_of(tokenizer, " the")
    deltas = [SequenceDelta(8, 0, tokens), SequenceDelta(8, 1, tokens), SequenceDelta(7, 0, tokens)]
    step = processor.process(deltas, 101.0)
    assert (step.failed, step.ready, step.num_output_tokens) == ([(8, fault)], [7], 2)
    assert 8 not in processor
    assert processor.process(deltas, 102.0).ready == [7]


def test_pooled_vector_reaches_the_output() -> None:
    processor = start(None, "final")
    delta = SequenceDelta(7, 0, [], finish_reason="stop", pooled=struct.pack("3f", 1.0, -0.5, 0.25))
    processor.process([delta], now_s=STEP_S)
    output = processor.output(7)
    assert output.pooled is not None
    assert output.pooled.tolist() == [1.0, -0.5, 0.25]
    assert (output.finished, output.outputs[0].token_ids, output.outputs[0].finish_reason) == (True, [], "stop")
