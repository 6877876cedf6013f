"""Repetition detection: parameters, and patterns at the end of an output."""

import random

import pytest

from quire.core.errors import InvalidRequestError
from quire.core.sampling_params import (
    MAX_PATTERN_SIZE,
    RepetitionDetectionParams,
    RepetitionDetector,
    repetition_detection_from,
)


def first_end(params: RepetitionDetectionParams, tokens: list[int]) -> int | None:
    """Return how many tokens an output has when its repetition is found."""
    detector = RepetitionDetector(params)
    return next((n + 1 for n, token in enumerate(tokens) if detector.append(tokens[:n], token)), None)


def repeats(params: RepetitionDetectionParams, tokens: list[int]) -> bool:
    """Return whether the tokens end with a pattern that repeats, by comparing whole patterns."""
    for size in range(max(1, params.min_pattern_size), params.max_pattern_size + 1):
        parts = [tokens[len(tokens) - size * n : len(tokens) - size * (n - 1)] for n in range(1, params.min_count + 1)]
        if size * params.min_count <= len(tokens) and all(part == parts[0] for part in parts):
            return True
    return False


@pytest.mark.parametrize("seed", range(20))
def test_output_ends_where_a_pattern_first_has_repeated(seed: int) -> None:
    rng = random.Random(seed)
    least = rng.randint(0, 4)
    params = RepetitionDetectionParams(least + rng.randint(1, 4), least, rng.randint(2, 4))
    tokens = [rng.randrange(2) for _ in range(200)]
    ends = [n for n in range(1, len(tokens) + 1) if repeats(params, tokens[:n])]
    assert first_end(params, tokens) == (ends[0] if ends else None)


def test_patterns_outside_of_the_sizes_are_no_repetition() -> None:
    tokens = [5] + [1, 2, 3] * 4
    assert first_end(RepetitionDetectionParams(3, 0, 3), tokens) == 10
    assert first_end(RepetitionDetectionParams(2, 0, 2), tokens) is None
    assert first_end(RepetitionDetectionParams(6, 4, 2), tokens) == 13
    assert first_end(RepetitionDetectionParams(9, 1, 5), tokens) is None


def test_parameters_may_be_a_mapping_and_may_be_off() -> None:
    params = RepetitionDetectionParams(4, 0, 3)
    assert repetition_detection_from({"max_pattern_size": 4, "min_count": 3}) == params
    assert repetition_detection_from(params) is params
    assert repetition_detection_from({}) is None


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"max_pattern_size": MAX_PATTERN_SIZE + 1, "min_count": 2}, "max_pattern_size must be .* to 256, got 257"),
        ({"max_pattern_size": 2}, "min_count must be an integer from 2"),
        ({"max_pattern_size": 2, "min_count": 1}, "min_count must be an integer from 2"),
        ({"max_pattern_size": 2, "min_pattern_size": 3, "min_count": 2}, "min_pattern_size must be .* 0 to 2, got 3"),
        ({"max_pattern_size": 1.5, "min_count": 2}, "max_pattern_size must be an integer"),
        ({"size": 2}, "repetition_detection has no field 'size'"),
        (3, "repetition_detection must be RepetitionDetectionParams or a mapping"),
    ],
)
def test_parameters_out_of_range_are_named(given: object, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as refused:
        repetition_detection_from(given)
    assert str(refused.value.param).startswith("repetition_detection")
