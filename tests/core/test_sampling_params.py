"""SamplingParams: the contract's fields and defaults, and one refusal for every way to be wrong."""

import contextlib
import copy
import dataclasses
import math
import pickle
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire.core.checks import MAX_INT
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import MAX_SEED, MIN_SEED, SamplingParams

CONTRACT_DEFAULTS = {
    "ttft_deadline_ms": None,
    "deadline_ms": None,
    "n": 1,
    "temperature": 1.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "seed": None,
    "stop": None,
    "stop_token_ids": None,
    "ignore_eos": False,
    "max_tokens": 16,
    "min_tokens": 0,
    "logprobs": None,
    "prompt_logprobs": None,
    "prompt_logprob_token_ids": None,
    "prompt_logprob_start": None,
    "logprob_token_ids": None,
    "logit_bias": None,
    "allowed_token_ids": None,
    "bad_words": None,
    "truncate_prompt_tokens": None,
    "include_stop_str_in_output": False,
    "skip_special_tokens": True,
    "detokenize": True,
    "structured_outputs": None,
    "repetition_detection": None,
    "guided_decoding": None,
    "flat_logprobs": False,
}

# Field: the ends of its range, then values just outside.
NUMBERS: dict[str, tuple[list[object], list[object]]] = {
    "n": ([1, MAX_INT], [0, -1, MAX_INT + 1]),
    "temperature": ([0, 0.0, 5e-324, 100, 100.0], [-1e-9, 100.1, 10**400]),
    "top_p": ([5e-324, 1, 1.0], [0, 0.0, -0.5, 1.0000001]),
    "top_k": ([-1, 0, 1, MAX_INT], [-2, MAX_INT + 1]),
    "min_p": ([0, 1], [-1e-9, 1.0000001]),
    "presence_penalty": ([-2, 2], [-2.001, 2.001]),
    "frequency_penalty": ([-2, 2], [-2.001, 2.001]),
    "repetition_penalty": ([5e-324, 100], [0, -1, 100.1]),
    "seed": ([MIN_SEED, -1, 0, MAX_SEED], [MIN_SEED - 1, MAX_SEED + 1, 10**6000]),
    "max_tokens": ([1, MAX_INT], [0, -1, MAX_INT + 1]),
    "min_tokens": ([0, 16], [-1, 17]),
    "logprobs": ([-1, 0, MAX_INT], [-2, MAX_INT + 1]),
    "prompt_logprobs": ([-1, 0, MAX_INT], [-2, MAX_INT + 1]),
    "truncate_prompt_tokens": ([-1, 1, MAX_INT], [-2, 0, MAX_INT + 1]),
}
FLOATS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
OPTIONAL = (
    "structured_outputs", "guided_decoding", "seed", "stop", "stop_token_ids", "max_tokens", "logprobs",
    "prompt_logprobs", "truncate_prompt_tokens", "logit_bias", "logprob_token_ids",
    "repetition_detection", "prompt_logprob_token_ids", "prompt_logprob_start",
)
BOOLS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize", "flat_logprobs")


def shown(value: object) -> str:
    return f"{value.bit_length()} bits" if isinstance(value, int) else ascii(value)[:24]


def refusal(**fields: object) -> InvalidRequestError:
    with pytest.raises(ValueError, match=re.escape(next(iter(fields)))) as caught:
        SamplingParams(**fields)
    assert isinstance(caught.value, InvalidRequestError)
    return caught.value


def test_flat_logprobs_are_refused_by_name() -> None:
    assert str(refusal(flat_logprobs=True)) == (
        "flat_logprobs must be false: logprobs are lists with a dict for each token, got True"
    )


def test_fields_and_defaults_are_the_contracts() -> None:
    assert dataclasses.asdict(SamplingParams()) == CONTRACT_DEFAULTS


@pytest.mark.parametrize(("field", "value"), [(field, value) for field in NUMBERS for value in NUMBERS[field][0]])
def test_both_ends_of_a_range_are_accepted(field: str, value: object) -> None:
    expected = 0 if (field, value) == ("top_k", -1) else value
    assert getattr(SamplingParams(**{field: value}), field) == expected


@pytest.mark.parametrize(
    ("field", "value"), [(field, value) for field in NUMBERS for value in NUMBERS[field][1]], ids=shown
)
def test_a_value_past_its_range_is_refused_by_name(field: str, value: object) -> None:
    error = refusal(**{field: value})
    assert error.param == field
    assert str(error).startswith(f"{field} must be ")
    assert len(str(error)) < 200


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", ["1", True, False, [1], {}, b"1", 1j, math.nan, math.inf, -math.inf], ids=repr)
def test_a_number_is_neither_bool_nor_text_nor_nan_nor_infinite(field: str, value: object) -> None:
    assert refusal(**{field: value}).param == field


