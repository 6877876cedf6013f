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
    each group's heads, on all ranks that have some, what is divided rounded to x's dtype. All else is float32.
    """
    width, inputs = spec.heads.width, x[:, spec.heads.width :]
    heads_out = computed_over_states(spec, partial(_token, spec), inputs, context_lens, states, query_starts, rows)
    values = [each.flatten().to(x.dtype).float() for each in heads_out]
    gates = [silu(z.float() * spec.gate_factor) for z in x[:, :width]]  # row by row: torch's bits depend on the shape
    if not spec.is_norm_first or spec.norm_weight is None:
        values = [value * gate for value, gate in zip(values, gates, strict=True)]
    if spec.norm_weight is not None:
        pairs = zip(values, _mean_squares(spec, values), strict=True)
        values = [spec.norm_weight * _divided(spec, each, mean).to(x.dtype).float() for each, mean in pairs]
        if spec.is_norm_first:
            values = [value * gate for value, gate in zip(values, gates, strict=True)]
    return torch.stack(values).to(x.dtype)


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


def _mean_squares(spec: MambaSpec, rows: list[Tensor]) -> Tensor:
    """Return the means of the squares of each group, over all ranks that have heads of it: [num_tokens, groups here].
    """
    num_groups, span = spec.heads.num_key_heads, spec.span
    if span is None:
        return torch.stack([row.view(num_groups, -1).square().mean(-1) for row in rows])
    sums = torch.stack([row.view(num_groups, -1).square().sum(-1) for row in rows])
    own = slice(span.first_group, span.first_group + num_groups)
    parts = sums.new_zeros(len(rows), span.num_groups)
    parts[:, own] = sums
    found: Tensor = span.sum(parts, parts.dtype)
    return found[:, own] / span.width


def _divided(spec: MambaSpec, row: Tensor, mean_squares: Tensor) -> Tensor:
    return (row.view(len(mean_squares), -1) * torch.rsqrt(mean_squares[:, None] + spec.norm_eps)).flatten()
