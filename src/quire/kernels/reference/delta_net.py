"""Gated delta rule in PyTorch, a token at a time: the meaning that every back end must match.

Each token is computed by ops of the same shapes, so that its bits do not depend on the tokens of the step.
"""

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import silu, softplus

from quire.kernels.delta_net import TILE, DeltaInputs, DeltaNetSpec, StateRows
from quire.kernels.mamba import MambaSpec

L2_EPS = 1e-6


def gate(x: Tensor, gates: Tensor) -> Tensor:
    """Return x * sigmoid(gates) in x's dtype; the sigmoid is computed in float32 and rounded once."""
    return (x.float() * gates.float().sigmoid().to(x.dtype).float()).to(x.dtype)


def delta_net(
    spec: DeltaNetSpec, inputs: DeltaInputs, context_lens: Tensor, states: Tensor, query_starts: Tensor,
    rows: StateRows,
) -> Tensor:  # fmt: skip
    """Return [num_tokens, width]: the results of the heads, normed and gated; keep the new states.

    u = x = [q | k | v] is convolved over its last `taps` tokens, zeros before the sequence, and silu of it is taken;
    q and k are divided by their lengths, q by sqrt(key_dim), too. With g = exp(-rate * softplus(a + rate_bias)), a
    number of each head or of each row of its S, and beta = sigmoid(b): S = g * S; S = S + k (x) beta * (v - k^T S);
    o = q^T S. The result is norm_weight * o / rms(o) * silu(z), o and o / rms(o) rounded to x's dtype; or
    norm_weight * o / rms(o) * sigmoid(z), o alone rounded. All else is float32.
    """
    x: Tensor = inputs.x
    kept = torch.cat([x, inputs.shares, inputs.decays], dim=1)
    heads_out = computed_over_states(spec, partial(_token, spec), kept, context_lens, states, query_starts, rows)
    out = x.new_empty(len(x), spec.heads.width)
    for row, own in enumerate(heads_out.to(x.dtype)):
        out[row] = _gated_norm(spec, own, inputs.gates[row]).to(x.dtype)
    return out


def computed_over_states(
    spec: DeltaNetSpec | MambaSpec, token: Callable[[Tensor, list[Tensor]], tuple[Tensor, Tensor]], inputs: Tensor,
    context_lens: Tensor, states: Tensor, query_starts: Tensor, rows: StateRows,
) -> Tensor:  # fmt: skip
    """Return the results of a layer's heads, [num_tokens, value heads, value_dim] float32; keep the new states.

    token: from S and the inputs of the last `taps` tokens to a token's results and the new S.
    """
    heads, taps = spec.heads, spec.taps
    out = torch.empty(len(inputs), heads.num_value_heads, heads.value_dim)
    arrays = (context_lens, rows.read, rows.committed, rows.write, rows.commit_to, rows.snapshots)
    entries = [each.tolist() for each in arrays]
    steps = zip(pairwise(query_starts.tolist()), *entries, strict=True)
    for (start, stop), context_len, read, committed, write, commit_to, snapshots in steps:
        if start == stop:
            continue
        first = context_len - (stop - start)
        own = Slot(spec, states[read], inputs.dtype) if read >= 0 else None
        state = torch.zeros(heads.num_value_heads, heads.key_dim, heads.value_dim) if own is None else own.state()
        window = {position: torch.zeros(heads.inputs, dtype=inputs.dtype) for position in range(1 - taps, 0)}
        if own is not None:
            window |= {at: own.inputs(at).clone() for at in range(max(committed - taps + 1, 0), first)}
        window |= {first + i: inputs[start + i] for i in range(stop - start)}
        kept = {committed: state}
        wanted = {commit_to, *(position for position, slot in snapshots if slot >= 0)}
        for position in range(committed, first + stop - start):
            heads_out, state = token(state, [window[position - taps + 1 + tap] for tap in range(taps)])
            if position >= first:
                out[start + position - first] = heads_out
            if position + 1 in wanted:
                kept[position + 1] = state
        for position, slot in snapshots:
            if slot >= 0:
                Slot(spec, states[slot], inputs.dtype).write_snapshot(kept[position], window, position)
        if write >= 0:
            Slot(spec, states[write], inputs.dtype).write(kept[commit_to], window, commit_to, first + stop - start)
    return out


