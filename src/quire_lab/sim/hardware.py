"""Hardware as data: bytes, operations and transfers of a device per second, and the fixed cost of a step.

Rates are the makers' peaks; `bandwidth_share` and `flops_share` say how much of them whole steps of good kernels reach.
A machine that was measured (`quire bench calibrate`) brings a curve instead: seconds per weight at several batch sizes.
"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import msgspec

from quire.core.errors import ConfigError

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
