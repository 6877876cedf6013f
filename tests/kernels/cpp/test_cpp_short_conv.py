"""Short convolutions in C++ against the reference, and bits that do not depend on how tokens are divided."""

import pytest
import torch

from quire.kernels.reference import short_conv as reference
from support.convolutions import ConvRunner, make_inputs, make_spec
from support.cpp_kernels import kernel_dtype, short_conv
from support.pairwise import covering


@covering(
    {
        "width": [8, 37, 300],
        "taps": [1, 2, 3, 16],
        "spare": [1, 5, 40],
        "has_bias": [False, True],
        "block_size": [8, 16, 32],
        "dtype": [torch.float32, torch.bfloat16, torch.float16],
        "num_threads": [1, 2],
    },
    indirect=["num_threads"],
)
def test_batches_of_pieces_are_as_in_the_reference(
    width: int, taps: int, spare: int, has_bias: bool, block_size: int, dtype: torch.dtype, num_threads: int
) -> None:
    spec = make_spec(width, taps, taps - 1 + spare, has_bias=has_bias)
    ours = ConvRunner(short_conv, spec, kernel_dtype(dtype), block_size)
    plain = ConvRunner(reference.short_conv, spec, dtype, block_size)
    inputs = {name: make_inputs(60, width, dtype, seed) for seed, name in enumerate("abc")}
    done = dict.fromkeys(inputs, 0)
    for counts in ({"a": 7, "b": 1}, {"c": 33, "a": 1, "b": 2}, {"b": 1, "a": 30, "c": 1}):
        pieces = {name: inputs[name][done[name] : done[name] + count] for name, count in counts.items()}
        done |= {name: done[name] + count for name, count in counts.items()}
        for found, expected in zip(ours.step(pieces), plain.step(pieces), strict=True):
            tolerance = 1e-5 if dtype == torch.float32 else 2e-2
            torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def test_ring_of_one_entry_less_would_show() -> None:
    x, spec = make_inputs(40, 40, torch.float32), make_spec(40, 3, 6)
    runner = ConvRunner(short_conv, spec, torch.float32, 16)
    whole = runner.run("whole", x)
    runner.run("a", x[:20])
    runner.step({"a": make_inputs(4, 40, torch.float32, seed=9)})
    runner.truncate("a", 19)
    assert not torch.equal(runner.step({"a": x[19:20]}, is_stored=True)[0], whole[19:20])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cuts_batches_and_tokens_that_are_taken_back_change_no_bit(dtype: torch.dtype) -> None:
    spec, x = make_spec(40, 3, 7), make_inputs(70, 40, dtype)
    whole = ConvRunner(short_conv, spec, dtype, 16).run("a", x)
    for cut in range(1, 70):
        runner = ConvRunner(short_conv, spec, dtype, 16)
        assert torch.equal(runner.run("a", x, [cut]), whole), f"cut at {cut}"
        runner = ConvRunner(short_conv, spec, dtype, 16)
        runner.run("a", x[:cut])
        runner.step({"b": x[:9], "a": make_inputs(4, 40, dtype, seed=9)})  # drafts, all wrong
        runner.truncate("a", cut - 1)
        (again,) = runner.step({"a": x[cut - 1 : cut]}, is_stored=True)    # a late token, for its logits alone
        assert torch.equal(again, whole[cut - 1 : cut])
        assert torch.equal(runner.step({"a": x[cut:]})[0], whole[cut:]), f"drafts behind token {cut}"
