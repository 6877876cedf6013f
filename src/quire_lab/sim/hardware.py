"""Hardware as data, models' costs on it, and the time of a step from its plan alone.

Rates are the makers' peaks; `bandwidth_share` and `flops_share` say how much of them whole steps of good kernels reach.
A machine that was measured (`quire bench calibrate`) brings a curve instead: seconds per weight at several batch sizes.

Linear layers read all weights once and multiply every token: the slower of the two counts. Attention reads the keys and
values of each context, or multiplies, where a prefill has many queries for the same keys. Head, block copies, swaps and
collectives are added, and the software's own time. Nothing is executed.
"""

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec

from quire.core.config import DEFAULT_MAX_NUM_BATCHED_TOKENS, batched_tokens_of_card
from quire.core.errors import ConfigError
from quire.core.plan import MeasuredRates, StepPlan
from quire.model.config import num_layer_weights
from quire.model.quantization import UNQUANTIZED, Quantization
from quire.model.sharding import ADDED_BYTES, Mode, Shard, divides_norm, has_whole
from quire.model.spec import DecoderSpec, Experts, LayerSpec, Mamba
from quire_lab.sim.footprint import DTYPE_BYTES, scheme_bits, stored_kv_bytes_per_token

GIB = 2**30


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """Measured: a step of so many tokens takes so many seconds per weight of the model's linear layers."""

    num_tokens: int
    s_per_weight: float


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device, its links to other devices and to the host, and the software's own time per step."""

    name: str
    memory_bytes: float
    bytes_per_s: float                     # memory, peak
    flops_per_s: float                     # peak in the weights' dtype
    bandwidth_share: float = 0.8
    flops_share: float = 0.6
    link_bytes_per_s: float = 300e9        # to another device, one way
    host_bytes_per_s: float = 25e9         # to host memory, one way: what swapping uses
    copy_s: float = 10e-6                  # to start one copy between host and device
    collective_s: float = 20e-6            # to start one collective
    step_s: float = 0.002                  # per step: scheduling, batch preparation, launches
    sequence_s: float = 0.0                # the same for each sequence in it
    price_per_hour: float | None = None    # per device
    device: Literal["cuda", "cpu"] = "cuda"
    dtype: str = "bfloat16"                # dtype that the curve was measured in
    curve: tuple[CurvePoint, ...] = ()     # ascending; empty: by bandwidth and arithmetic

    def __post_init__(self) -> None:
        names = ("memory_bytes", "bytes_per_s", "flops_per_s", "bandwidth_share", "flops_share", "link_bytes_per_s")
        for name in (*names, "host_bytes_per_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"hardware {self.name}: {name} must be above 0, got {getattr(self, name)}")
        for name in ("copy_s", "collective_s", "step_s", "sequence_s"):
            if not getattr(self, name) >= 0:
                raise ConfigError(f"hardware {self.name}: {name} must be at least 0 seconds, got {getattr(self, name)}")
        sizes = [point.num_tokens for point in self.curve]
        if sizes != sorted(set(sizes)) or any(point.s_per_weight <= 0 for point in self.curve):
            raise ConfigError(f"hardware {self.name}: the curve must ascend in num_tokens, with times above 0")

    @property
    def default_batched_tokens(self) -> int:
        """Tokens in one step by default."""
        is_card = self.device == "cuda"
        return batched_tokens_of_card(self.memory_bytes, self.name) if is_card else DEFAULT_MAX_NUM_BATCHED_TOKENS


def read_hardware(name: str, memory_bytes: int | None = None) -> Hardware:
    """Return a machine by its name, or from the JSON that `quire bench calibrate` wrote. ConfigError if neither.

    `memory_bytes`: of one device, instead of its own.
    """
    found = HARDWARE[name] if name in HARDWARE else _from_file(name)
    return found if memory_bytes is None else replace(found, memory_bytes=memory_bytes)


def _from_file(name: str) -> Hardware:
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"hardware must be one of {', '.join(HARDWARE)}, or a JSON file, got {name!r}")
    try:
        return msgspec.json.decode(path.read_bytes(), type=Hardware)
    except (msgspec.DecodeError, OSError) as error:
        raise ConfigError(f"{path} describes no hardware: {error}") from error


def write_hardware(path: Path, hardware: Hardware) -> None:
    """Write it for `read_hardware`."""
    path.write_bytes(msgspec.json.format(msgspec.json.encode(asdict(hardware)), indent=2) + b"\n")


# The paper's software: so much of its own per step and per sequence in it makes OPT-13B batch as many requests as
# figure 13 shows of vLLM, 30.42 on ShareGPT at 2 requests/s and 132.44 on Alpaca at 30. By Little's law the second
# says 75 ms per token, of which weights and cache take 25; 22 ms per step and none per sequence give 31 and 78.
PAPER_STEP_S, PAPER_SEQUENCE_S = 0.013, 0.0003

