"""Keys and values in 8 bits: the stored bytes against arithmetic written number by number."""

import numpy as np
import pytest
import torch
from torch import Tensor

from quire.core.config import QUANTIZED
from quire.core.errors import ConfigError
from quire.kernels.back_end import require_kv_dtype
from quire.kernels.cuda.cuda_attention import CUDA_ATTENTION
from quire.kernels.reference.kv_cache import decode, encode

INT8, FP8 = torch.int8, torch.float8_e4m3fn
VALUES = torch.arange(256, dtype=torch.uint8).view(FP8).float().tolist()  # e4m3's by their bits


def nearest_e4m3(x: np.float32) -> int:
    """Return the bits of the nearest value, of two as near the even ones; the sign is x's."""
    sign = 128 if np.signbit(x) else 0
    return sign + min(range(0x7F), key=lambda bits: (abs(VALUES[bits] - abs(float(x))), bits % 2))


def one_by_one(x: Tensor, dtype: torch.dtype) -> tuple[list[int], np.float32]:
    """Return the bits of each element of a head [head_dim], and its scale."""
    largest = np.float32(127 if dtype == INT8 else 448)
    numbers = x.float().numpy()
    magnitude = np.abs(numbers).max()
    if not np.isfinite(magnitude):
        return [0] * len(numbers), np.float32(np.nan)
    if magnitude < np.float32(1e-30):
        return [0] * len(numbers), np.float32(0)
    scaled = [number * (largest / magnitude) for number in numbers]
    bits = [int(np.rint(each)) & 0xFF for each in scaled] if dtype == INT8 else [nearest_e4m3(each) for each in scaled]
    return bits, magnitude / largest


@pytest.mark.parametrize("name", QUANTIZED)
def test_attention_back_ends_other_than_triton_refuse_a_quantized_cache_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"attention_backend cuda does not support kv_cache_dtype {name}; use triton"):
        require_kv_dtype(CUDA_ATTENTION, name)
    require_kv_dtype(CUDA_ATTENTION, "bfloat16")
    require_kv_dtype(None, name)


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("model_dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_stored_bytes_are_those_of_single_numbers(dtype: torch.dtype, model_dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(6, 2, 24, generator=generator) * 10.0 ** torch.arange(-3, 3)[:, None, None]
    x[1, 0], x[1, 1, 3], x[2, 0, :12] = 0, 0, -0.0
    x = x.to(model_dtype)
    stored = encode(x, dtype, 28)
    assert (stored.dtype, stored.shape) == (torch.int8, (6, 2, 28))
    for token, head in np.ndindex(6, 2):
        bits, scale = one_by_one(x[token, head], dtype)
        assert stored[token, head, :24].view(torch.uint8).tolist() == bits
        assert stored[token, head, 24:].view(torch.float32).item() == scale
    elements, scales = decode(stored, dtype, 24)
    assert isinstance(scales, Tensor)
    steps = scales[..., None] / 2 if dtype == INT8 else x.float().abs() / 16 + scales[..., None] / 512
    assert ((elements * scales[..., None] - x.float()).abs() <= steps * 1.001).all()


@pytest.mark.parametrize(("dtype", "largest"), [(INT8, 127.0), (FP8, 448.0)], ids=str)
def test_ties_are_rounded_to_even(dtype: torch.dtype, largest: float) -> None:
    ties, expected = {
        INT8: ([0.5, 1.5, 2.5, -0.5, -3.5], [0, 2, 2, 0, -4]),
        FP8: ([17.0, 19.0, -17.0, 2**-10, 3 * 2**-10], [16, 20, -16, 0, 2**-8]),
    }[dtype]
    elements, scales = decode(encode(torch.tensor([*ties, largest]), dtype, 10), dtype, 6)
    assert elements.tolist() == [*expected, largest]
    assert isinstance(scales, Tensor)
    assert scales.item() == 1.0


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("magnitude", [0.0, 1e-38, 9e-31])
def test_head_without_numbers_to_speak_of_is_zero(dtype: torch.dtype, magnitude: float) -> None:
    stored = encode(torch.tensor([[magnitude, -magnitude, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]), dtype, 8)
    assert not stored[0].any()
    assert stored[1].any()


@pytest.mark.parametrize("dtype", [INT8, FP8], ids=str)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_number_that_is_not_finite_spoils_its_own_head_alone(dtype: torch.dtype, bad: float) -> None:
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    clean = encode(x, dtype, 12)
    x[1, 1, 5] = bad
    stored = encode(x, dtype, 12)
    _, scales = decode(stored, dtype, 8)
    assert isinstance(scales, Tensor)
    assert scales.isnan().tolist() == [[False, False], [False, True], [False, False]]
    assert not stored[1, 1, :8].any()
    stored[1, 1] = clean[1, 1]
    assert torch.equal(stored, clean)


def test_largest_floats_keep_their_ratio() -> None:
    largest = torch.finfo(torch.float32).max
    elements, scales = decode(encode(torch.tensor([largest, -largest, largest / 2, 0]), INT8, 8), INT8, 4)
    assert elements.tolist() == [127, -127, 64, 0]
    assert isinstance(scales, Tensor)
    assert scales.isfinite().all()


def test_without_stored_scales_numbers_saturate_and_bad_ones_are_nan() -> None:
    x = torch.tensor([1.0, 500.0, -1e30, 0.0, torch.inf, -torch.inf, torch.nan, 449.0])
    elements, scales = decode(encode(x, FP8, 8), FP8, 8)
    assert scales == 1.0
    assert elements[[0, 1, 2, 3, 7]].tolist() == [1.0, 448.0, -448.0, 0.0, 448.0]
    assert elements[4:7].isnan().all()


def test_layer_s_scale_is_divided_out_and_given_back() -> None:
    x = torch.tensor([1.0, 100.0, -1e30, 0.25, torch.inf, 112.0, 0.0, -3.0])
    elements, scales = decode(encode(x, FP8, 8, scale=0.25), FP8, 8, scale=0.25)
    assert scales == 0.25
    assert elements[[0, 1, 2, 3, 5, 6, 7]].tolist() == [4.0, 384.0, -448.0, 1.0, 448.0, 0.0, -12.0]
    assert elements[4].isnan()


def test_every_value_of_e4m3_is_kept() -> None:
    bits = torch.tensor([each for each in range(256) if each & 0x7F != 0x7F], dtype=torch.uint8)
    assert torch.equal(encode(bits.view(FP8).float(), FP8, len(bits)).view(torch.uint8), bits)
