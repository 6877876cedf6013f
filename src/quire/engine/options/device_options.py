"""Options of the device: kernels, CUDA graphs and instruction sets."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

from quire.core.checks import shown
from quire.core.errors import ConfigError
from quire.core.options import option

_device = partial(option, panel="Device")

Device = Literal["auto", "cpu", "cuda"]
AttentionBackEndName = Literal["auto", "triton", "cuda", "flashinfer"]
CpuIsa = Literal["auto", "amx", "avx512_bf16", "avx512_vnni", "avx512", "avx2", "portable"]
MAX_GRAPH_SIZES, MAX_GRAPH_TOKENS = 128, 8192  # a graph keeps up to a few MiB, beside what the largest step needs


def parse_sizes(texts: list[str]) -> tuple[int, ...]:
    """Return the sizes of a repeatable flag. Raises ConfigError for what is no integer."""
    try:
        return tuple(map(int, texts))
    except ValueError as error:
        raise ConfigError(f"cudagraph_capture_sizes must be integers: {error}") from None


@dataclass(frozen=True, kw_only=True, init=False, repr=False, eq=False)
class DeviceOptions:
    """Device of a model, and its kernels."""

    device: Device = _device(
        "auto", "where the model runs",
        row="`cpu`; `cuda`, refused where torch sees no GPU or Triton is not installed; `auto`: a GPU where both are "
        "there ([gpu.md](gpu.md))",
    )  # fmt: skip
    exact: bool | None = _device(
        None, "answers on a GPU that do not depend on the other requests, for slower products",
        shown_default="off on a GPU; always on for a CPU",
        row="`True`: on a GPU, too, a row's logits have the same bits alone and in any batch "
        "([gpu.md](gpu.md#exact)); `None`: not on a GPU. On a CPU they always have, and `False` is refused",
    )  # fmt: skip
    attention_backend: AttentionBackEndName = _device(
        "auto", "attention kernels of a GPU: triton, cuda (C++, for decodes) or flashinfer; auto is triton",
        metavar="NAME",
        row="attention kernels of a GPU: `triton`; `cuda`, the paper's kernel in CUDA C++ for decodes, and Triton's "
        "for prompts; `flashinfer`, if it is installed; `auto` is `triton` ([gpu.md](gpu.md#attention-back-ends)). "
        "What they do not support is refused at start, and so is anything but `auto` on a CPU",
    )  # fmt: skip
    cpu_isa: CpuIsa = _device(
        "auto", "instruction set of the CPU's kernels; auto is the best there is",
        row="instruction set of the CPU's kernels: `auto` (the best that the CPU has), `amx`, `avx512_bf16`, "
        "`avx512_vnni`, `avx512`, `avx2`, `portable`",
    )  # fmt: skip
    capture_graphs: bool | None = _device(
        None, "capture the CUDA graphs of all steps at start, not as they are needed", shown_default="on for a GPU",
        row="`True`, and `None` on a GPU: the graphs of all steps are captured at start "
        "([gpu.md](gpu.md#graphs-of-steps)), some seconds; `False`: each after a few steps that need it, of which one "
        "then takes longer. `True` is refused on a CPU",
    )  # fmt: skip
    enforce_eager: bool = _device(
        False, "run steps on a GPU without CUDA graphs",
        row="`True`: on a GPU no step is replayed as a CUDA graph: slower, with the same tokens. A CPU has none",
    )  # fmt: skip
    early_launch: bool = _device(
        True, "launch kernels on a GPU of sm_90 or newer while the ones before them end",
        row="`False`: on a GPU no kernel is launched before the one ahead of it has ended (programmatic dependent "
        "launch), for drivers that refuse it; slower, with the same tokens ([gpu.md](gpu.md#few-rows))",
    )  # fmt: skip
    cudagraph_capture_sizes: tuple[int, ...] = _device(
        (), "tokens of the steps on a GPU that CUDA graphs are captured for (repeatable)", metavar="TOKENS",
        shown_default="up to 256, and 512 with chunks of prompts", parse=parse_sizes,
        row=f"sizes in tokens, at most {MAX_GRAPH_SIZES} from 1 to {MAX_GRAPH_TOKENS:,}, that CUDA graphs are captured "
        "at; a smaller step is padded to the next one, a larger one runs without a graph; sizes beyond "
        "`max_num_batched_tokens` are left out. Empty: 1, 2, 4, 8 and multiples of 16 up to 256, for steps with "
        "chunks of prompts 16, 32 and multiples of 64 up to 512 ([gpu.md](gpu.md#graphs-of-steps)). On a CPU without "
        "effect",
    )  # fmt: skip
    max_cudagraph_capture_size: int | None = _device(
        None, "the largest of these sizes, where they are not given", low=1, high=MAX_GRAPH_TOKENS, metavar="TOKENS",
        shown_default="256, and 512 with chunks of prompts",
        row="the usual ones of these sizes up to this one; with `cudagraph_capture_sizes` it must be the largest of "
        "them; `None`: 256, and 512 for steps with chunks",
    )  # fmt: skip
    gpu_memory_utilization: float = _device(
        0.9, "share of a GPU for weights, activations and KV cache", low=0, is_low_excluded=True, high=1,
        row="share of a GPU for weights, activations and KV cache, above 0 and at most 1; this engine's own: two with "
        "0.45 each fit side by side",
    )  # fmt: skip

    @property
    def captures_at_start(self) -> bool:
        """True if an engine on a GPU captures all its graphs at start."""
        return self.capture_graphs is not False

    def _check_graphs(self) -> None:
        given, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        wrong: list[object] = [given]
        if isinstance(given, tuple | list) and len(given) <= MAX_GRAPH_SIZES:
            wrong = [size for size in given if type(size) is not int or not 1 <= size <= MAX_GRAPH_TOKENS]
        if wrong:
            raise ConfigError(
                f"cudagraph_capture_sizes must be at most {MAX_GRAPH_SIZES} integers from 1 to {MAX_GRAPH_TOKENS}, "
                f"got {shown(wrong[0])}"
            )
        if self.enforce_eager and self.capture_graphs:
            raise ConfigError("capture_graphs True needs graphs, of which enforce_eager True has none")
        if given and largest not in (None, max(given)):
            raise ConfigError(
                f"max_cudagraph_capture_size must be the largest of cudagraph_capture_sizes, {max(given)}, "
                f"got {largest}"
            )
