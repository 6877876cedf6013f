"""Parts of a transformers model that Quire's back end computes: attention, linears, norms, feed-forwards.

A model calls `attention` once per layer, in the order of its layers; the object that is `active` says what happens: a
`Trace` records what the layers ask for, a `PagedStep` writes to the cache and attends over it. Masks are not built.
In a trace a mask is a marker that carries the window of the layers that receive it.

A part is replaced where its code is that of a part known here, instruction by instruction, so one that looks alike
but clips or scales keeps its own code. Each row of a replaced part depends on that row alone.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers import activations as hf
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.pytorch_utils import Conv1D
from transformers.utils.logging import disable_progress_bar

from quire.core.errors import ModelError
from quire.kernels.back_end import BackEnd
from quire.kernels.conversion import round_to_nearest
from quire.kernels.layers import Linear, Norm
from quire.kernels.linear_weight import DENSE, LinearWeight
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec, Heads, RotarySpec
from quire.kernels.reference import activation
from quire.kernels.tensors import NUMPY_LIBRARY
from quire.kernels.torch_arrays import to_array, to_tensor
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.quantization import WHOLE_ROW, Quantization, WeightScheme

NAME = "quire"
WITHOUT_EFFECT = frozenset({  # on the attention of a causal model without a cache of its own
    "dropout", "position_ids", "cache_position", "use_cache", "output_attentions", "output_hidden_states",
    "return_dict", "position_embeddings", "past_key_values", "is_causal", "scaling", "sliding_window", "softcap",
    "s_aux", "logits_to_keep", "num_items_in_batch",
})  # fmt: skip


def of_back_end(back_end: BackEnd, tensor: Tensor) -> Any:  # noqa: ANN401 (an Array, or a Tensor)
    """Return a tensor as the back end takes it, in the same memory."""
    return to_array(tensor.detach()) if back_end.library is NUMPY_LIBRARY else tensor


def tensor_of(found: Any) -> Tensor:  # noqa: ANN401 (an Array, or a Tensor)
    """Return what a back end has returned as a tensor, in the same memory."""
    return to_tensor(found) if isinstance(found, np.ndarray) else found


class AttentionHook(Protocol):
    """Attention of one forward pass."""

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, options: Mapping[str, Any]
    ) -> Tensor:
        """Return [1, num_tokens, num_heads, head_dim] for query, key, value [1, heads, num_tokens, head_dim]."""


_ACTIVE: ContextVar[AttentionHook] = ContextVar("attention_hook")


@contextmanager
def active(hook: AttentionHook) -> Iterator[None]:
    """Let a hook serve the attention of models that run in this thread."""
    token = _ACTIVE.set(hook)
    try:
        yield
    finally:
        _ACTIVE.reset(token)


def attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: object, **options: Any  # noqa: ANN401
) -> tuple[Tensor, None]:
    """Call the active hook; the signature is that of transformers' attention functions."""
    return _ACTIVE.get().attend(module, query, key, value, attention_mask, options), None


def mask(
    batch_size: int, q_length: int, kv_length: int, *, mask_function: Callable[..., Tensor],
    local_size: int | None = None, **options: object,
) -> Tensor:  # fmt: skip
    """Return a marker in place of a mask: its `window` is that of the mask, None for a causal one.

    Raises ModelError for a mask that is neither causal nor of a sliding window. Only traces ask for masks.
    """
    return marker(_window(mask_function, local_size))


def marker(window: int | None) -> Tensor:
    """Return a tensor in place of a mask, of four dimensions: transformers passes it on to the layers as it is."""
    found = torch.zeros(1, 1, 1, 1)
    found.window = window  # type: ignore[attr-defined]
    return found


def _window(mask_function: Callable[..., Tensor], local_size: int | None) -> int | None:
    """Return the window of a mask, by what a few queries see around the places where masks differ."""
    size = local_size or 4
    queries = [0, 1, size - 1, size, size + 1, 2 * size, 2 * size + 1]
    places = sorted({max(0, each + step) for query in queries for each in (query, query - size) for step in (-1, 0, 1)})
    zero = torch.tensor(0)
    for query in queries:
        for place in places:
            seen = bool(mask_function(zero, zero, torch.tensor(query), torch.tensor(place)))
            if seen != (place <= query and (local_size is None or place > query - local_size)):
                raise ModelError("a mask of it is neither causal nor of a sliding window")
    return local_size


def install() -> None:
    """Register the hook with transformers, under NAME, and turn off its progress bars."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """Parameters of one layer's attention; `window` is in tokens, None: all of them."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int | None
    softcap: float
    has_sinks: bool


@dataclass(slots=True)
class Trace:
    """Hook that records the layers of a forward pass. Each row of its result depends on the row alone."""

    layers: list[AttentionLayer] = field(default_factory=list)

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, options: Mapping[str, Any]
    ) -> Tensor:
        """Record a layer; return values of its own heads, plus queries."""
        unknown = [name for name, given in options.items() if name not in WITHOUT_EFFECT and given not in (None, False)]
        if unknown:
            raise ModelError(f"its attention has the option {unknown[0]}, which is not known")
        if options.get("is_causal") is False:
            raise ModelError("its attention is bidirectional")
        if key.shape != value.shape or query.shape[3] != key.shape[3]:
            raise ModelError(f"its keys are {[*key.shape[1:]]} and its values {[*value.shape[1:]]}, not alike")
        if mask is not None and not hasattr(mask, "window"):
            raise ModelError("it changes masks after they are made, which a paged cache cannot follow")
        self.layers.append(AttentionLayer(
            query.shape[1], key.shape[1], query.shape[3], getattr(mask, "window", None),
            float(options.get("softcap") or 0.0), options.get("s_aux") is not None,
        ))  # fmt: skip
        group = query.shape[1] // key.shape[1]
        return (query + value.repeat_interleave(group, dim=1)).transpose(1, 2)


class PagedStep:
    """Hook of one step: layers write keys and values to the cache, and attend over it."""

    def __init__(
        self, layers: list[AttentionLayer], back_end: BackEnd, batch: ForwardBatch, metadata: AttentionMetadata,
        cache: KVCache, progress: NDArray[np.int64],
    ) -> None:  # fmt: skip
        self._layers, self._back_end, self._batch, self._metadata = layers, back_end, batch, metadata
        self._cache, self._progress = cache, progress
        self._index = 0

    def attend(
        self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: object, options: Mapping[str, Any]
    ) -> Tensor:
        index = self._index
        self._index += 1
        self._progress += 1
        layer, keys, values = self._layers[index], self._cache.keys[index], self._cache.values[index]
        flat = (of_back_end(self._back_end, each[0].transpose(0, 1).contiguous()) for each in (query, key, value))
        rows, new_keys, new_values = flat  # [num_tokens, heads, head_dim]
        batch = self._batch
        heads = Heads(layer.num_heads, layer.num_kv_heads, layer.head_dim)
        rows = self._back_end.write_kv(
            RotarySpec(heads), rows, new_keys, new_values, batch.positions, keys, values, batch.slot_mapping
        )
        scale, sinks = options.get("scaling") or layer.head_dim**-0.5, None
        if layer.has_sinks:
            sinks = of_back_end(self._back_end, options["s_aux"].float().contiguous())
        spec = AttentionSpec(heads, scale, layer.window, layer.softcap, sinks)
        return tensor_of(self._back_end.paged_attention(spec, rows, keys, values, self._metadata))[None]


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
