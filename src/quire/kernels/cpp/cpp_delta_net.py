"""Layers with a state per sequence, and output gates, in C++; the meanings are those of `quire.kernels.reference`."""

from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from quire.core.arrays import UINT8, Array, DType, dtype_name
from quire.extension import _kernels
from quire.kernels.conversion import converted
from quire.kernels.cpp.cpp_gather import sum_exchange
from quire.kernels.cpp.dtypes import address, kernel_dtype, pair, row_stride
from quire.kernels.delta_net import DeltaInputs, DeltaNetSpec, StateRows, StateShape
from quire.kernels.mamba import MambaSpec

_DELTA_NET, _MAMBA, _GATE = pair("delta_net"), pair("mamba"), pair("gate")
_ROWS = tuple(each.name for each in fields(StateRows))


def delta_net(
    spec: DeltaNetSpec, inputs: DeltaInputs, context_lens: NDArray[np.int32], states: Array,
    query_starts: NDArray[np.int32], rows: StateRows,
) -> Array:  # fmt: skip
    """Do what the reference does; inputs beside states in the dtype that the kernels compute x in."""
    dtype, heads, num_tokens = kernel_dtype(inputs.x.dtype), spec.heads, len(inputs.x)
    taken = [np.ascontiguousarray(converted(each, dtype)) for each in inputs]
    widths = heads.channels, heads.width, heads.num_value_heads, heads.num_decays
    shapes = [each.shape for each in taken]
    assert shapes == [(num_tokens, width) for width in widths], f"{shapes} for {heads}"
    assert (num_tokens, len(context_lens)) == (query_starts[-1], len(query_starts) - 1)
    assert query_starts.dtype == context_lens.dtype == np.int32
    out = np.empty((num_tokens, heads.width), dtype)
    _DELTA_NET[dtype](
        delta_net_weights(spec), *(of(each) for each in (*taken, out) for of in (address, row_stride)),
        address(checked_states(spec, states, dtype)), address(context_lens), address(query_starts),
        *state_arguments(rows), len(query_starts) - 1,
    )  # fmt: skip
    return converted(out, inputs.x.dtype)


def mamba(
    spec: MambaSpec, x: Array, context_lens: NDArray[np.int32], states: Array, query_starts: NDArray[np.int32],
    rows: StateRows,
) -> Array:  # fmt: skip
    """Do what the reference does; inputs beside states in the dtype that the kernels compute x in."""
    dtype, heads, num_tokens = kernel_dtype(x.dtype), spec.heads, len(x)
    inputs = np.ascontiguousarray(converted(x, dtype))
    assert inputs.shape == (num_tokens, heads.width + heads.inputs), f"{inputs.shape} for {heads}"
    assert (num_tokens, len(context_lens)) == (query_starts[-1], len(query_starts) - 1)
    assert query_starts.dtype == context_lens.dtype == np.int32
    out = np.empty((num_tokens, heads.width), dtype)
    _MAMBA[dtype](
        mamba_weights(spec), address(inputs), row_stride(inputs), address(out), row_stride(out),
        address(checked_states(spec, states, dtype)), address(context_lens), address(query_starts),
        *state_arguments(rows), len(query_starts) - 1,
    )  # fmt: skip
    return converted(out, x.dtype)


def gate(x: Array, gates: Array) -> Array:
    """Do what the reference does."""
    dtype = kernel_dtype(x.dtype)
    out, shares = np.array(converted(x, dtype), order="C"), np.ascontiguousarray(converted(gates, dtype))
    assert out.shape == shares.shape, f"{shares.shape} for {out.shape}"
    num_rows, width = out.shape
    _GATE[dtype](address(out), width, address(shares), width, num_rows, width, True)
    return converted(out, x.dtype)


def delta_net_weights(spec: DeltaNetSpec) -> _kernels.DeltaNetWeights:
    """Return a layer's weights as the extension takes them, valid for as long as the spec is kept."""
    weights = spec.conv_weight, spec.rate, spec.rate_bias, spec.norm_weight
    assert all(each.flags.c_contiguous for each in weights), "weights with gaps"
    conv_weight, rate, rate_bias, norm_weight = map(address, weights)
    sizes = *spec.heads, spec.taps, spec.length
    numbers = spec.norm_eps, spec.max_share, spec.is_tiled, spec.is_gate_sigmoid
    return _kernels.DeltaNetWeights(*sizes, conv_weight, rate, rate_bias, norm_weight, *numbers)


def mamba_weights(spec: MambaSpec) -> _kernels.MambaWeights:
    """Return a layer's weights as the extension takes them, valid for as long as the spec is kept."""
    weights = spec.conv_weight, spec.conv_bias, spec.rate, spec.rate_bias, spec.skip, spec.norm_weight
    assert all(each is None or each.flags.c_contiguous for each in weights), "weights with gaps"
    conv_weight, conv_bias, rate, rate_bias, skip, norm_weight = map(address, weights)
    span = (sum_exchange(None), 0, 0, 0) if spec.span is None else (sum_exchange(spec.span.sum), *spec.span[1:])
    return _kernels.MambaWeights(
        *spec.heads[:4], spec.taps, spec.length, conv_weight, conv_bias, rate, rate_bias, skip, norm_weight,
        spec.norm_eps, spec.gate_factor, spec.rate_factor, spec.is_norm_first, _kernels.NormSpan(*span),
    )  # fmt: skip


def state_arguments(rows: StateRows) -> list[int]:
    """Return the kernel's arguments from the slots of a step."""
    arrays = [getattr(rows, name) for name in _ROWS]
    assert all(each.dtype == np.int32 and each.flags.c_contiguous for each in arrays), "slots without gaps in int32"
    return [_kernels.address(each) for each in arrays]


def checked_states(spec: DeltaNetSpec | MambaSpec, states: Array, dtype: DType) -> Array:
    """Return the states of a layer; assert that they are as the kernel takes them."""
    expected = StateShape(spec.heads, spec.length, dtype_name(dtype)).num_bytes
    assert states.dtype == UINT8, f"states of {states.dtype}"
    assert states.shape[1:] == (expected,), f"slots of {states.shape[1:]} bytes for {expected}"
    assert states.flags.c_contiguous, "states with gaps"
    return states
