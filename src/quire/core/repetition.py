"""RepetitionDetectionParams: patterns of tokens that end an output when they repeat. Names and meaning are vLLM's."""

from collections.abc import Mapping
from dataclasses import dataclass, fields

from quire.core.checks import check_int, refuse, shown
from quire.core.errors import InvalidRequestError

MAX_PATTERN_SIZE = 256  # each size costs some 50 ns per token


@dataclass(frozen=True, slots=True)
class RepetitionDetectionParams:
    """Sizes of patterns, in tokens, and the repetitions in a row that end an output. InvalidRequestError names a field.

    `max_pattern_size` 0 is off. `min_pattern_size` 0 is 1.
    """

    max_pattern_size: int = 0
    min_pattern_size: int = 0
    min_count: int = 0

    def __post_init__(self) -> None:
        most = check_int("repetition_detection.max_pattern_size", self.max_pattern_size, 0, MAX_PATTERN_SIZE)
        check_int("repetition_detection.min_pattern_size", self.min_pattern_size, 0, most)
        check_int("repetition_detection.min_count", self.min_count, 2 if most else 0)


def repetition_detection_from(value: object) -> RepetitionDetectionParams | None:
    """Return parameters that were given as such or as a mapping of their fields; None for those that are off."""
    if isinstance(value, Mapping):
        known = [field.name for field in fields(RepetitionDetectionParams)]
        for name in value:
            if name not in known:
                message = f"repetition_detection has no field {shown(name)}; its fields are {', '.join(known)}"
                raise InvalidRequestError(message, param="repetition_detection")
        value = RepetitionDetectionParams(**value)
    if not isinstance(value, RepetitionDetectionParams):
        refuse("repetition_detection", value, "RepetitionDetectionParams or a mapping of its fields")
    return value if value.max_pattern_size else None


class RepetitionDetector:
    """Detector of repetitions at the end of a growing output, in a time per token that its length does not change."""

    def __init__(self, params: RepetitionDetectionParams) -> None:
        self._sizes = range(max(1, params.min_pattern_size), params.max_pattern_size + 1)
        self._num_more = params.min_count - 1   # repetitions behind the first
        self._num_equal = [0] * len(self._sizes)  # last tokens that equal those one pattern before, by size

    def append(self, output: list[int], token: int) -> bool:
        """Return whether `token`, appended to `output`, completes `min_count` repetitions of a pattern in a row."""
        found = False
        for index, size in enumerate(self._sizes):
            if size > len(output):
                break
            is_equal = output[-size] == token
            self._num_equal[index] = self._num_equal[index] + 1 if is_equal else 0
            found |= self._num_equal[index] >= size * self._num_more
        return found