@pytest.mark.parametrize("field", [field for field in NUMBERS if field not in FLOATS])
def test_a_count_is_no_float(field: str) -> None:
    assert refusal(**{field: 1.0}).param == field


@pytest.mark.parametrize("field", FLOATS)
def test_a_whole_number_becomes_a_float(field: str) -> None:
    assert type(getattr(SamplingParams(**{field: 1}), field)) is float


@pytest.mark.parametrize("field", [field for field in CONTRACT_DEFAULTS if field not in OPTIONAL])
def test_none_is_accepted_only_where_it_means_something(field: str) -> None:
    if CONTRACT_DEFAULTS[field] is None:
        assert getattr(SamplingParams(**{field: None}), field) is None
    else:
        assert refusal(**{field: None}).param == field


@pytest.mark.parametrize("field", BOOLS)
@pytest.mark.parametrize("value", [0, 1, "true", []], ids=repr)
def test_a_switch_is_strictly_bool(field: str, value: object) -> None:
    assert refusal(**{field: value}).param == field


def test_the_error_names_field_value_and_range() -> None:
    assert str(refusal(top_p=1.5)) == "top_p must be a number above 0 to 1, got 1.5"
    assert str(refusal(n=0)) == f"n must be an integer from 1 to {MAX_INT}, got 0"
    assert str(refusal(min_tokens=17)) == "min_tokens must be an integer from 0 to max_tokens (16), got 17"


def test_min_tokens_is_free_without_max_tokens() -> None:
    assert SamplingParams(max_tokens=None, min_tokens=10**6).min_tokens == 10**6


def test_one_stop_string_or_several_become_a_tuple() -> None:
    assert SamplingParams(stop="\n").stop == ("\n",)
    assert SamplingParams(stop=["a", "b"]).stop == ("a", "b")
    assert SamplingParams(stop=[]).stop == ()


@pytest.mark.parametrize("field", ["stop", "bad_words"])
@pytest.mark.parametrize("value", [[""], ["a", ""], ["a", 1], [None], 5, {"a"}, {"a": 1}, ["\ud800"]], ids=ascii)
def test_texts_are_lists_of_strings_with_something_in_them(field: str, value: object) -> None:
    assert refusal(**{field: value}).param == field


def test_bad_words_is_no_single_string() -> None:
    assert refusal(bad_words="word").param == "bad_words"


def test_stop_strings_need_text_to_be_found_in() -> None:
    assert refusal(stop="a", detokenize=False).param == "stop"
    assert not SamplingParams(stop=[], detokenize=False).detokenize


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids"])
@pytest.mark.parametrize("value", [[-1], [1.0], [True], ["1"], [None], [MAX_INT + 1], 5, "12", {1}, [[1]]], ids=repr)
def test_token_ids_are_lists_of_integers_from_zero(field: str, value: object) -> None:
    assert refusal(**{field: value}).param == field


def test_allowed_token_ids_allow_something() -> None:
    assert refusal(allowed_token_ids=[]).param == "allowed_token_ids"


def test_logit_bias_takes_the_string_keys_of_json() -> None:
    assert SamplingParams(logit_bias={"12": 1, 3: -100}).logit_bias == {12: 1.0, 3: -100.0}


@pytest.mark.parametrize(
    "value",
    [
        *({1: bias} for bias in (100.1, -100.1, math.nan, math.inf, "1", True, None)),
        *({key: 1} for key in (-1, "-1", "", "x", "1.0", "²", "٣", "9" * 5000, True, 1.0)),
        *({"7": 1, 7: 2}, {"07": 1, "7": 2}, [[1, 2]], 5),
    ],
    ids=shown,
)
def test_logit_bias_maps_token_ids_to_bounded_numbers(value: object) -> None:
    error = refusal(logit_bias=value)
    assert error.param == "logit_bias"
    assert len(str(error)) < 200


def test_lists_are_copied() -> None:
    ids, bias = [1, 2], {1: 1.0}
    params = SamplingParams(stop_token_ids=ids, logit_bias=bias)
    ids.append(3)
    bias[2] = 5.0
    assert params.stop_token_ids == (1, 2)
    assert params.logit_bias == {1: 1.0}


def test_a_copy_of_a_changed_instance_is_checked() -> None:
    params = SamplingParams()
    params.n, params.stop, params.detokenize = 2, "x", True
    assert dataclasses.replace(params).stop == ("x",)
    params.top_p = 2.0
    with pytest.raises(InvalidRequestError, match="top_p must be a number above 0 to 1, got"):
        dataclasses.replace(params)