class Slot:
    """A slot of a layer, uint8 [num_bytes], read and written in place."""

    def __init__(self, spec: DeltaNetSpec | MambaSpec, memory: Tensor, dtype: torch.dtype) -> None:
        heads, self._taps = spec.heads, spec.taps
        num_tiles = heads.value_dim // TILE
        ring_offset = 4 * heads.key_dim * heads.width
        ring_bytes = spec.length * heads.inputs * dtype.itemsize
        tiles = memory[:ring_offset].view(torch.float32)
        self._tiles = tiles.view(heads.num_value_heads, num_tiles, heads.key_dim, TILE)
        self._ring = memory[ring_offset : ring_offset + ring_bytes].view(dtype).view(spec.length, heads.inputs)

    def state(self) -> Tensor:
        """Return S [value heads, key_dim, value_dim], a copy."""
        return self._tiles.permute(0, 2, 1, 3).flatten(2).clone()

    def inputs(self, position: int) -> Tensor:
        """Return the inputs of a token that is in the ring."""
        return self._ring[position % len(self._ring)]

    def write_snapshot(self, state: Tensor, window: dict[int, Tensor], position: int) -> None:
        """Write S, and a ring with inputs of the sequence alone: it may be stored."""
        self._ring[:] = window[position - 1]
        self.write(state, window, position, position)

    def write(self, state: Tensor, window: dict[int, Tensor], committed: int, stop: int) -> None:
        """Write S, and the inputs that are needed after it: up to token `stop`."""
        self._tiles.copy_(state.view(*state.shape[:2], -1, TILE).permute(0, 2, 1, 3))
        for position in range(max(committed - self._taps + 1, 0), stop):
            self.inputs(position).copy_(window[position])


def _token(spec: DeltaNetSpec, state: Tensor, window: list[Tensor]) -> tuple[Tensor, Tensor]:
    """Return a token's results [value heads, value_dim], and the new S."""
    heads = spec.heads
    width, repeats = heads.num_key_heads * heads.key_dim, heads.num_value_heads // heads.num_key_heads
    query, key, value = convolved(spec.conv_weight, None, window).tensor_split([width, 2 * width])
    query, key = (_unit(each.view(-1, heads.key_dim)) for each in (query, key))
    of_heads = torch.arange(heads.num_value_heads)
    of_heads = of_heads % heads.num_key_heads if spec.is_tiled else of_heads // repeats
    query, key = query[of_heads], key[of_heads]
    b, a = window[-1][heads.channels :].float().tensor_split([heads.num_value_heads])
    decay = torch.exp(-spec.rate[:, None] * softplus(a + spec.rate_bias).view(heads.num_value_heads, -1))
    beta = spec.max_share * b.sigmoid()
    state = decay[:, :, None] * state
    change = (value.view(-1, heads.value_dim) - (key[:, :, None] * state).sum(1)) * beta[:, None]
    state = state + key[:, :, None] * change[:, None, :]
    return ((query * heads.key_dim**-0.5)[:, :, None] * state).sum(1), state


def convolved(weight: Tensor, bias: Tensor | None, window: list[Tensor]) -> Tensor:
    """Return silu of the convolution of the channels, the first inputs of the last tokens: float32 [channels]."""
    sums = torch.zeros(weight.shape[1]) if bias is None else bias
    for own, row in zip(weight, window, strict=True):
        sums = sums + own * row[: len(own)].float()
    return silu(sums)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


def _gated_norm(spec: DeltaNetSpec, heads_out: Tensor, z: Tensor) -> Tensor:
    x = heads_out.float()
    normed, gate = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + spec.norm_eps), z.float().view(x.shape)
    gated: Tensor = spec.norm_weight * normed * gate.sigmoid()
    if not spec.is_gate_sigmoid:
        gated = spec.norm_weight * normed.to(heads_out.dtype).float() * silu(gate)
    return gated.flatten()
