"""BeamSearchParams: the contract's fields, checked at construction."""

import dataclasses
import math

import pytest

from quire.core.checks import MAX_INT
from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import MAX_LENGTH_PENALTY, BeamSearchParams, as_sampling_params


def test_fields_and_defaults_are_the_contracts() -> None:
    expected = {
        "beam_width": 4, "max_tokens": 64, "ignore_eos": False, "temperature": 0.0, "length_penalty": 1.0,
        "structured_outputs": None,
    }  # fmt: skip
    assert dataclasses.asdict(BeamSearchParams(4, 64)) == expected


@pytest.mark.parametrize(
    ("field", "value"),
    [("beam_width", value) for value in (0, -1, True, 1.0, "4", None)]
    + [("max_tokens", value) for value in (0, -1, True, 1.0, "4")]
    + [("temperature", value) for value in (-0.1, 100.1, math.nan, math.inf, True, "1", None)]
    + [("length_penalty", value) for value in (-10.1, 10.1, math.nan, math.inf, True, "1", None)]
    + [("ignore_eos", value) for value in (0, 1, "true", None)],
)
def test_a_wrong_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ValueError, match=f"{field} must be ") as caught:
        BeamSearchParams(**{"beam_width": 4, "max_tokens": 64, field: value})
    assert isinstance(caught.value, InvalidRequestError)
    assert caught.value.param == field


def test_whole_numbers_become_floats() -> None:
    params = BeamSearchParams(1, 1, temperature=1, length_penalty=-2)
    assert [type(value) for value in (params.temperature, params.length_penalty)] == [float, float]


def test_any_length_to_the_power_of_any_penalty_divides_a_score() -> None:
    for penalty in (-MAX_LENGTH_PENALTY, MAX_LENGTH_PENALTY):
        score = -1.0 / MAX_INT ** BeamSearchParams(1, 1, length_penalty=penalty).length_penalty
        assert math.isfinite(score)
        assert score < 0


def test_a_search_counts_as_so_many_answers() -> None:
    params = as_sampling_params(BeamSearchParams(3, None, ignore_eos=True, temperature=0.5))
    assert (params.n, params.max_tokens, params.ignore_eos, params.temperature) == (3, None, True, 0.5)
