"""Fit of `StepTimes` to the steps that a worker has run: least squares over relative errors, old steps fading.

Decodes, and steps with chunks of prompts, are kept apart and fade apart: an hour of decodes forgets no prompt, and one
prompt no decode. What has not been measured stays near a guess. Steps that are far off what was predicted wait until
there are a few in a row. Then either the machine has become faster or slower as a whole, and all that was measured
before is rescaled to the new speed, or they show something new, such as longer contexts: the better fit decides.
"""

import statistics
from collections import deque
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.step_times import StepTimes

FADING = 0.9  # weight of each measurement relative to the next: about the last ten count


class Rate:
    """Amounts and the seconds that they took, with exponential decay. Large amounts weigh more than small ones."""

    def __init__(self) -> None:
        self._amount = self._seconds = 0.0
        self.per_s: float | None = None     # the amount per second; None before the first measurement

    def add(self, amount: float, seconds: float) -> None:
        self._amount = self._amount * FADING + amount
        self._seconds = self._seconds * FADING + seconds
        self.per_s = self._amount / self._seconds if self._seconds > 0 else None


Floats = NDArray[np.float64]

NUM_KEPT = 64          # steps of a kind that count: with each new one the others weigh a 64th less
MOST_OFF = 1.35        # measured to predicted, or the other way round: beyond it a step is a surprise
NUM_SURPRISES = 4      # consecutive ones that are looked at together
GUESS_WEIGHT = 0.02    # weight of each guessed price, in measured steps
MARGIN_STEPS = 64      # steps with chunks: their errors give the margin
MARGIN_SHARE = 0.9     # part of these steps that are within it
LEAST_MARGIN_STEPS, FIRST_MARGIN, MOST_MARGIN = 8, 1.1, 1.5
LOT_S = 0.01           # shorter steps are fitted in lots of this length, as one: a fit takes some 40 microseconds
# Prices before a measurement, in units of a step without tokens: while the weights are read 4 tokens are computed, one
# behind 4,000 others takes as long as two, and reading the weights as long as reading 100,000 tokens of context or as
# drawing 8 tokens. Only the ratios count, and only until steps of a kind have been measured: then a chunk that is too
# short costs little.
GUESS = np.array([1.0, 1 / 4, 1 / 4 / 4000, 1 / 100_000, 1 / 8])
_NUM_PRICES = len(GUESS)


class _Step(NamedTuple):
    """A step of at least one entry, at positions [starts[i], stops[i]), and how many tokens it has drawn."""

    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    num_samples: int


class _Lot(NamedTuple):
    """One step, or several short ones: their work in all, `is_mixed` with a chunk of a prompt, and their seconds."""

    work: Floats
    is_mixed: bool
    seconds: float


class _Measured:
    """Steps as sums of their work per second, the latest with the most weight."""

    def __init__(self) -> None:
        self.squares, self.sums, self.weight = np.zeros((_NUM_PRICES, _NUM_PRICES)), np.zeros(_NUM_PRICES), 0.0

    def add(self, work: Floats, seconds: float) -> None:
        """Add a step of work [_NUM_PRICES]; those before it fade."""
        scaled, fading = work / seconds, 1 - 1 / NUM_KEPT
        self.squares = self.squares * fading + np.outer(scaled, scaled)
        self.sums = self.sums * fading + scaled
        self.weight = self.weight * fading + 1

    def rescaled(self, factor: float) -> "_Measured":
        """Return the same steps, each of which took `factor` times as long."""
        other = _Measured()
        other.squares, other.sums, other.weight = self.squares / factor**2, self.sums / factor, self.weight
        return other

    def error(self, prices: Floats) -> float:
        """Return the sum of squares of relative errors."""
        return float(prices @ self.squares @ prices - 2 * prices @ self.sums + self.weight)


