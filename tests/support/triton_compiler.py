"""Compiles what a wrapper would launch, for cards that are not here, instead of launching it."""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

WIDE_READ = r"ld\.global[.\w]*\.(v4\.b32|v2\.b64)|cp\.async\.cg\.shared\.global .*, 0x10"


@dataclass(frozen=True)
class Compiled:
    """One kernel for one card: registers of a thread, bytes that it spills, bytes of memory that a program shares.

    `reads_widely`: whether threads read or copy 16 bytes at a time.
    """

    name: str
    capability: int
    num_registers: int
    spilled_bytes: int
    shared_bytes: int
    reads_widely: bool


@contextmanager
def compiled_launches(capability: int) -> Iterator[list[Compiled]]:
    """Compile every launch of the block for a card of this compute capability, and list the kernels."""
    from triton.runtime.jit import JITFunction

    kernels: list[Compiled] = []

    def run(self: object, *args: object, grid: object, warmup: bool, **kwargs: object) -> None:
        kernels.append(_compile(self, args, kwargs, capability))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(JITFunction, "run", run)
        patch.setattr("quire.kernels.triton.attention.capability", lambda device: capability)
        yield kernels


def _compile(
    kernel: Any,  # noqa: ANN401 (Triton's own class, which is not public)
    args: tuple[object, ...],
    kwargs: dict[str, object],
    capability: int,
) -> Compiled:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    options = {name: kwargs.pop(name) for name in ("num_warps", "num_stages") if name in kwargs}
    values = dict(zip((param.name for param in kernel.params), args, strict=False)) | kwargs
    signature, constants, attributes = {}, {}, {}
    for index, param in enumerate(kernel.params):
        value = values[param.name]
        if param.is_constexpr or value is None or (type(value) is int and value == 1):
            signature[param.name], constants[(index,)] = "constexpr", value
            continue
        signature[param.name] = _type(value)
        if isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    ptx = compiled.asm["ptx"]
    reads_widely = re.search(WIDE_READ, ptx) is not None
    return Compiled(kernel.__name__, capability, *_resources(ptx), compiled.metadata.shared, reads_widely)


def _type(value: object) -> str:
    if isinstance(value, torch.Tensor):
        names = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.float64: "fp64"}
        return "*" + (names | {torch.int32: "i32", torch.int64: "i64"})[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _resources(ptx: str) -> tuple[int, int]:
    """Return registers per thread, and bytes that are written away because they do not fit into them."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas"
    target = re.findall(r"^\.target (\w+)", ptx, re.MULTILINE)[0]
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [tool, "-v", f"--gpu-name={target}", file.name, "-o", "/dev/null"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    registers, spilled = (re.findall(p, report)[0] for p in (r"Used (\d+) registers", r"(\d+) bytes spill stores"))
    return int(registers), int(spilled)
