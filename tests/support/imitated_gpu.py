"""GPUs that are none: `--device imitated` runs what `--device cuda` runs, on a machine without one.

Its tensors say that they are on `cuda`, refuse what a GPU's refuse (to be NumPy's, to meet the host's in an op), and
are computed in host memory, by PyTorch ops in place of the Triton kernels. Everything above these is what runs on a
GPU: the worker with two steps in flight, the swapper on a stream of its own, as late as it may be, the graphs of
decodes, the measuring of memory. Logits get an error that is another one in every step: answers differ as on a GPU,
and a test that compares them otherwise than by the margin rule fails here. Ranks of tensor parallelism have a card
each, in processes of their own (support/imitated_rank.py), and gloo in the place of NCCL.
"""

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ProcessGroupGloo, Store
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from quire.engine.options.device_options import DeviceOptions
from quire.engine.parallel import nccl
from quire.execution.cuda import cuda_device
from quire.execution.cuda import cuda_worker as worker
from quire.execution.cuda.cuda_graphs import CudaGraphCapture
from quire.execution.cuda.memory_profiling import available_kv_bytes
from quire.kernels import choice
from quire.kernels.layers import Linear, Routing
from quire.kernels.linear_weight import DENSE, LinearWeight
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec, RotarySpec
from quire.kernels.reference import linear
from quire.kernels.reference.experts import route
from quire.kernels.reference.kv_cache import copy_blocks, write_kv
from quire.kernels.reference.norm import TorchNorm
from quire.kernels.reference.paged_attention import paged_attention
from quire.kernels.reference.sampling import choose_tokens, mask_logits
from quire.kernels.triton import triton_experts, triton_linear, triton_low_rank
from quire.kernels.triton.products import TritonWeight
from quire.model.decoder import Decoder
from quire.model.sharding import Shard
from support.fake_cuda import FakeCuda, FakeEvent, FakeStream
from support.fake_graphs import FakeGraphs

CARD = [torch.device("cuda", 0)]  # the current one
# The logprobs of two runs, each with its error, stay within 1e-3. In 16 bits, roundings move logits, too.
ERRORS = {torch.float32: 2e-4, torch.bfloat16: 0.01, torch.float16: 0.01}
CARD_BYTES, SWAP_BYTES = 256 << 20, 16 << 20
aten = torch.ops.aten
MIXING = (aten.copy_, aten.index, aten.index_put_, aten._index_put_impl_, aten._to_copy)  # memory of host and card
WITHOUT_ANY = dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "_lazy_init"))


