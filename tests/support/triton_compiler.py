"""Compiles what a wrapper would launch, for cards that are not here, instead of launching it."""

import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

WIDE_READ = r"ld\.global[.\w]*\.(v4\.b32|v2\.b64)|cp\.async\.cg\.shared\.global .*, 0x10"
PRODUCT = r"wgmma\.mma_async|tcgen05\.mma|mma\.sync\S*m\d+n\d+k\d+"


@dataclass(frozen=True)
class Compiled:
    """One kernel for one card: registers of a thread, bytes that it spills, bytes of memory that a program shares.

    `products`: its instructions for matrix units. `reads_widely`: whether threads read or copy 16 bytes at a time.
    `overlaps`: whether the kernel is launched while the one before it ends. `fetches_ahead`: whether it has memory
    brought to the L2 cache before it waits for that one.
    """

    name: str
    capability: int
    num_registers: int
    spilled_bytes: int
    shared_bytes: int
    products: frozenset[str]
    reads_widely: bool
    overlaps: bool
    fetches_ahead: bool


class NoCard:
    """Stands in for Triton's driver: the current device is a card of a compute capability that is not here."""

    def __init__(self, capability: int, number: int) -> None:
        self._capability, self._number = capability, number

    def get_current_device(self) -> int:
        """Return a number under which Triton keeps this card's kernels."""
        return self._number

    def get_current_stream(self, device: int) -> int:
        """Return the default one."""
        return 0

    def get_current_target(self) -> object:
        """Return what to compile for."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def compiled_launches(capability: int) -> Iterator[list[Compiled]]:
    """Compile every launch of the block for a card of this compute capability, and list the kernels."""
    kernels: list[Compiled] = []
    with _launching_nothing(capability, capability, lambda kernel: kernels.append(_compiled(kernel, capability))):
        yield kernels


@contextmanager
def specialized_launches(capability: int = 90) -> Iterator[set[tuple[str, str]]]:
    """Compile nothing; collect what would be: names of kernels, each with what Triton makes it anew for."""
    from triton.runtime.jit import JITFunction

    keys = set[tuple[str, str]]()

    def note(self: Any, key: str, *_: object) -> object:  # noqa: ANN401 (Triton's own class, which is not public)
        keys.add((self.__name__, key))
        return self

    with pytest.MonkeyPatch.context() as patch, _launching_nothing(capability, -capability, lambda kernel: None):
        patch.setattr(JITFunction, "_do_compile", note)
        yield keys


@contextmanager
def _launching_nothing(capability: int, number: int, use: Callable[[Any], None]) -> Iterator[None]:
    """Let Triton do for the launches of the block all that it does on a card, up to the launch."""
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    run = JITFunction.run

    def prepare(self: object, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        use(run(self, *args, grid=grid, warmup=True, **kwargs))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(driver, "_active", NoCard(capability, number))
        patch.setattr(JITFunction, "run", prepare)
        patch.setattr("quire.kernels.triton.card.capability", lambda device: capability)
        yield


def _compiled(kernel: Any, capability: int) -> Compiled:  # noqa: ANN401
    ptx, metadata = kernel.asm["ptx"], kernel.metadata
    reads_widely = re.search(WIDE_READ, ptx) is not None
    overlaps = "griddepcontrol.wait" in ptx
    assert overlaps == metadata.launch_pdl, "a kernel that waits is launched early, and no other one"
    is_too_early = overlaps and re.search(r"LDG(?!DEPBAR).*ACQBULK", kernel.asm["sass"], re.DOTALL)
    assert not is_too_early, "a kernel reads nothing before it waits"
    fetches_ahead = overlaps and re.search(r"CCTL\.E\.PF2.*ACQBULK", kernel.asm["sass"], re.DOTALL) is not None
    products = frozenset(re.findall(PRODUCT, ptx))
    return Compiled(
        metadata.name, capability, *resources(ptx), metadata.shared, products, reads_widely, overlaps, fetches_ahead
    )


def resources(ptx: str) -> tuple[int, int]:
    """Return registers per thread, and bytes that are written away because they do not fit: of kernels, the most."""
    import triton

    target = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    name = "ptxas-blackwell" if target.startswith("sm_1") else "ptxas"
    tool = Path(triton.__file__).parent / "backends/nvidia/bin" / name
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (re.findall(p, report) for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return max(map(int, registers)), max(map(int, spilled))
