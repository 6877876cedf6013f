"""Mamba-2 in PyTorch, a token at a time: the meaning that every back end must match."""

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from quire.kernels.delta_net import StateRows
from quire.kernels.mamba import MambaSpec
from quire.kernels.reference.delta_net import computed_over_states, convolved


def mamba(
    spec: MambaSpec, x: Tensor, context_lens: Tensor, states: Tensor, query_starts: Tensor, rows: StateRows
) -> Tensor:
    """Return [num_tokens, width]: the results of the heads, gated and normed; keep the new states.

    u = [v | k | q] of x is convolved over its last `taps` tokens, zeros before the sequence, with a bias, and silu of
    it is taken. With d = softplus(rate_factor * dt + rate_bias): S = exp(-rate * d) * S + k (x) d * v;
    o = q^T S + skip * v, rounded to x's dtype. The result is norm_weight * o * silu(z) / rms(o * silu(z)), a mean over
    each group's heads, what is divided rounded to x's dtype. All else is float32.
    """
    width, inputs = spec.heads.width, x[:, spec.heads.width :]
    heads_out = computed_over_states(spec, partial(_token, spec), inputs, context_lens, states, query_starts, rows)
    out = x.new_empty(len(x), width)
    for row, values in enumerate(heads_out):
        out[row] = _gated_norm(spec, values.flatten().to(x.dtype).float(), x[row, :width].float(), x.dtype)
    return out


def _token(spec: MambaSpec, state: Tensor, window: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a token's results [value heads, value_dim], and the new S."""
    heads, keys = spec.heads, spec.heads.num_key_heads * spec.heads.key_dim
    convolved_inputs = convolved(spec.conv_weight, spec.conv_bias, window)
    value, key, query = convolved_inputs.tensor_split([heads.width, heads.width + keys])
    group = heads.num_value_heads // heads.num_key_heads
    key, query = (each.view(-1, heads.key_dim).repeat_interleave(group, dim=0) for each in (key, query))
    value = value.view(-1, heads.value_dim)
    step = softplus(window[-1][heads.channels :].float() * spec.rate_factor + spec.rate_bias)
    state = torch.exp(-spec.rate * step)[:, None, None] * state + key[:, :, None] * (step[:, None] * value)[:, None, :]
    return (query[:, :, None] * state).sum(1) + spec.skip[:, None] * value, state


def _gated_norm(spec: MambaSpec, values: Tensor, z: Tensor, dtype: torch.dtype) -> Tensor:
    gate = silu(z * spec.gate_factor)
    values = values if spec.is_norm_first else values * gate
    if spec.norm_weight is not None:
        groups = values.view(spec.heads.num_key_heads, -1)
        normed = groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + spec.norm_eps)
        values = spec.norm_weight * normed.flatten().to(dtype).float()
    return values * gate if spec.is_norm_first else values
