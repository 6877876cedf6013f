"""The reference of short convolutions against torch's own convolution, over tails in any pieces."""

import pytest
import torch

from quire.kernels.reference.short_conv import short_conv
from support.convolutions import ConvRunner, make_inputs, make_spec


@pytest.mark.parametrize(("taps", "has_bias"), [(1, False), (3, False), (5, True)])
def test_reference_is_a_gated_causal_convolution_of_each_channel(taps: int, has_bias: bool) -> None:
    spec, x = make_spec(24, taps, taps, has_bias=has_bias), make_inputs(70, 24, torch.float32)
    g, h, v = x.chunk(3, dim=1)
    padded = torch.nn.functional.pad((g * v).T, (taps - 1, 0))
    expected = torch.nn.functional.conv1d(padded, spec.weight.T[:, None], spec.bias, groups=24).T * h
    whole = ConvRunner(short_conv, spec, torch.float32, 16).run("a", x)
    torch.testing.assert_close(whole, expected, rtol=1e-5, atol=1e-5)
    for cut in range(1, 70):
        assert torch.equal(ConvRunner(short_conv, spec, torch.float32, 16).run("a", x, [cut]), whole), f"cut at {cut}"