def valid_params() -> st.SearchStrategy[SamplingParams]:
    ids = st.lists(st.integers(0, MAX_INT), max_size=5)
    texts = st.lists(st.text("ab\n é漢🙂", min_size=1, max_size=4), max_size=3)
    optional = {
        "temperature": st.floats(0, 100),
        "top_p": st.floats(0, 1, exclude_min=True),
        "top_k": st.integers(-1, 1000),
        "seed": st.none() | st.integers(MIN_SEED, MAX_SEED),
        "stop": st.none() | texts,
        "stop_token_ids": st.none() | ids,
        "allowed_token_ids": st.none() | ids.filter(bool),
        "logit_bias": st.none() | st.dictionaries(st.integers(0, MAX_INT), st.floats(-100, 100), max_size=5),
        "max_tokens": st.none() | st.integers(16, MAX_INT),
        "min_tokens": st.integers(0, 16),
    }
    return st.fixed_dictionaries({}, optional=optional).map(lambda fields: SamplingParams(**fields))


@given(valid_params())
def test_an_instance_survives_every_way_of_copying(params: SamplingParams) -> None:
    assert copy.copy(params) == params
    assert copy.deepcopy(params) == params
    assert pickle.loads(pickle.dumps(params)) == params
    assert dataclasses.replace(params) == params
    assert SamplingParams(**dataclasses.asdict(params)) == params
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(CONTRACT_DEFAULTS)), JSON))
def test_anything_json_can_say_is_taken_or_refused_in_words(fields: dict[str, object]) -> None:
    with contextlib.suppress(InvalidRequestError):
        assert SamplingParams(**fields).n >= 1


def test_long_lists_are_checked_whole() -> None:
    ids = list(range(200_000))
    params = SamplingParams(stop_token_ids=ids, allowed_token_ids=ids, logit_bias={str(token): 1.0 for token in ids})
    assert params.stop_token_ids == params.allowed_token_ids == tuple(params.logit_bias or ()) == tuple(ids)
    assert refusal(stop_token_ids=[*ids, -1]).param == "stop_token_ids"


def test_named_logprobs_are_as_many_as_logprobs() -> None:
    assert SamplingParams(logprob_token_ids=[5, 6], logprobs=2).logprob_token_ids == (5, 6)
    assert refusal(logprobs=3, logprob_token_ids=[5, 6]).param == "logprobs"
    assert refusal(logprob_token_ids=[5] * 129).param == "logprob_token_ids"


def test_rows_of_scored_tokens_may_be_ragged_padded_or_an_array() -> None:
    rows = [[], [1], (4, -1, 2)]
    assert SamplingParams(prompt_logprob_token_ids=rows).prompt_logprob_token_ids == ((), (1,), (4, -1, 2))
    for kind in (np.int32, np.uint8, ">i8"):
        params = SamplingParams(prompt_logprob_token_ids=np.array([[1, 2], [3, 4]], dtype=kind), prompt_logprob_start=2)
        assert params.prompt_logprob_token_ids == ((1, 2), (3, 4))


@pytest.mark.parametrize("rows", [
    5, "ab", [1, 2], [[1], 2], [], [[], []], [[None]], [[1.5]], [[True]], [["3"]], [[[1]]], [[-2]], [[MAX_INT + 1]],
    np.array([1, 2]), np.array([[1.0]]), np.zeros((2, 0), dtype=np.int64), np.array([[2**64 - 1]], dtype=np.uint64),
], ids=str)  # fmt: skip
def test_other_rows_of_scored_tokens_are_refused(rows: object) -> None:
    assert refusal(prompt_logprob_token_ids=rows).param == "prompt_logprob_token_ids"


def test_start_of_scored_tokens_needs_them() -> None:
    assert refusal(prompt_logprob_start=3).param == "prompt_logprob_start"
    for start in (-1, 1.0, True, MAX_INT + 1):
        with pytest.raises(InvalidRequestError, match="prompt_logprob_start must be an integer from 0"):
            SamplingParams(prompt_logprob_token_ids=[[1]], prompt_logprob_start=start)  # type: ignore[arg-type]


@pytest.mark.parametrize("named", [
    {"prompt_logprob_token_ids": [[3], [], [9]]}, {"stop_token_ids": [3, 9]}, {"allowed_token_ids": [9]},
    {"logit_bias": {9: 1.0}},
])  # fmt: skip
def test_token_ids_past_the_vocabulary_are_refused(named: dict[str, object]) -> None:
    params = SamplingParams(**named)
    params.check_vocabulary(10)
    with pytest.raises(InvalidRequestError, match=r"below the vocabulary size of 9, got 9") as caught:
        params.check_vocabulary(9)
    assert caught.value.param in named
