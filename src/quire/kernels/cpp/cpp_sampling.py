"""Sampling in C++; the meaning of each op is that of `quire.kernels.reference`. csrc/sampling.cpp explains it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import FLOAT32, Array
from quire.extension import _kernels
from quire.kernels.cpp.dtypes import is_in_rows, row_stride
from quire.kernels.sampling import (
    SETTINGS,
    Penalties,
    SamplingOps,
    TopLogprobs,
    add_bias,
    empty_logprobs,
    forbid_tokens,
    forbid_while_any_is_left,
    keep_tokens,
    num_words,
)

_COLUMNS = {  # SETTINGS as the kernel takes them
    "temperatures": np.float32, "log_min_ps": np.float32, "top_ks": np.int32, "top_ps": np.float64,
    "uniforms": np.float64,
}  # fmt: skip


def choose_tokens(logits: Array, draws: NDArray[np.void] | None = None) -> NDArray[np.int64]:
    """Choose what `sampling.choose_tokens` chooses; of a row with NaN, its first NaN."""
    logits = _in_rows(logits)
    num_rows, vocab_size = logits.shape
    assert vocab_size, "logits of no token"
    tokens, columns, addresses = np.empty(num_rows, dtype=np.int64), list[NDArray[Any]](), [0] * (len(_COLUMNS) + 1)
    if draws is not None:
        assert draws.dtype == SETTINGS, f"settings of {draws.dtype}"
        assert draws.shape == (num_rows,), f"{draws.shape} settings for {num_rows} rows"
        assert draws["top_ks"].min(initial=1) > 0, f"top_k {draws['top_ks'].min()}"
        for index, (name, dtype) in enumerate(_COLUMNS.items()):
            columns.append(np.ascontiguousarray(draws[name], dtype))
            addresses[index] = _kernels.address(columns[index])
    addresses[-1] = _kernels.address(tokens)
    _kernels.choose_tokens(_kernels.address(logits), num_rows, vocab_size, row_stride(logits), *addresses)
    return tokens


def uniforms(seeds: NDArray[np.uint64], indices: NDArray[np.int64]) -> NDArray[np.float64]:
    """Return the numbers [num] that `philox.uniforms` returns."""
    numbers, seeds, indices = np.empty(len(indices)), np.ascontiguousarray(seeds), np.ascontiguousarray(indices)
    assert seeds.dtype == np.uint64, f"seeds {seeds.dtype}"
    assert indices.dtype == np.int64, f"indices {indices.dtype}"
    assert seeds.shape == indices.shape == numbers.shape
    _kernels.draw_uniforms(
        _kernels.address(seeds), _kernels.address(indices), len(indices),
        _kernels.address(numbers),
    )  # fmt: skip
    return numbers


def top_logprobs(
    logits: Array, rows: NDArray[np.int64], tokens: NDArray[np.int64], counts: NDArray[np.int64]
) -> TopLogprobs:
    """Return what `ranking.top_logprobs` returns."""
    logits, num = _in_rows(logits), len(rows)
    num_rows, vocab_size = logits.shape
    rows, tokens, counts = _arrays((rows, tokens, counts), (np.int64,) * 3, num)
    for each, limit in ((rows, num_rows - 1), (tokens, vocab_size - 1), (counts, vocab_size)):
        assert each.min(initial=0) >= 0, f"{each.min()} among rows, tokens or counts"
        assert each.max(initial=0) <= limit or not num, f"{each.max()} is above {limit}"
    answer = empty_logprobs(counts)
    _kernels.top_logprobs(
        _kernels.address(logits),
        vocab_size,
        row_stride(logits),
        num,
        _kernels.address(rows),
        _kernels.address(tokens),
        _kernels.address(counts),
        answer.token_ids.shape[1],
        _kernels.address(answer.token_ids),
        _kernels.address(answer.logprobs),
        _kernels.address(answer.ranks),
    )
    return answer


def penalize(logits: Array, penalties: Penalties) -> None:
    """Edit what `logits.penalize` edits. Known tokens are below the vocabulary's size: they have been embedded."""
    logit_rows, token_ids, token_rows, num_tokens, num_prompt_tokens, *factors = penalties
    assert logits.dtype == FLOAT32
    assert is_in_rows(logits), "rows with gaps cannot be edited in place"
    assert token_ids.dtype == np.int32
    assert token_ids.strides[1] == token_ids.itemsize, "tokens of a row stand together"
    num = len(logit_rows)
    columns = (logit_rows, token_rows, num_tokens, num_prompt_tokens, *factors)
    arrays = _arrays(columns, (np.int64,) * 4 + (np.float32,) * 3, num)
    _kernels.penalize(
        _kernels.address(logits),
        row_stride(logits),
        logits.shape[1],
        _kernels.address(token_ids),
        token_ids.strides[0] // token_ids.itemsize,
        num,
        *map(_kernels.address, arrays),
    )


def mask_logits(logits: Array, rows: NDArray[np.int64], bits: NDArray[np.uint32]) -> None:
    """Edit what `logits.mask_logits` edits."""
    num, (num_rows, vocab_size) = len(rows), logits.shape
    assert logits.dtype == FLOAT32
    assert is_in_rows(logits), "rows with gaps cannot be edited in place"
    assert rows.min(initial=0) >= 0, f"row {rows.min()}"
    assert rows.max(initial=0) < num_rows or not num, f"row {rows.max()} of {num_rows}"
    assert bits.dtype == np.uint32, f"masks of {bits.dtype}"
    assert bits.shape[0] == num, f"{len(bits)} masks for {num} rows"
    assert bits.shape[1] >= num_words(vocab_size), f"{bits.shape[1]} words for {vocab_size} tokens"
    (rows,), bits = _arrays((rows,), (np.int64,), num), np.ascontiguousarray(bits)
    sizes, at = (vocab_size, row_stride(logits), num), _kernels.address
    _kernels.mask_logits(at(logits), *sizes, at(rows), at(bits), bits.shape[1])


def _in_rows(logits: Array) -> Array:
    """Return [num_rows, vocab] with the logits of a row end to end."""
    assert logits.dtype == FLOAT32, f"logits {logits.dtype}"
    return logits if is_in_rows(logits) else np.ascontiguousarray(logits)


def _arrays(columns: Sequence[Any], dtypes: Sequence[type[np.generic]], count: int) -> list[NDArray[Any]]:
    """Return `columns` [count] in their dtypes, without gaps."""
    assert all(column.shape == (count,) for column in columns), f"{[x.shape for x in columns]} for {count} rows"
    return [np.ascontiguousarray(column, dtype) for column, dtype in zip(columns, dtypes, strict=True)]


OPS = SamplingOps(
    choose_tokens, uniforms, top_logprobs, penalize, mask_logits, keep_tokens, forbid_tokens, forbid_while_any_is_left,
    add_bias,
)  # fmt: skip
