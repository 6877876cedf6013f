"""Parts of a transformers model that Quire's back end computes: linears, norms, activations, gated feed-forwards.

A part is replaced where its code is that of a part known here, instruction by instruction, so one that looks alike
but clips or scales keeps its own code. Each row of a replaced part depends on that row alone.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import activations as hf
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.pytorch_utils import Conv1D

from quire.engine.transformers_model.attention_hook import of_back_end, tensor_of
from quire.kernels.back_end import BackEnd
from quire.kernels.linear import Linear
from quire.kernels.linear_weight import DENSE, LinearWeight
from quire.kernels.norm import Norm
from quire.kernels.reference import activation
from quire.kernels.rounding import round_to_nearest
from quire.kernels.torch_arrays import to_array
from quire.model.quantization import WHOLE_ROW, Quantization, WeightScheme

_OFFSETS: dict[type[nn.Module], float | None] = {LlamaRMSNorm: None, Olmo2RMSNorm: 0.0, GemmaRMSNorm: 1.0}


def silu(x: Tensor) -> Tensor:
    """Return x / (1 + exp(-x)), each element by itself in float32, rounded to x's dtype."""
    wide = x.float()
    return (wide / wide.neg().exp_().add_(1.0)).to(x.dtype)


_ACTIVATIONS: dict[type[nn.Module], tuple[str, Callable[[Tensor], Tensor]]] = {
    nn.SiLU: ("silu", silu),
    hf.SiLUActivation: ("silu", silu),
    hf.NewGELUActivation: ("gelu_tanh", activation.gelu_tanh),
    hf.GELUTanh: ("gelu_tanh", activation.gelu_tanh),
    hf.FastGELUActivation: ("gelu_tanh", activation.gelu_tanh),
    hf.GELUActivation: ("gelu", activation.gelu),
    nn.ReLU: ("relu", activation.relu),
}
_GATED = {"silu": "silu_and_mul", "gelu_tanh": "gelu_tanh_and_mul"}  # activations that a linear has for gates


def called(part: Callable[[Any], Any], x: Tensor, back_end: BackEnd) -> Tensor:
    """Return what a part of the back end computes of x."""
    return tensor_of(part(of_back_end(back_end, x)))


class Layer(nn.Module):
    """Linear layer of the back end, over any leading dimensions."""

    def __init__(self, linear: Linear, back_end: BackEnd) -> None:
        super().__init__()
        self._linear, self._back_end = linear, back_end

    def forward(self, x: Tensor) -> Tensor:
        """Multiply x [..., in_features]."""
        return called(self._linear, x.reshape(-1, x.shape[-1]), self._back_end).view(*x.shape[:-1], -1)


class GatedFeedForward(nn.Module):
    """Gated feed-forward in two linears of the back end."""

    def __init__(self, gate_up: Linear, down: Linear, back_end: BackEnd) -> None:
        super().__init__()
        self._gate_up, self._down, self._back_end = gate_up, down, back_end

    def forward(self, x: Tensor) -> Tensor:
        """Compute x [..., hidden_size]."""
        inner = called(self._gate_up, x.reshape(-1, x.shape[-1]), self._back_end)
        return called(self._down, inner, self._back_end).view(*x.shape[:-1], -1)


class NormPart(nn.Module):
    """Norm of the back end, over any leading dimensions."""

    def __init__(self, norm: Norm, back_end: BackEnd) -> None:
        super().__init__()
        self._norm, self._back_end = norm, back_end

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x [..., width]."""
        return called(lambda rows: self._norm(rows)[0], x.reshape(-1, x.shape[-1]), self._back_end).view(x.shape)


class ActivationPart(nn.Module):
    """Activation that gives an element the same bits wherever it is in a tensor."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._function = function

    def forward(self, x: Tensor) -> Tensor:
        """Return the activation of each element."""
        return self._function(x)