class CardTensor(Tensor):
    """A tensor of the card; `inner` has its values, in host memory."""

    inner: Tensor
    device: ClassVar[Any] = property(lambda self: CARD[0])
    is_cuda: ClassVar[Any] = property(lambda self: True)

    @staticmethod
    def __new__(cls: type["CardTensor"], inner: Tensor) -> "CardTensor":
        """Return one that has the form of `inner`."""
        card: CardTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype, device="meta"
        )
        card.inner = inner
        return card

    @classmethod
    def __torch_dispatch__(
        cls, op: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Compute in host memory."""
        return _compute(op, args, kwargs or {})

    def numpy(self, *, force: bool = False) -> Any:  # noqa: ANN401
        """Return the values, if they may be copied."""
        if not force:
            raise TypeError("can't convert cuda:0 device type tensor to numpy")
        return self.inner.numpy().copy()

    def tolist(self) -> Any:  # noqa: ANN401
        """Return the values."""
        return self.inner.tolist()


class Card(TorchDispatchMode):
    """Makes tensors on the card, and sees to it that no op reads both memories."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: nothing is compiled here, and torch would import its compiler, 3 s of each process."""
        return False

    def __torch_dispatch__(
        self, op: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None  # noqa: ANN401
    ) -> Any:  # noqa: ANN401
        """Compute in host memory."""
        return _compute(op, args, kwargs or {})


def _compute(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401
    tensors: list[Tensor] = []
    _mapped(Tensor, tensors.append, (args, kwargs))
    on_card = [isinstance(x, CardTensor) for x in tensors]
    is_mixed = any(on_card) and any(x.dim() > 0 for x, is_there in zip(tensors, on_card, strict=True) if not is_there)
    if is_mixed and op.overloadpacket not in MIXING:
        raise RuntimeError(f"{op}: found tensors on two devices, cuda:0 and cpu")
    gives_card = on_card[0] if tensors else False
    if kwargs.get("device") is not None:
        gives_card = torch.device(kwargs["device"]).type == "cuda"
        kwargs["device"] = torch.device("cpu")
    kwargs.pop("pin_memory", None)
    args, kwargs = _of_host((args, kwargs))
    is_widened = op is aten.mm.dtype  # the CPU has none
    result = args[0].float() @ args[1].float() if is_widened else op(*args, **kwargs)
    return _mapped(Tensor, CardTensor, result) if gives_card else result


def _mapped(kind: type, function: Callable[[Any], Any], parts: Any) -> Any:  # noqa: ANN401
    """Return the parts with a function applied to those of a kind, as torch's tree_map_only, in a third of its time."""
    if isinstance(parts, kind):
        return function(parts)
    if type(parts) in (tuple, list):
        return type(parts)([_mapped(kind, function, part) for part in parts])
    if type(parts) is dict:
        return {name: _mapped(kind, function, part) for name, part in parts.items()}
    return parts


def _inner(x: CardTensor) -> Tensor:
    return x.inner


def _of_host(parts: Any) -> Any:  # noqa: ANN401
    return _mapped(CardTensor, _inner, parts)


RECORDS = AttentionMetadata, AttentionSpec, RotarySpec  # arguments of kernels with tensors in them


def _kernel(op: Callable[..., Any]) -> Callable[..., Any]:
    """Return an op that takes tensors of the card, runs in host memory, and returns tensors of the card."""

    def run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
        args = tuple(_record(x) if isinstance(x, RECORDS) else _of_host(x) for x in args)
        with _disable_current_modes():  # type: ignore[no-untyped-call]
            result = op(*args, **_of_host(kwargs))
        return _mapped(Tensor, CardTensor, torch.from_numpy(result) if isinstance(result, np.ndarray) else result)

    def _record(record: Any) -> Any:  # noqa: ANN401
        assert not isinstance(record, AttentionMetadata) or record.block_tables.is_cuda
        fields = {each.name: _of_host(getattr(record, each.name)) for each in dataclasses.fields(record)}
        return type(record)(**fields)

    return run


def _attend(
    spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
) -> Tensor:
    """Attend for all but the rows of no sequence, which come last."""
    count = int((metadata.context_lens > 0).sum())
    num_tokens, out = int(metadata.query_starts[count]), torch.zeros_like(query)
    live = AttentionMetadata(
        metadata.block_tables[:count],
        metadata.query_starts[: count + 1],
        metadata.context_lens[:count],
        metadata.block_size,
    )
    if count:
        out[:num_tokens] = paged_attention(spec, query[:num_tokens], keys, values, live)
    return out


def _linear(weight: LinearWeight, *args: Any, **kwargs: Any) -> Linear:  # noqa: ANN401
    """Return a layer of the card: the real one of a dense weight, PyTorch's of others."""
    if weight.format == DENSE:
        return triton_linear.CudaLinear(weight, *args, **kwargs)
    fields = {each.name: _of_host(getattr(weight, each.name)) for each in dataclasses.fields(weight)}
    layer = linear.make_linear(LinearWeight(**fields), *_of_host(args), **kwargs)
    run = _kernel(layer)
    run.num_bytes = layer.num_bytes  # type: ignore[attr-defined]
    return run  # type: ignore[return-value]


class StackedLayer:
    """Stands in for the same layer of all experts: each computes all rows, of which those of its own are taken."""

    is_exact = False

    def __init__(self, layers: Sequence[Linear]) -> None:
        self._layers = layers

    def __call__(self, x: Tensor, chosen: Tensor) -> Tensor:
        """Return [num_choices, outputs] for x [num_rows, inputs], or [num_choices, inputs]."""
        rows = x.repeat_interleave(len(chosen) // len(x), dim=0)
        results = torch.stack([layer(rows) for layer in self._layers])
        return results[chosen.long(), torch.arange(len(rows), device=x.device)]


def _choose(scores: Tensor, routing: Routing, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    chosen, weights = route(routing, scores, bias)
    return chosen[:, : routing.num_chosen].contiguous(), weights


def _add_in_order(
    results: Tensor, dtype: torch.dtype, weights: Tensor, last: Tensor | None
) -> Tensor:
    places = results if last is None else torch.cat([results, last[:, None]], dim=1)
    out = torch.zeros_like(places[:, 0])
    for place in range(places.shape[1]):
        out = out + places[:, place] * weights[:, place, None]
    return out.to(dtype)


def _grouped_product(
    x: Tensor, weight: TritonWeight, *, dtype: torch.dtype, is_exact: bool, groups: Tensor, out: Tensor | None = None
) -> Tensor:
    """Multiply each row with its own group's part of a stacked weight. A new result has NaN for rows of no group."""
    result = torch.full((len(x), weight.out_features), torch.nan, dtype=dtype, device=x.device) if out is None else out
    given = x, groups, weight.elements, result
    assert all(each.is_cuda for each in given), "tensors on two devices"
    x, groups, elements, values = map(_of_host, given)
    with _disable_current_modes():  # type: ignore[no-untyped-call]
        for group, part in enumerate(elements.unflatten(0, (-1, weight.out_features))):
            rows = (groups == group).nonzero()[:, 0]
            values[rows] = (x[rows].float() @ part.float().T).to(dtype)
    return result


class Graphs(CudaGraphCapture):
    """A capture whose replays run the call again, and leave the result where it was at first."""

    def __call__(self, call: Callable[[], Tensor]) -> Callable[[], Tensor]:
        """Return the replay of a call."""
        replay = super().__call__(call)
        return lambda: replay().copy_(call())


def gloo_group(store: Store, shard: Shard, device: torch.device) -> ProcessGroup:
    """Stand in for `nccl.open_group`."""
    gloo = ProcessGroupGloo(store, shard.rank, shard.num_ranks, nccl.COLLECTIVE_TIMEOUT)
    group = ProcessGroup(store, shard.rank, shard.num_ranks)
    group._set_default_backend(ProcessGroup.BackendType.GLOO)
    group._register_backend(torch.device("cpu"), ProcessGroup.BackendType.GLOO, gloo)
    return group


def set_card(index: int) -> None:
    """Stand in for `torch.cuda.set_device`."""
    CARD[0] = torch.device("cuda", index)


def turn_on(
    replace_by: Callable[[object, str, object], None] = setattr, num_cards: int = 1, *, is_noisy: bool = True
) -> None:
    """Let torch see GPUs from now on, and the engine use them. `is_noisy`: logits have errors."""
    cuda, real = FakeCuda(), choice.cuda_back_end()
    for name, value in WITHOUT_ANY.items():
        replace_by(torch.cuda, name, lambda *args, value=value: value)
    FakeGraphs().turn_on(replace_by)
    replace_by(torch.cuda, "is_available", lambda: True)
    replace_by(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    replace_by(torch.cuda, "get_device_name", lambda device=None: "imitated")
    replace_by(torch.cuda, "is_initialized", lambda: True)
    for name in ("_accelerator_emptyHostCache", "_host_emptyCache"):  # below what torch 2.11 and later ones call it
        if hasattr(torch._C, name):
            replace_by(torch._C, name, lambda: None)
    replace_by(torch.cuda, "device_count", lambda: num_cards)
    replace_by(torch.cuda, "current_device", lambda: CARD[0].index)
    replace_by(torch.cuda, "set_device", set_card)
    replace_by(nccl, "open_group", gloo_group)
    replace_by(torch.cuda, "max_memory_reserved", lambda device: 0)
    replace_by(torch.cuda, "mem_get_info", lambda device=None: (CARD_BYTES, CARD_BYTES))
    replace_by(torch.version, "cuda", "0")
    replace_by(torch.cuda, "Stream", lambda device: FakeStream(cuda))
    replace_by(torch.cuda, "Event", lambda enable_timing=False: FakeEvent(cuda))
    replace_by(torch.cuda, "current_stream", lambda device=None: cuda.current)
    replace_by(torch.cuda, "stream", cuda._on)
    imitated = replace(
        real,
        linear=_linear,
        head=partial(_linear, dtype=torch.float32),
        norm=TorchNorm,
        paged_attention=_kernel(_attend),
        write_kv=_kernel(write_kv),
        copy_blocks=lambda *args: cuda.launch(partial(_kernel(copy_blocks), *args)),
        sampling=replace(real.sampling, choose_tokens=_kernel(choose_tokens), mask_logits=_kernel(mask_logits)),
    )
    replace_by(choice, "cuda_back_end", lambda head_dim=8, is_exact=False, attention=None: imitated)
    replace_by(triton_linear, "activate", lambda x, name: _kernel(linear._ACTIVATIONS[name])(x))
    replace_by(triton_experts, "_StackedLayer", StackedLayer)
    replace_by(triton_experts, "choose", _choose)
    replace_by(triton_experts, "group_rows", lambda chosen, num_experts, height: chosen)
    replace_by(triton_experts, "add_in_order", _add_in_order)
    make_slots = torch.inference_mode()(triton_low_rank.TritonSlots.__init__)  # steps take views, of wrappers
    replace_by(triton_low_rank.TritonSlots, "__init__", make_slots)
    replace_by(triton_low_rank, "product", _grouped_product)
    replace_by(triton_low_rank, "group_rows", lambda of_row, num_groups, height: of_row)
    replace_by(triton_low_rank, "add_in_order", lambda parts, dtype: parts.sum(dim=1).to(dtype))
    replace_by(worker, "CudaGraphCapture", Graphs)
    # 84 captures are 3 to 6 seconds of a CPU: for tests that ask for them
    replace_by(DeviceOptions, "captures_at_start", property(lambda options: options.capture_graphs is True))
    replace_by(cuda_device, "SWAP_BYTES", SWAP_BYTES)
    replace_by(cuda_device, "available_kv_bytes", lambda model, *sizes: available_kv_bytes(model, 2, 4, *sizes[2:]))
    logits, generator = Decoder.logits, torch.Generator().manual_seed(0)

    def noisy(self: Decoder, hidden: Tensor) -> Tensor:
        exact = logits(self, hidden)
        if not (isinstance(exact, Tensor) and exact.is_cuda and is_noisy):
            return exact
        noise = 2 * torch.rand(exact.shape, generator=generator) - 1
        return exact + (noise * ERRORS[self.dtype]).to(exact.device)

    replace_by(Decoder, "logits", noisy)
    torch._C._set_only_lift_cpu_tensors(True)  # type: ignore[attr-defined]  (`torch.tensor` makes its tensors as others do)
    Card().__enter__()