HARDWARE = {
    hardware.name: hardware
    for hardware in (
        Hardware("A100-40GB", 40 * GIB, 1.555e12, 312e12),
        Hardware("A100-80GB", 80 * GIB, 2.039e12, 312e12),
        Hardware("H100", 80 * GIB, 3.35e12, 989e12, link_bytes_per_s=450e9, host_bytes_per_s=50e9),
        Hardware("H200", 141e9, 4.8e12, 989e12, link_bytes_per_s=450e9, host_bytes_per_s=50e9),
    )
}


# Kwon et al. 2023, section 7.1: the paged attention kernel takes 20 to 26 % longer than one over contiguous memory.
PAGED_ATTENTION_FACTOR = 1.23
CONTIGUOUS_ATTENTION_FACTOR = 1.0


ExchangeMode = Mode | Literal["all-reduce"]


def exchange_mode(mode: Mode, device: str) -> ExchangeMode:
    """Return the exchanges of a mode of tensor parallelism: on GPUs partial sums are added by NCCL's all-reduce."""
    return "all-reduce" if mode == "reduce" and device == "cuda" else mode


class Exchanges(NamedTuple):
    """Exchanges between ranks in the layers of a step: how many, and the bytes that a rank gets from all others."""

    number: int
    num_bytes: int

    @classmethod
    def of(
        cls, spec: DecoderSpec, itemsize: int, num_ranks: int, mode: ExchangeMode, num_tokens: int = 1
    ) -> "Exchanges":
        """Return those of a step of `num_tokens`, `itemsize` that of an activation; the head's logits do not count.

        All-reduces are one per sum, in the activations' dtype over a ring (Shoeybi et al. 2019). Bytes are the mean of
        the ranks'.
        """
        others = num_ranks - 1
        if mode == "gather":
            widths = [width for layer in spec.layers for width in _gathered_widths(spec, layer, num_ranks)]
            return cls(len(widths), sum(widths) * num_tokens * itemsize * others // num_ranks)
        widths = [width for layer in spec.layers for width in _summed_widths(spec, layer)]
        if mode == "all-reduce":
            return cls(len(widths), 2 * sum(widths) * num_tokens * itemsize * others // num_ranks)
        squares = [each.num_groups for each in spec.mambas if divides_norm(each, num_ranks)]
        number = moved = 0  # bytes that all ranks get together
        for width, sum_bytes in [*((width, itemsize) for width in widths), *((width, 4) for width in squares)]:
            is_added_at_once = 4 * num_tokens * width <= ADDED_BYTES  # else each rank adds some, and gathers the others
            number += 1 if is_added_at_once else 2
            moved += num_tokens * width * others * (4 * num_ranks if is_added_at_once else 4 + sum_bytes)
        return cls(number, moved // num_ranks)


def _gathered_widths(spec: DecoderSpec, layer: LayerSpec, num_ranks: int) -> Iterator[int]:
    """Yield the columns of each activation of a layer that ranks gather (`quire.model.layer_builder`)."""
    for mixer in layer.mixers:
        if isinstance(mixer, Mamba) and has_whole(mixer, num_ranks, "gather"):
            yield sum(mixer.sections)
        else:
            yield mixer.width
        yield spec.hidden_size
    for each in layer.feed_forwards:
        if isinstance(each, Experts):
            yield each.num_active * each.expert.size
            yield from (each.latent_size, each.latent_size) if each.latent_size else ()
            yield from () if each.shared is None else (each.shared.size,)
        else:
            yield each.size
        yield spec.hidden_size
    if spec.layer_input is not None:
        yield spec.layer_input.size
        yield spec.hidden_size


def _summed_widths(spec: DecoderSpec, layer: LayerSpec) -> Iterator[int]:
    """Yield the columns of each partial sum of a layer that ranks add, squares of norms excepted."""
    yield from (spec.hidden_size for _ in layer.mixers)
    for each in layer.feed_forwards:
        yield spec.hidden_size
        if isinstance(each, Experts) and each.latent_size:
            yield each.latent_size


class CostModel:
    """The time of every step of one model on `num_devices` alike devices, with tensor parallelism.

    `kv_dtype`: a value of --kv-cache-dtype other than auto; None: the model's. `mode`: of the exchanges between
    devices.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        hardware: Hardware,
        block_size: int = 16,
        num_devices: int = 1,
        dtype: str = "float16",
        attention_factor: float = PAGED_ATTENTION_FACTOR,
        kv_dtype: str | None = None,
        quantization: Quantization = UNQUANTIZED,
        mode: ExchangeMode = "all-reduce",
    ) -> None:
        itemsize = DTYPE_BYTES[dtype]
        local = [Shard(rank, num_devices).local_spec(spec) for rank in range(num_devices)]
        # The device with the most decides: the others wait for it.
        kv_bytes = max(stored_kv_bytes_per_token(each, kv_dtype or dtype) for each in local)
        self.spec, self.hardware, self._ranks = spec, hardware, (num_devices, mode)
        self._itemsize, self._window = itemsize, spec.sliding_window
        self._shares = tuple(  # parts of the bytes of an unquantized weight: those of layers, and the head's
            scheme_bits(scheme, dtype, spec.hidden_size) / 8 / itemsize
            for scheme in (quantization.layers, quantization.head)
        )
        self._num_layer_weights = num_layer_weights(spec) / num_devices
        self._num_head_weights = spec.vocab_size * spec.embedding_size / num_devices
        self._s_per_byte = 1 / (hardware.bytes_per_s * hardware.bandwidth_share)
        self._s_per_flop = 1 / (hardware.flops_per_s * hardware.flops_share)
        self._block_bytes = kv_bytes * block_size
        self._s_per_context_token = kv_bytes * self._s_per_byte * attention_factor
        num_attended_flops = max(each.attended_flops for each in local)
        self._s_per_attended_token = num_attended_flops * self._s_per_flop * attention_factor
        self._linear_s, self._collectives_s = cache(self._linear_time_s), cache(self._collective_time_s)

    def step_s(self, plan: StepPlan) -> float:
        """Return the seconds of a step."""
        hardware, num_tokens = self.hardware, sum(plan.counts)
        seconds: float = hardware.step_s + hardware.sequence_s * len(plan.rows)
        seconds += self._linear_s(num_tokens, len(plan.sample_rows))
        seconds += self._attention_s(plan, num_tokens)
        if plan.copies:
            seconds += 2 * len(plan.copies) * self._block_bytes * self._s_per_byte + hardware.copy_s
        if plan.swap_outs or plan.swap_ins:
            seconds += self.swap_s(len(plan.swap_outs) + len(plan.swap_ins))
        if self._ranks[0] > 1:
            seconds += self._collectives_s(num_tokens)
        return seconds

    def swap_s(self, num_blocks: int) -> float:
        """Return the seconds of moving blocks to host memory or back: two copies for each block and layer."""
        num_copies = 2 * self.spec.num_layers * num_blocks
        return num_blocks * self._block_bytes / self.hardware.host_bytes_per_s + num_copies * self.hardware.copy_s

    @property
    def rates(self) -> MeasuredRates:
        """Rates that a worker of this speed would have measured, by which preemption chooses."""
        swapped_per_s = 1 / self.swap_s(1)
        prefilled_per_s = 2048 / (self.hardware.step_s + self._linear_s(2048, 1))  # a long one, without its attention
        return MeasuredRates(prefilled_per_s, swapped_per_s, swapped_per_s)

    def _linear_time_s(self, num_tokens: int, num_samples: int) -> float:
        """Return the seconds of all linear layers for the step's tokens, and of the head for its samples."""
        layer_share, head_share = self._shares
        return self._num_layer_weights * self._s_per_weight(num_tokens, layer_share) + (
            self._num_head_weights * self._s_per_weight(num_samples, head_share) if num_samples else 0.0
        )

    def _s_per_weight(self, num_tokens: int, share: float) -> float:
        """Return the seconds of a weight with `share` of an unquantized one's bytes; what is not reading stays."""
        curve = self.hardware.curve
        if curve:
            scale = self._itemsize / DTYPE_BYTES[self.hardware.dtype]
            return scale * (_on_curve(curve, num_tokens) - (1 - share) * curve[0].s_per_weight)
        return max(share * self._itemsize * self._s_per_byte, 2 * num_tokens * self._s_per_flop)

    def _attention_s(self, plan: StepPlan, num_tokens: int) -> float:
        """Return the seconds of attention over all layers. One token reads its context; more multiply with it, too."""
        window, num_context = self._window, sum(plan.starts) + num_tokens
        if window is not None:
            num_context = sum(min(start, window) + count for start, count in zip(plan.starts, plan.counts, strict=True))
        read_s: float = num_context * self._s_per_context_token
        if num_tokens == len(plan.counts):
            return read_s
        num_attended = sum(
            count * (min(start, window or start) + (count + 1) / 2)
            for start, count in zip(plan.starts, plan.counts, strict=True)
            if count > 1
        )
        return max(read_s, num_attended * self._s_per_attended_token)

    def _collective_time_s(self, num_tokens: int) -> float:
        """Return the seconds of the exchanges of all layers."""
        found = Exchanges.of(self.spec, self._itemsize, *self._ranks, num_tokens)
        return found.number * self.hardware.collective_s + found.num_bytes / self.hardware.link_bytes_per_s


def _on_curve(points: Sequence[CurvePoint], num_tokens: int) -> float:
    """Return the measured seconds per weight, linear between points; the last one's time per token beyond them."""
    right = bisect_left(points, num_tokens, key=lambda point: point.num_tokens)
    if right == len(points):
        return points[-1].s_per_weight * num_tokens / points[-1].num_tokens
    if right == 0:
        return points[0].s_per_weight
    low, high = points[right - 1], points[right]
    share = (num_tokens - low.num_tokens) / (high.num_tokens - low.num_tokens)
    return low.s_per_weight + share * (high.s_per_weight - low.s_per_weight)
