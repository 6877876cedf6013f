"""Linear layers; a row's result does not depend on the other rows. Embeddings and low-rank addends.

Matrix libraries choose the order of a row's sum by the shape of the whole product: a row of a batch of 8 may
differ in its last bits from the same row in a batch of 64. So the product is only ever called with a few row counts,
zero-padded: 64, and those smaller ones that a probe has found to give the same bits as 64 for this very shape
(`equal_row_counts`). docs/decisions/0002 has the measurements.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from quire.kernels.layers import Activation, Linear
from quire.kernels.linear_weight import DENSE, QUANTIZED_FORMATS, LinearWeight, Table
from quire.kernels.quantized import a8_sums, exact_product, expand, in_group_order
from quire.kernels.reference import activation as activations

MAX_ROWS = 64
FEWER_ROWS = (1, 4, 8, 16, 32)
PROBED_OUTPUTS = 1 << 16  # per row count, where that is more than two products
DISTINCT_OUTPUTS = 256    # rows of the probe's weight before they repeat: a vocabulary of random rows takes seconds
_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "silu_and_mul": activations.silu_and_mul,
    "gelu_and_mul": activations.gelu_and_mul,
    "gelu_tanh_and_mul": activations.gelu_tanh_and_mul,
    "clamped_silu_and_mul": activations.clamped_silu_and_mul,
    "gelu_tanh": activations.gelu_tanh,
    "gelu": activations.gelu,
    "relu": activations.relu,
    "relu2": activations.relu2,
    "quick_gelu": activations.quick_gelu,
}


def reference(
    x: Tensor,
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    activation: Activation = "none",
    addend: Tensor | None = None,
) -> Tensor:
    """Return activation(x W^T + addend + bias) in x's dtype: the meaning of a linear layer.

    x [num_rows, in_features]; bias [out_features], addend float32 [num_rows, out_features], both added to the float32
    sums, which are rounded to x's dtype before the activation. Gated ones halve the outputs. The sums of a quantized
    weight are those of `a8_sums`, or without int8 activations those of the dense weight that it expands to.
    """
    sums = a8_sums(x, weight) if weight.activation_group_size else x.float() @ _dense_values(weight).float().T
    sums = sums if addend is None else sums + addend
    sums = sums if bias is None else sums + bias.float()
    return _ACTIVATIONS[activation](sums.to(x.dtype))


def make_linear(
    weight: LinearWeight,
    bias: Tensor | None = None,
    *,
    dtype: torch.dtype | None = None,
    activation: Activation = "none",
) -> Linear:
    """Return a layer in PyTorch for a weight of any format; arguments as in `PackedLinear`.

    A weight without int8 activations is expanded here, once, and kept as a dense one. Raises ConfigError for
    an unknown format.
    """
    if weight.format not in QUANTIZED_FORMATS:
        return PackedLinear(weight, bias, dtype=dtype, activation=activation)
    if weight.activation_group_size:
        return QuantizedLinear(weight, bias, dtype=dtype, activation=activation)
    expanded = LinearWeight.dense(expand(weight))
    return PackedLinear(expanded, bias, dtype=dtype or weight.value_dtype, activation=activation)


class QuantizedLinear:
    """A layer of 8-bit or 4-bit integers with int8 activations; as `PackedLinear`, but slow: a byte for each element.

    Integer sums are exact, so that rows need no portions.
    """

    def __init__(
        self,
        weight: LinearWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activation: Activation = "none",
    ) -> None:
        whole = replace(weight, data=(torch.cat(weight.data),))
        self._weight, self._order = in_group_order(whole)
        self._bias = None if bias is None else bias.float()
        self._out_dtype, self._activate = dtype or weight.value_dtype, _ACTIVATIONS[activation]
        self.num_bytes = self._weight.num_bytes

    def __call__(self, x: Tensor, addend: Tensor | None = None, /) -> Tensor:
        sums = a8_sums(x if self._order is None else x[:, self._order], self._weight, exact_product)
        sums = sums if addend is None else sums + addend
        sums = sums if self._bias is None else sums + self._bias
        return self._activate(sums.to(self._out_dtype))


class PackedLinear:
    """y = activation(x W^T + b) for x [num_rows, in_features] of any float dtype; result [num_rows, out_features].

    The weight is dense; bias [out_features] or None; gated activations make half as many outputs. `dtype` is the
    precision of product and result (default: the weight's). Parts are copied; the caller may drop the weight.
    """

    def __init__(
        self,
        weight: LinearWeight,
        bias: Tensor | None = None,
        *,
        dtype: torch.dtype | None = None,
        activation: Activation = "none",
    ) -> None:
        parts = weight.dense_parts()
        whole = parts[0] if len(parts) == 1 else torch.cat(parts)
        self._out_dtype = dtype or whole.dtype
        self._dtype = _product_dtype(self._out_dtype)
        self._row_counts = equal_row_counts(*whole.shape, self._dtype, bias is not None, torch.get_num_threads())
        self._product = _product(whole.to(self._dtype), None if bias is None else bias.to(self._dtype))
        self._activate = _ACTIVATIONS[activation]
        self.num_bytes = whole.numel() * self._dtype.itemsize

    def __call__(self, x: Tensor, addend: Tensor | None = None, /) -> Tensor:
        """Multiply in portions of at most MAX_ROWS rows, each activated while it is in the CPU's cache.

        An addend is added to the product, which has been rounded to the precision of products, with its bias.
        """
        split = torch.split(x.to(self._dtype), MAX_ROWS)
        addends = [None] * len(split) if addend is None else torch.split(addend, MAX_ROWS)
        portions = [self._portion(rows, own) for rows, own in zip(split, addends, strict=True)]
        return portions[0] if len(portions) == 1 else torch.cat(portions)

    def _portion(self, rows: Tensor, addend: Tensor | None) -> Tensor:
        num_rows = len(rows)
        row_count = next(count for count in self._row_counts if count >= num_rows)
        if num_rows < row_count:
            rows = F.pad(rows, (0, 0, 0, row_count - num_rows))
        product = self._product(rows)[:num_rows]
        return self._activate((product if addend is None else product + addend).to(self._out_dtype))


@cache
def equal_row_counts(
    out_features: int, in_features: int, dtype: torch.dtype, has_bias: bool, num_threads: int
) -> tuple[int, ...]:
    """Return the row counts, ascending up to MAX_ROWS, at which a row's result has the same bits as at MAX_ROWS.

    Probes this machine's product of this shape; the thread count only says under which setting the answer holds.
    """
    assert num_threads == torch.get_num_threads()
    rows, weight = _revealing_factors(out_features, in_features, dtype)
    product = _product(weight, weight.new_zeros(out_features) if has_bias else None)
    expected = product(rows)
    return (*(count for count in FEWER_ROWS if _is_equal_in_parts(product, rows, expected, count)), MAX_ROWS)


def _dense_values(weight: LinearWeight) -> Tensor:
    return torch.cat(weight.data) if weight.format == DENSE else expand(weight)


def _revealing_factors(out_features: int, in_features: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return MAX_ROWS rows and a weight with products that are all zero but for rounding.

    Every term has its negative somewhere in the same sum, so that what remains is the rounding of the partial sums:
    another order of summation gives another result, and not even rounding to bfloat16 hides it.
    """
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(MAX_ROWS, in_features, generator=generator).to(dtype)
    weight = torch.randn(min(out_features, DISTINCT_OUTPUTS), in_features, generator=generator).to(dtype)
    term, negative = torch.randperm(in_features // 2 * 2, generator=generator).chunk(2)
    rows[:, negative], weight[:, negative] = -rows[:, term], weight[:, term]
    return rows, weight.repeat(-(-out_features // DISTINCT_OUTPUTS), 1)[:out_features]


def _is_equal_in_parts(product: Callable[[Tensor], Tensor], rows: Tensor, expected: Tensor, count: int) -> bool:
    """Return whether parts of `count` rows have the bits of the whole; compares at least the first and last part."""
    num_parts = max(2, min(MAX_ROWS // count, PROBED_OUTPUTS // (count * expected.shape[1])))
    begins = torch.linspace(0, MAX_ROWS - count, num_parts).long().tolist()
    return all(torch.equal(product(rows[b : b + count]), expected[b : b + count]) for b in begins)


def _product_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the precision in which this machine multiplies weights of `dtype`: their own, or float32.

    float16 is multiplied in float32 on every CPU: where oneDNN has it, it is not everywhere the same.
    """
    has_bfloat16 = _has_onednn() and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return torch.bfloat16 if dtype == torch.bfloat16 and has_bfloat16 else torch.float32


def _product(weight: Tensor, bias: Tensor | None) -> Callable[[Tensor], Tensor]:
    """Return x -> x W^T + b, with the weight in oneDNN's blocked layout where torch has oneDNN."""
    if not _has_onednn():
        return lambda rows: F.linear(rows, weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, MAX_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise
    return lambda rows: multiply(rows, packed, bias, "none", [], "")


def _has_onednn() -> bool:
    return bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]


def embed(
    table: Table, token_ids: Tensor, position_table: Tensor | None = None, positions: Tensor | None = None
) -> Tensor:
    """Return table[token_ids], plus position_table[positions] where there is one; [num_tokens, width].

    table and position_table [any, width] of one dtype, which rows of a stored table and the result have; token_ids and
    positions [num_tokens] int64. An id past its table is an IndexError.
    """
    tokens = table.index_select(0, token_ids) if isinstance(table, Tensor) else table.look_up(token_ids)
    if position_table is None:
        return tokens
    assert positions is not None
    return tokens + position_table.index_select(0, positions)


class TorchUp:
    """B [num_outputs, rank] by PyTorch: the linear layer with float32 outputs."""

    def __init__(self, weight: Tensor) -> None:
        self._linear = make_linear(LinearWeight.dense(weight), dtype=torch.float32)
        self.num_bytes = self._linear.num_bytes

    def __call__(self, inner: Tensor, /) -> Tensor:
        found: Tensor = self._linear(inner)
        return found


def low_rank_addend(x: Tensor, down: Tensor, up: Tensor, scale: float) -> Tensor:
    """Return the addend of one module, float32 [num_rows, out_features]: the meaning of an adapter.

    x [num_rows, in_features]; A `down` [rank, in_features]; B `up` [out_features, rank] in float32, which is scaled
    and then rounded to x's dtype, as is A x.
    """
    inner = (x.float() @ down.float().T).to(x.dtype)
    return inner.float() @ (up.float() * scale).to(x.dtype).float().T