class StepTimer:
    """The prices of a worker's steps."""

    def __init__(self) -> None:
        self.times: StepTimes | None = None                  # None: nothing was measured yet
        self._prices: Floats | None = None
        self._steps: list[_Step] = []                        # not yet looked at
        self._steps_s = 0.0
        self._kinds = [_Measured(), _Measured()]             # decodes, steps with chunks
        self._surprises: list[_Lot] = []                     # not yet fitted
        self._ratios = deque[float](maxlen=MARGIN_STEPS)     # measured to predicted, of steps with chunks

    def record(
        self, starts: NDArray[np.int64], stops: NDArray[np.int64], num_samples: int, seconds: float
    ) -> float | None:  # fmt: skip
        """Record a step of entries at positions [starts[i], stops[i]) that has drawn so many tokens.

        At least one entry. Return measured over predicted seconds of the lot that it completes; None without a lot or
        a prediction.
        """
        self._steps.append(_Step(starts, stops, num_samples))
        self._steps_s += seconds
        if self._steps_s < LOT_S:
            return None
        lot = _lot(self._steps, self._steps_s)
        self._steps, self._steps_s = [], 0.0
        ratio = None if self._prices is None else lot.seconds / float(lot.work @ self._prices)
        self._look_at(lot, ratio or 1.0)
        self._fit()
        return ratio

    def _look_at(self, lot: _Lot, ratio: float) -> None:
        if lot.is_mixed:
            self._ratios.append(ratio)
        self._surprises.append(lot)
        is_known = self._kinds[lot.is_mixed].weight > 1
        if is_known and not 1 / MOST_OFF <= ratio <= MOST_OFF and len(self._surprises) < NUM_SURPRISES:
            return
        if len(self._surprises) >= NUM_SURPRISES:
            self._rescale_if_better()
        _add(self._kinds, self._surprises)
        self._surprises = []

    def _rescale_if_better(self) -> None:
        """Rescale what was measured before the surprises, if one set of prices then explains all of it better."""
        assert self._prices is not None, "a surprise without a prediction"
        factor = statistics.median(lot.seconds / float(lot.work @ self._prices) for lot in self._surprises)
        rescaled = [kind.rescaled(factor) for kind in self._kinds]
        if _error(rescaled, self._surprises) < _error(self._kinds, self._surprises):
            self._kinds = rescaled
            self._ratios.clear()

    def _fit(self) -> None:
        if any(kind.weight for kind in self._kinds):
            self._prices = _fitted(self._kinds)
            step_s, token_s, attended_s, context_s, sample_s = self._prices.tolist()
            self.times = StepTimes(step_s, token_s, attended_s, context_s, sample_s, self._margin())

    def _margin(self) -> float:
        if len(self._ratios) < LEAST_MARGIN_STEPS:
            return FIRST_MARGIN
        return min(max(sorted(self._ratios)[int(MARGIN_SHARE * len(self._ratios))], 1.0), MOST_MARGIN)


def _add(kinds: list[_Measured], lots: list[_Lot]) -> None:
    for lot in lots:
        kinds[lot.is_mixed].add(lot.work, lot.seconds)


def _error(kinds: list[_Measured], lots: list[_Lot]) -> float:
    """Return the error that is left once these are fitted together with what was measured before."""
    together = [kind.rescaled(1.0) for kind in kinds]
    _add(together, lots)
    prices = _fitted(together)
    return sum(kind.error(prices) for kind in together)


def _lot(steps: list[_Step], seconds: float) -> _Lot:
    """Return what prices are multiplied with, over all of these steps."""
    starts, stops = (np.concatenate([step[side] for step in steps]) for side in (0, 1))
    num_entries, num_samples = np.array([(len(step.starts), step.num_samples) for step in steps]).T
    counts = stops - starts
    num_tokens = np.add.reduceat(counts, num_entries.cumsum() - num_entries)                     # per step
    num_unsampled = int(np.maximum(num_tokens - num_samples, 0).sum())
    num_attended = int(counts @ (starts + stops + 1)) / 2
    work = np.array([len(steps), num_unsampled, num_attended, int(stops.sum()), int(num_samples.sum())], np.float64)
    return _Lot(work, num_unsampled > 0, seconds)


def _fitted(kinds: list[_Measured]) -> Floats:
    """Return the prices with the least squares of relative errors, none of them negative.

    They are solved for in units of the guess, itself in the unit that fits best: what was not measured stays there.
    """
    squares, sums = sum(kind.squares for kind in kinds), sum(kind.sums for kind in kinds)
    unit = GUESS * (GUESS @ sums) / (GUESS @ squares @ GUESS)
    left = np.outer(unit, unit) * squares + GUESS_WEIGHT * np.eye(_NUM_PRICES)
    right = unit * sums + GUESS_WEIGHT
    used = np.ones(_NUM_PRICES, dtype=bool)
    while True:
        found = np.zeros(_NUM_PRICES)
        found[used] = np.linalg.solve(left[np.ix_(used, used)], right[used])
        if (found >= 0).all():
            return np.asarray(found * unit)
        used &= found > 0
