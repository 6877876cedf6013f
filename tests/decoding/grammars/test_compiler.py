"""The cache of compiled grammars: bounds in entries, bytes and pending work, and the order of eviction."""

import gc
import threading
from pathlib import Path

import pytest

from quire.core.structured_outputs import StructuredOutputsParams
from quire.decoding.grammars import compiler
from quire.decoding.grammars.compiler import CompiledGrammar, GrammarCache, GrammarError
from support.grammars import Vocabulary

pytestmark = pytest.mark.usefixtures("tests_frozen")


@pytest.fixture(scope="module")
def vocabulary(demo_model: Path) -> Vocabulary:
    return Vocabulary(demo_model)


def number(index: int, more: int = 0) -> StructuredOutputsParams:
    return StructuredOutputsParams(regex=f"{index}" + "a" * more)


def compiled(cache: GrammarCache, params: StructuredOutputsParams) -> CompiledGrammar:
    while not cache.is_compiled(params):
        cache.wait(10)
    return cache.get(params)


def test_equal_parameters_are_compiled_once(vocabulary: Vocabulary) -> None:
    cache = vocabulary.cache()
    first = compiled(cache, number(1))
    assert compiled(cache, StructuredOutputsParams(regex="1")) is first
    assert cache.num_compiled == 1


def test_what_was_used_last_stays(vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "MAX_ENTRIES", 4)
    cache = vocabulary.cache()
    for index in range(4):
        compiled(cache, number(index))
    compiled(cache, number(0))
    compiled(cache, number(4))
    assert [params for params, _ in cache._entries] == [number(2), number(3), number(0), number(4)]
    assert cache.num_entries == 4


def test_bytes_of_all_grammars_are_bounded_and_rows_hold_theirs(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = compiler.BASE_BYTES + compiler.BYTES_PER_CHAR * 1000
    monkeypatch.setattr(compiler, "MAX_BYTES", 3 * one)
    cache = vocabulary.cache()
    held = [compiled(cache, number(index, 900)) for index in range(2)]
    for index in range(2, 8):
        compiled(cache, number(index, 900))
        gc.collect()
        assert cache.num_bytes <= 3 * one
    assert cache.num_entries == 1
    held.append(compiled(cache, number(7, 900)))
    assert not cache.is_compiled(number(8, 900)), "three are in use"
    assert cache.num_compiled == 8
    held.clear()
    gc.collect()
    compiled(cache, number(8, 900))


def test_one_grammar_larger_than_the_bound_is_compiled_alone(
    vocabulary: Vocabulary, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler, "MAX_BYTES", 1000)
    cache = vocabulary.cache()
    compiled(cache, number(1))
    compiled(cache, number(2))
    gc.collect()
    assert cache.num_entries == 1


def test_pending_grammars_are_bounded(vocabulary: Vocabulary) -> None:
    may_load = threading.Event()
    cache = GrammarCache(lambda: (may_load.wait(), vocabulary.library)[1])
    all_params = [number(index) for index in range(2 * compiler.MAX_PENDING)]
    assert not any(cache.is_compiled(each) for each in all_params)
    assert cache.num_entries == compiler.MAX_PENDING
    may_load.set()
    for each in all_params:
        compiled(cache, each)
    assert cache.num_compiled == len(all_params)


@pytest.mark.parametrize(
    ("constraint", "reason"),
    [
        (StructuredOutputsParams(grammar="start: nothing_of_the_kind"), "nothing_of_the_kind"),
        (StructuredOutputsParams(json={"not": {"type": "string"}}), "not"),
        (StructuredOutputsParams(regex=r"[^\s\S]"), "allows no text"),
        (StructuredOutputsParams(regex="(" * 3000 + ")" * 3000), ""),
    ],
    ids=["unknown rule", "unsupported keyword", "no text", "deep"],
)
def test_grammar_that_cannot_be_used_has_a_reason(
    vocabulary: Vocabulary, constraint: StructuredOutputsParams, reason: str
) -> None:
    cache = vocabulary.cache()
    with pytest.raises(GrammarError) as error:
        compiled(cache, constraint)
    assert reason in str(error.value)
    assert 0 < len(str(error.value)) <= 300
    assert "\n" not in str(error.value)


def test_tokenizer_that_cannot_be_loaded_fails_each_grammar() -> None:
    def load() -> None:
        raise ValueError("no such tokenizer")

    cache = GrammarCache(load)  # type: ignore[arg-type]
    for index in range(2):
        with pytest.raises(GrammarError, match="no such tokenizer"):
            compiled(cache, number(index))
    assert cache.num_words == 0
