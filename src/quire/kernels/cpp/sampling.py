"""Sampling in C++; the meaning of each op is that of its module in `quire.kernels`. csrc/sampling.cpp tells how."""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from quire.kernels.cpp import _kernels
from quire.kernels.sampling import SamplingOps
from quire.kernels.top_logprobs import TopLogprobs, empty

Scalar = TypeVar("Scalar", bound=np.generic)


def argmax(logits: Tensor) -> NDArray[np.int64]:
    """Return the token [num_rows] of each row's highest logit; of equal ones, the lowest id; of NaN, the first."""
    return _choose(logits)


def choose_tokens(
    logits: Tensor,
    temperatures: NDArray[np.float32],
    log_min_ps: NDArray[np.float32],
    top_ks: NDArray[np.int32],
    top_ps: NDArray[np.float64],
    uniforms: NDArray[np.float64],
) -> NDArray[np.int64]:
    """Choose what `token_choice.choose_tokens` chooses; of a row with NaN, its first NaN."""
    assert top_ks.min(initial=1) > 0, f"top_k {top_ks.min()}"
    num = len(logits)
    return _choose(
        logits,
        _array(temperatures, np.float32, num),
        _array(log_min_ps, np.float32, num),
        _array(top_ks, np.int32, num),
        _array(top_ps, np.float64, num),
        _array(uniforms, np.float64, num),
    )


def _choose(logits: Tensor, *settings: NDArray[np.generic]) -> NDArray[np.int64]:
    """Choose by the settings in their order; without any, the highest logits."""
    logits = _in_rows(logits)
    num_rows, vocab_size = logits.shape
    assert vocab_size, "logits of no token"
    tokens = np.empty(num_rows, dtype=np.int64)
    addresses = [*([_address(each) for each in settings] or [0] * 5), _address(tokens)]
    _kernels.choose_tokens(logits.data_ptr(), num_rows, vocab_size, logits.stride(0), *addresses)
    return tokens


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the numbers [num] that `philox.uniforms` returns."""
    numbers = np.empty(len(indices))
    seeds, indices = _array(seeds, np.uint64, len(indices)), _array(indices, np.int64, len(indices))
    _kernels.draw_uniforms(_address(seeds), _address(indices), len(indices), _address(numbers))
    return numbers


def top_logprobs(
    logits: Tensor, rows: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
) -> TopLogprobs:
    """Return what `top_logprobs.top_logprobs` returns."""
    logits, num = _in_rows(logits), len(rows)
    num_rows, vocab_size = logits.shape
    rows, tokens, counts = (_array(each, np.int64, num) for each in (rows, tokens, counts))
    for each, limit in ((rows, num_rows - 1), (tokens, vocab_size - 1), (counts, vocab_size)):
        assert each.min(initial=0) >= 0, f"{each.min()} among rows, tokens or counts"
        assert each.max(initial=0) <= limit or not num, f"{each.max()} is above {limit}"
    answer = empty(counts)
    _kernels.top_logprobs(
        logits.data_ptr(),
        vocab_size,
        logits.stride(0),
        num,
        _address(rows),
        _address(tokens),
        _address(counts),
        answer.token_ids.shape[1],
        _address(answer.token_ids),
        _address(answer.logprobs),
        _address(answer.ranks),
    )
    return answer


def penalize(
    logits: Tensor,
    logit_rows: NDArray[np.int64],
    token_ids: NDArray[np.int32],
    token_rows: NDArray[np.int64],
    num_tokens: NDArray[np.int64],
    num_prompt_tokens: NDArray[np.int64],
    repetition: NDArray[np.float32],
    presence: NDArray[np.float32],
    frequency: NDArray[np.float32],
) -> None:
    """Edit what `penalties.penalize` edits. Known tokens are below the vocabulary's size: they have been embedded."""
    assert logits.dtype == torch.float32
    assert logits.stride(1) == 1, "rows with gaps cannot be edited in place"
    assert token_ids.dtype == np.int32
    assert token_ids.strides[1] == token_ids.itemsize, "tokens of a row stand together"
    num = len(logit_rows)
    ints = [_array(each, np.int64, num) for each in (logit_rows, token_rows, num_tokens, num_prompt_tokens)]
    floats = [_array(each, np.float32, num) for each in (repetition, presence, frequency)]
    _kernels.penalize(
        logits.data_ptr(),
        logits.stride(0),
        logits.shape[1],
        _address(token_ids),
        token_ids.strides[0] // token_ids.itemsize,
        num,
        *map(_address, ints),
        *map(_address, floats),
    )


def _in_rows(logits: Tensor) -> Tensor:
    """Return [num_rows, vocab] with the logits of a row end to end."""
    assert logits.dtype == torch.float32, f"logits {logits.dtype}"
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _array(values: NDArray[np.generic], dtype: type[Scalar], count: int) -> NDArray[Scalar]:
    """Return `values` [count] in `dtype`, end to end: a column of settings has gaps."""
    assert values.shape == (count,), f"{values.shape} for {count} rows"
    return np.ascontiguousarray(values, dtype=dtype)


def _address(values: NDArray[np.generic]) -> int:
    """Return where an array's elements begin."""
    address: int = values.__array_interface__["data"][0]
    return address


OPS = SamplingOps(argmax, choose_tokens, uniforms, top_logprobs, penalize)
