"""Rows with grammars: masks follow from the tokens alone, forced tokens from masks; a fault is that of one row."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
from llguidance import LLMatcher

from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.grammars import row_state
from quire.decoding.grammars.compiler import CompiledGrammar, GrammarCache
from quire.decoding.grammars.constrained import read_vocabulary
from quire.decoding.grammars.row_state import RowProgress
from quire.decoding.grammars.rows import IDLE_STEPS, GrammarRows
from quire.grammar_writing.writer import grammar_of
from support.grammars import Vocabulary, allowed, begin, new_row, start, tokenizer_text

SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["a common beginning", "a common end"]},
        "size": {"type": "integer", "minimum": 0, "maximum": 99},
    },
    "required": ["name", "kind", "size"],
    "additionalProperties": False,
}
KINDS = {
    "json": StructuredOutputsParams(json=SCHEMA),
    "regex": StructuredOutputsParams(regex=r"(the|stop) [a-f]{2,9}é\d{3}"),
    "choice": StructuredOutputsParams(choice=["yes", "yes, indeed", "no"]),
    "grammar": StructuredOutputsParams(grammar='start: "A fixed beginning, and " /[a-z]{1,12}/ ", and an end."'),
}


@pytest.fixture(scope="module", params=["demo_model", "stories260k"])
def vocabulary(request: pytest.FixtureRequest) -> Vocabulary:
    return Vocabulary(request.getfixturevalue(request.param), num_more=45)


def plain_masks(vocabulary: Vocabulary, constraint: StructuredOutputsParams, output: list[int]) -> frozenset[int]:
    """The tokens that may follow an output: those that a fresh matcher of it takes, one by one, or is forced to."""
    matcher = LLMatcher(vocabulary.library, grammar_of(constraint))
    assert matcher.consume_tokens(output)
    mask = np.zeros(-(-vocabulary.vocab_size // 32), np.uint32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    tokens = frozenset(np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")).tolist())
    if len(tokens) > 1:
        taken = {token for token in range(vocabulary.vocab_size) if matcher.validate_tokens([token])}
        assert tokens <= taken | {vocabulary.eos}
    return tokens


def walk(vocabulary: Vocabulary, rows: GrammarRows, constraint: StructuredOutputsParams, seed: int) -> list[int]:
    """An output of random tokens from masks, and of those that are forced, up to its end."""
    rng, output = random.Random(seed), list[int]()
    begin(rows, new_row(3, constraint))
    for _ in range(200):
        step = start(rows, {3: output})
        tokens = allowed(step, vocabulary.vocab_size)[0]
        assert tokens == plain_masks(vocabulary, constraint, output)
        output.append(rng.choice(sorted(tokens)))
        progress = step.advance(3, output[-1:], 100)
        assert progress is not None
        assert (progress.num_kept, progress.failure) == (1, None)
        for token in progress.forced:
            assert plain_masks(vocabulary, constraint, output) == {token}
            output.append(token)
        if progress.has_ended:
            return output
    raise AssertionError(f"no end: {vocabulary.text(output)}")


@pytest.mark.parametrize("kind", KINDS)
def test_masks_and_forced_tokens_are_those_of_the_tokens_before(vocabulary: Vocabulary, kind: str) -> None:
    constraint = KINDS[kind]
    for seed in range(3):
        jumping = walk(vocabulary, vocabulary.rows(), constraint, seed)
        matcher = LLMatcher(vocabulary.library, grammar_of(constraint))
        assert matcher.consume_tokens(jumping)
        assert matcher.is_stopped()
        rows = vocabulary.rows(jumps_forward=False)
        assert walk(vocabulary, rows, constraint, seed)[:1] == jumping[:1]


def test_forced_tokens_save_draws_and_not_where_logprobs_are_asked_for(vocabulary: Vocabulary) -> None:
    rows, first = vocabulary.rows(), vocabulary.ids("A")[:1]
    begin(rows, new_row(0, KINDS["grammar"]), new_row(1, KINDS["grammar"], logprobs=0))
    for limit, row, is_forced in ((100, 0, True), (100, 1, False)):
        step = start(rows, {row: []})
        [token] = allowed(step, vocabulary.vocab_size)[0]
        progress = step.advance(row, [token], limit)
        assert progress is not None
        assert bool(progress.forced) == is_forced
        assert vocabulary.text([token, *progress.forced]).startswith("A fixed" if is_forced else vocabulary.text(first))
    begin(rows, new_row(2, KINDS["grammar"]))
    step = start(rows, {2: []})
    [token] = allowed(step, vocabulary.vocab_size)[0]
    assert len(step.advance(2, [token], 2).forced) == 2  # type: ignore[union-attr]


def test_state_is_made_again_from_the_tokens(vocabulary: Vocabulary) -> None:
    """In a row of a resumed sequence, in one whose state was dropped, and in one that other owners had before."""
    constraint, rows = KINDS["json"], vocabulary.rows()
    output = walk(vocabulary, vocabulary.rows(), constraint, 5)
    for end in range(0, len(output), 3):
        begin(rows, new_row(1, KINDS["regex"]), new_row(4, constraint, output[:end]))
        expected = plain_masks(vocabulary, constraint, output[:end])
        assert allowed(start(rows, {4: output[:end]}), vocabulary.vocab_size)[0] == expected
        rows.drop_idle(num_steps=0)
        assert allowed(start(rows, {4: output[:end]}), vocabulary.vocab_size)[0] == expected
    begin(rows, new_row(1, None), new_row(4, None))
    none = np.array([0, 1, 4])
    assert rows.start_step(none, none, np.zeros((8, 9), np.int32), [], none) is None


def test_rows_that_are_not_sampled_lose_their_state(vocabulary: Vocabulary) -> None:
    cache = vocabulary.cache()
    rows = vocabulary.rows(cache=cache)
    begin(rows, new_row(0, KINDS["json"]), new_row(1, KINDS["regex"]))
    start(rows, {0: [], 1: []}).masks()
    cache._entries.clear()
    in_use = cache.num_bytes
    for _ in range(2 * IDLE_STEPS):
        start(rows, {1: []}).masks()
    assert 0 < cache.num_bytes < in_use


def test_masks_behind_drafts_are_those_of_single_steps(vocabulary: Vocabulary) -> None:
    constraint = KINDS["json"]
    output = walk(vocabulary, vocabulary.rows(), constraint, 1)
    rows, wrong = vocabulary.rows(), vocabulary.ids("]")
    middle, place = len(output) // 2, len(output) // 2 + 3
    for drafts in (output[middle:place], output[middle:place] + wrong + output[place:], output[middle:]):
        begin(rows, new_row(2, constraint), new_row(5, KINDS["regex"]))
        step = start(rows, {2: output[:middle], 5: []}, {2: drafts})
        masks = allowed(step, vocabulary.vocab_size)
        is_right = [drafts[:count] == output[middle : middle + count] for count in range(len(drafts) + 1)]
        for count, right in enumerate(is_right):
            if right and middle + count < len(output):
                assert masks[count] == plain_masks(vocabulary, constraint, output[: middle + count])
        num_right = sum(is_right) - 1
        kept = [*drafts[:num_right], output[middle + num_right]] if middle + num_right < len(output) else drafts
        progress = step.advance(2, [*kept, 7, 7] if kept == drafts else kept, 0)
        assert progress == RowProgress(len(kept), has_ended=kept == drafts)


def test_drafts_are_counted_up_to_the_first_that_is_not_allowed(vocabulary: Vocabulary) -> None:
    """And the state of the row stays: behind the tokens that were sampled, and those that were forced."""
    constraint = KINDS["json"]
    output = walk(vocabulary, vocabulary.rows(jumps_forward=False), constraint, 1)
    rows, wrong, beyond = vocabulary.rows(jumps_forward=False), vocabulary.ids("]"), [vocabulary.vocab_size - 1]
    begin(rows, new_row(2, constraint))
    for place in range(len(output) - 1):
        step, rest = start(rows, {2: output[:place]}), output[place + 1 :]
        assert step.advance(2, output[place : place + 1], 0) == RowProgress(1)
        assert step.num_allowed(2, rest) == len(rest)
        assert step.num_allowed(2, [*rest, *wrong]) == len(rest)
        assert step.num_allowed(2, rest[:1] + beyond + rest) == 1
        assert step.num_allowed(5, wrong) == len(wrong)                 # a row without a grammar
    rows.drop_idle(num_steps=0)
    assert step.num_allowed(2, output) == 0


def test_what_a_grammar_does_not_allow_fails_its_row_alone(vocabulary: Vocabulary) -> None:
    rows = vocabulary.rows()
    wrong, right = vocabulary.ids("]"), KINDS["json"]
    broken = StructuredOutputsParams(grammar='start: "a" missing')
    begin(rows, new_row(0, broken), new_row(1, right), new_row(2, right, wrong), new_row(3, right))
    step = start(rows, {0: [], 1: [], 2: wrong, 3: []})
    masks = step.masks()
    assert masks.failures.keys() == {0, 2}
    assert "missing" in masks.failures[0]
    assert step.advance(0, [9], 10) is None
    tokens = allowed(step, vocabulary.vocab_size)
    assert tokens[1] == tokens[3] == plain_masks(vocabulary, right, [])
    progress = step.advance(1, wrong, 10)
    assert progress is not None
    assert "its grammar has failed" in (progress.failure or "")
    assert step.advance(3, [min(tokens[3])], 10).failure is None  # type: ignore[union-attr]


class Panic(BaseException):
    pass


Panic.__name__ = "PanicException"


@pytest.mark.parametrize("error", [Panic("a fault of the library"), ValueError("a fault of the library")])
def test_fault_of_the_library_fails_one_row(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    rows, fill, num_filled = vocabulary.rows(), row_state._fill_mask, 0

    def fail_second(matcher: LLMatcher, grammar: CompiledGrammar, bits: np.ndarray) -> None:
        nonlocal num_filled
        num_filled += 1
        if num_filled == 2:
            raise error
        fill(matcher, grammar, bits)

    begin(rows, *(new_row(row, KINDS["json"]) for row in range(4)))
    monkeypatch.setattr(row_state, "_fill_mask", fail_second)
    [why] = start(rows, {row: [] for row in range(4)}).masks().failures.values()
    assert why == "its grammar has failed: a fault of the library"


def test_lexer_that_others_have_filled_is_replaced(vocabulary: Vocabulary) -> None:
    """A regex whose lexer has more states than one may have: each output needs few, all outputs together do not fit."""
    constraint = StructuredOutputsParams(regex="(a|b|c)*a(a|b|c){16}(d|e)*")
    cache, rng = vocabulary.cache(), random.Random(0)
    rows = vocabulary.rows(cache=cache, jumps_forward=False)
    for _ in range(400):
        output = list[int]()
        begin(rows, new_row(0, constraint))
        for _ in range(40):
            step = start(rows, {0: output})
            assert not step.masks().failures
            output.append(rng.choice(sorted(allowed(step, vocabulary.vocab_size)[0] - {vocabulary.eos})))
            progress = step.advance(0, output[-1:], 0)
            assert progress is not None
            assert progress.failure is None
            if progress.has_ended:
                break
        if cache.num_compiled > 2:
            return
    raise AssertionError("the lexer was never full")


def test_tokens_past_the_model_are_never_forced(demo_model: Path) -> None:
    small = Vocabulary(demo_model)
    [high] = [each for each in range(small.vocab_size - 1, 0, -1) if small.text([each]).isalpha()][:1]
    constraint = StructuredOutputsParams(choice=["a" + small.text([high])])
    rows = GrammarRows(small.cache(), high, jumps_forward=True)
    begin(rows, new_row(0, constraint))
    step = start(rows, {0: []})
    first = min(allowed(step, small.vocab_size)[0])
    progress = step.advance(0, [first], 9)
    assert progress is not None
    assert all(token < high for token in progress.forced)


def test_text_that_is_written_as_a_special_token_is_spelled_by_others(vocabulary: Vocabulary) -> None:
    """The library forces the special token in its place, which no text matches."""
    special = vocabulary.tokenizer.token_text(vocabulary.eos)
    assert vocabulary.eos in vocabulary.tokenizer.special_token_ids
    for text in (special, f"a{special}b", 2 * special):
        constraint = StructuredOutputsParams(choice=[text])
        for jumps_forward in (True, False):
            rows, output = vocabulary.rows(jumps_forward=jumps_forward), list[int]()
            begin(rows, new_row(3, constraint))
            while vocabulary.tokenizer.decode(output) != text:
                step = start(rows, {3: output})
                (token,) = allowed(step, vocabulary.vocab_size)[0]
                assert token != vocabulary.eos
                progress = step.advance(3, [token], 100)
                assert progress is not None
                assert (progress.num_kept, progress.failure) == (1, None)
                output += [token, *progress.forced]
                assert len(output) < 100


@pytest.mark.parametrize("jumps_forward", [False, True])
def test_ends_that_have_a_text_are_allowed_where_the_output_is_complete(
    vocabulary: Vocabulary, jumps_forward: bool
) -> None:
    """A model's files may name any tokens as ends: their texts fit into strings, and begin texts that are forced."""
    rng, had_end = random.Random(0), False
    longer = [token for token in range(vocabulary.tokenizer.vocab_size) if len(vocabulary.text([token]).strip()) > 1]
    ends = frozenset(rng.sample(longer, len(longer) // 2)) - {vocabulary.eos}
    text = tokenizer_text(vocabulary.tokenizer)
    library = read_vocabulary(text, vocabulary.vocab_size, ends)
    schema = {"type": "string", "pattern": "^number of [a-z]{2,5}$"}
    for grammar in ('start: "number of " /[a-z]{2,9}/', f"start: %json {schema}".replace("'", '"')):
        cache = GrammarCache(lambda: library)
        for _ in range(8):
            rows, output = vocabulary.rows(jumps_forward=jumps_forward, cache=cache), list[int]()
            begin(rows, new_row(3, StructuredOutputsParams(grammar=grammar)))
            progress: RowProgress | None = None
            while progress is None or not progress.has_ended:
                step = start(rows, {3: output})
                token = rng.choice(sorted(allowed(step, vocabulary.vocab_size)[0]))
                progress = step.advance(3, [token], 100)
                assert progress is not None
                assert progress.failure is None
                output += [token, *progress.forced]
            is_end = output[-1] in ends | {vocabulary.eos}
            had_end |= output[-1] in ends
            written = vocabulary.text(output[:-1] if is_end else output)
            assert ends.isdisjoint(output[:-1])
            assert re.fullmatch(r"number of [a-z]{2,9}", json.loads(written) if "json" in grammar else written)
    assert had_end
