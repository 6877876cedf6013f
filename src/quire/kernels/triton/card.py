"""Differences between GPUs: families of compute capabilities, and the early launch of kernels.

Early launch (programmatic dependent launch, from sm_90 on): a kernel is launched while the one before it in the stream
ends, and waits for that one's results itself. It is a switch of the process, since drivers and cards refuse it, not
models: `without_early_launch` is for the second try to capture a CUDA graph.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


class _EarlyLaunch:
    is_on = True


def use_early_launch(*, is_on: bool) -> None:
    """Launch kernels early from now on, on cards that can, or not."""
    _EarlyLaunch.is_on = is_on


@contextmanager
def without_early_launch() -> Iterator[None]:
    """Launch no kernel early in this block."""
    before, _EarlyLaunch.is_on = _EarlyLaunch.is_on, False
    try:
        yield
    finally:
        _EarlyLaunch.is_on = before


def launches_early(device: torch.device) -> bool:
    """Return whether kernels that can are launched early on a device."""
    return _EarlyLaunch.is_on and capability(device) >= 90


def launch_options(device: torch.device) -> dict[str, bool]:
    """Return the arguments of the launch of a kernel that begins with `wait_for_inputs`.

    The kernel before it in the stream has to be a kernel, too, since a graph may have no such edge from a copy.
    """
    is_early = launches_early(device)
    return {"OVERLAPS": is_early, "launch_pdl": is_early}


@triton.jit
def wait_for_inputs(OVERLAPS: tl.constexpr):
    """Let the next kernel be launched, and wait for the end of the one before; each program does, before any access."""
    if OVERLAPS:
        gdc_launch_dependents()
        gdc_wait()


@cache
def capability(device: torch.device) -> int:
    """Return 10 times the card's compute capability; of the interpreter, that of the oldest card that is served."""
    major, minor = torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
    return 10 * major + minor


def has_wide_products(capability: int) -> bool:
    """Return whether a card's matrix units take operands from shared memory: sm_90, and sm_100, 103 and so on."""
    return capability // 10 in (9, 10)
