"""Activations of the feed-forward layers, each element by itself in float32 and rounded to the input's dtype.

Written with `exp`, `tanh`, `erf` and exactly rounded operations only: torch's own silu, sigmoid and gelu give an
element other last bits in the body of a tensor than in the remainder that does not fill a vector register.
"""

import math

import torch
from torch import Tensor

CLAMPED_SILU_GAIN, CLAMPED_SILU_LIMIT = 1.702, 7.0
QUICK_GELU_GAIN = 1.702

def silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return silu(gate) * up for gate_up [..., 2 * width], gate in the first half. Shazeer 2020 (SwiGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float()
    divisor = wide.neg().exp_().add_(1.0)  # no new tensor: fresh pages cost more than the arithmetic
    return torch.div(wide, divisor, out=divisor).to(gate.dtype).mul_(up)


def gelu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu(gate) * up for gate_up [..., 2 * width], gate in the first half. Shazeer 2020 (GEGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu(gate).mul_(up)


def gelu_tanh_and_mul(gate_up: Tensor) -> Tensor:
    """Return gelu_tanh(gate) * up for gate_up [..., 2 * width], gate in the first half. Shazeer 2020 (GEGLU)."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gelu_tanh(gate).mul_(up)


def clamped_silu_and_mul(gate_up: Tensor) -> Tensor:
    """Return gate * sigmoid(1.702 gate) * (up + 1) for gate_up [..., 2 * width], gate in the first half.

    The gate is at most 7, up is from -7 to 7. gpt-oss (OpenAI 2025).
    """
    gate, up = gate_up.chunk(2, dim=-1)
    wide = gate.float().clamp(max=CLAMPED_SILU_LIMIT)
    active = wide / (wide * -CLAMPED_SILU_GAIN).exp_().add_(1.0)
    return (active * (up.float().clamp(-CLAMPED_SILU_LIMIT, CLAMPED_SILU_LIMIT) + 1.0)).to(gate.dtype)


def gelu_tanh(x: Tensor) -> Tensor:
    """Return GELU by its tanh approximation (GPT-2's `gelu_new`). Hendrycks and Gimpel 2016."""
    wide = x.float()
    inner = (wide + wide * wide * wide * 0.044715) * math.sqrt(2.0 / math.pi)
    return (wide * 0.5 * (torch.tanh(inner) + 1.0)).to(x.dtype)


def gelu(x: Tensor) -> Tensor:
    """Return GELU with the error function. Hendrycks and Gimpel 2016."""
    wide = x.float()
    return (wide * 0.5 * (torch.erf(wide * math.sqrt(0.5)) + 1.0)).to(x.dtype)


def quick_gelu(x: Tensor) -> Tensor:
    """Return x * sigmoid(1.702 x), an approximation of GELU. Hendrycks and Gimpel 2016; CLIP (Radford et al. 2021)."""
    wide = x.float()
    return (wide / (wide * -QUICK_GELU_GAIN).exp_().add_(1.0)).to(x.dtype)


def relu(x: Tensor) -> Tensor:
    """Return max(x, 0)."""
    return torch.relu(x)


def relu2(x: Tensor) -> Tensor:
    """Return the square of max(x, 0). So et al. 2021 (Primer)."""
    wide = torch.relu(x).float()
    return (wide * wide).to(x.dtype)
