"""Rotary tables: correctly rounded, and near to what PyTorch computes in float32."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch

from quire.extension.isas import usable_isas
from quire.model import rope
from quire.model.rope import POSITIONS_AT_ONCE, RotaryTable, rotary_table

FREQUENCIES = (10_000.0 ** (-np.arange(0, 64, 2) / 64)).astype(np.float32)


@pytest.fixture(params=["cpp", "numpy"], autouse=True)
def maker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tables made by the extension, or by NumPy as where there is none."""
    if request.param == "numpy":
        monkeypatch.setattr(rope, "usable_isas", tuple)
    elif not usable_isas():
        pytest.skip("the C++ kernels were not built")


def test_cosines_come_before_sines_times_scale() -> None:
    table = rotary_table(FREQUENCIES, 2 * POSITIONS_AT_ONCE + 7, 1.5)
    assert (table.shape, table.dtype) == ((2 * POSITIONS_AT_ONCE + 7, 64), np.float32)
    for position in (0, 1, 999, POSITIONS_AT_ONCE, 2 * POSITIONS_AT_ONCE + 6):
        angles = [float(np.float32(position) * each) for each in FREQUENCIES]
        expected = [1.5 * math.cos(angle) for angle in angles] + [1.5 * math.sin(angle) for angle in angles]
        np.testing.assert_array_equal(table[position], np.array(expected).astype(np.float32))


def test_an_angle_is_rounded_to_float32_as_models_are_trained() -> None:
    position, frequency = 131_071, np.float32(1 / 3)
    exact = Fraction(position) * Fraction(float(frequency))
    angle = np.float32(float(exact))
    assert Fraction(float(angle)) != exact
    table = rotary_table(np.array([frequency]), position + 1)
    assert table[position, 0] == np.float32(math.cos(angle))
    assert table[position, 0] != np.float32(math.cos(float(exact)))


def test_entries_are_at_most_a_last_bit_off_those_of_pytorch() -> None:
    angles = torch.outer(torch.arange(20_000).float(), torch.from_numpy(FREQUENCIES))
    expected = torch.cat([angles.cos(), angles.sin()], dim=1).numpy()
    found = rotary_table(FREQUENCIES, 20_000)
    np.testing.assert_allclose(found, expected, rtol=0, atol=2.0**-24)
    assert (found != expected).mean() < 0.06


def test_portions_have_the_bits_of_the_whole_and_reach_as_far_as_asked() -> None:
    portion, num_positions = POSITIONS_AT_ONCE, 3 * POSITIONS_AT_ONCE + 5
    whole, table = rotary_table(FREQUENCIES, num_positions, 1.5), RotaryTable(FREQUENCIES, num_positions, 1.5)
    for reached, num_filled in [(1, portion), (portion, portion), (portion + 1, 2 * portion), (7, 2 * portion),
                                (num_positions + 99, num_positions)]:  # fmt: skip
        table.fill(reached)
        assert table.num_filled == num_filled
        np.testing.assert_array_equal(table.values[:num_filled], whole[:num_filled])