@dataclass(slots=True)
class Replacer:
    """Replacement of the parts of one model, and the bytes of what replaces them."""

    back_end: BackEnd
    quantization: Quantization
    num_bytes: int = 0

    def replace_all(self, module: nn.Module, head: nn.Module | None) -> None:
        """Replace the parts below a module, in place; `head` computes logits, in float32."""
        for name, child in list(module.named_children()):
            part = self._part(child, is_head=child is head)
            if part is None:
                self.replace_all(child, head)
            else:
                setattr(module, name, part)

    def _part(self, module: nn.Module, *, is_head: bool) -> nn.Module | None:
        if type(module) is nn.Linear or type(module) is Conv1D:
            return Layer(self._linear([module], is_head=is_head), self.back_end)
        if type(module) is nn.LayerNorm and module.weight is not None and len(module.normalized_shape) == 1:
            return NormPart(self._norm(module.weight.data, _data(module.bias), module.eps, True, None), self.back_end)
        if norm := self._scaling_norm(module):
            return norm
        if _same_code(module, LlamaMLP, "forward"):
            act, gate, up, down = map(module.get_submodule, ("act_fn", "gate_proj", "up_proj", "down_proj"))
            gated = _GATED.get(_ACTIVATIONS[type(act)][0]) if type(act) in _ACTIVATIONS else None
            if gated is not None and (gate.bias is None) == (up.bias is None):
                return GatedFeedForward(self._linear([gate, up], activation=gated), self._linear([down]), self.back_end)
        if type(module) in _ACTIVATIONS:
            return ActivationPart(_ACTIVATIONS[type(module)][1])
        return None

    def _scaling_norm(self, module: nn.Module) -> NormPart | None:
        """Return the part of an RMSNorm of known code; None for another, or one without epsilon or weight."""
        eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
        weight = getattr(module, "weight", None)
        if not isinstance(eps, int | float) or not isinstance(weight, Tensor):
            return None
        for known, offset in _OFFSETS.items():
            if _same_code(module, known, "forward", "_norm"):
                return NormPart(self._norm(weight.data, None, float(eps), False, offset), self.back_end)
        return None

    def _norm(self, weight: Tensor, bias: Tensor | None, eps: float, centers: bool, offset: float | None) -> Norm:
        taken, own = of_back_end(self.back_end, weight), None if bias is None else of_back_end(self.back_end, bias)
        return self.back_end.norm(taken, own, eps, centers, offset)

    def _linear(
        self, modules: list[nn.Module], *, is_head: bool = False, activation: str = "none"
    ) -> Linear:
        """Return a linear with the rows of all modules, one after the other."""
        scheme = self.quantization.head if is_head else self.quantization.layers
        weights = [_weight(module, scheme) for module in modules]
        biases = [_data(module.bias) for module in modules]
        bias = None if biases[0] is None else torch.cat([each for each in biases if each is not None])
        library, taken = self.back_end.library, None if bias is None else of_back_end(self.back_end, bias)
        dtype = {"dtype": library.dtype("float32")} if is_head else {}
        weight = library.weight(LinearWeight.stack(weights), "cpu")
        linear: Linear = self.back_end.linear(weight, taken, activation=activation, **dtype)
        self.num_bytes += linear.num_bytes + (0 if bias is None else bias.nbytes)
        return linear


def _weight(module: nn.Module, scheme: WeightScheme) -> LinearWeight:
    weight = module.weight
    assert isinstance(weight, Tensor), "a linear's weight"
    rows = weight.data.T.contiguous() if isinstance(module, Conv1D) else weight.data
    if scheme.format == DENSE:
        return LinearWeight.dense(to_array(rows))
    group_size = rows.shape[1] if scheme.group_size == WHOLE_ROW else scheme.group_size
    size = scheme.activation_group_size
    return round_to_nearest(to_array(rows), scheme.format, group_size, activation_group_size=size)


def _data(parameter: object) -> Tensor | None:
    return parameter.data if isinstance(parameter, Tensor) else None


def _same_code(module: nn.Module, known: type[nn.Module], *methods: str) -> bool:
    """Return whether a module's methods have the code of a known class's, but for docstrings and types."""
    return all(_code(type(module), method) == _code(known, method) for method in methods)


def _code(owner: type, method: str) -> object:
    function = getattr(owner, method, None)
    if function is None:
        return None
    code = inspect.unwrap(function).__code__
    consts = tuple(each for each in code.co_consts if not isinstance(each, str))
    return code.co_code, code.co_names, code.co_varnames, consts
