"""Back ends: the choice of each op's implementation, made once, when a worker starts.

`cuda` is the GPU's: Triton, compiled for the card when a kernel first runs (docs/decisions/0012). `cpp` is the CPU's:
C++ kernels for AMX, AVX-512, AVX2 and anything else (csrc/). `torch` stands in where they were not built: batched
PyTorch, exact to the bit too (docs/decisions/0002). `reference` is what tests hold them against: the plainest form of
each op.
"""

import logging
from dataclasses import replace
from importlib.util import find_spec

from quire.core.errors import ConfigError, NotInstalledError
from quire.core.optional_package import NEEDS_KERNELS, NEEDS_TORCH
from quire.extension.isas import usable_isas
from quire.kernels.back_end import MAX_HEAD_DIM, BackEnd, serves_head_dim
from quire.kernels.cpp.cpp_back_end import cpp_ops
from quire.kernels.paged_attention import AttentionBackEnd

log = logging.getLogger(__name__)

NAMES = ("cpp", "torch", "reference")  # back ends of CPUs


def choose_back_end(
    device: object, name: str = "auto", isa: str = "auto", head_dim: int = 8, *, is_exact: bool = False,
    attention: AttentionBackEnd | None = None,
) -> BackEnd:  # fmt: skip
    """Return the back end for `device`: the fastest one there is for it, or the one named.

    `is_exact`: on CUDA, too, a row's result does not depend on the other rows. `attention`: on CUDA, in place of
    Triton's.

    `isa` is the instruction set of the C++ kernels; auto is the best that the CPU has. Where they were not built, or
    cannot serve heads of `head_dim`, auto is the PyTorch stand-in. Raises ConfigError for what is not there.
    """
    if str(device).startswith("cuda"):
        return cuda_back_end(head_dim, is_exact=is_exact, attention=attention)
    if name not in ("auto", *NAMES):
        raise ConfigError(f"the back end must be auto, {' or '.join(NAMES)}, got {name!r}")
    if name in ("torch", "reference"):
        return _plain(name)
    if not usable_isas():
        if name == "cpp" or isa != "auto":
            raise NotInstalledError(f"cpu_isa {isa}: {NEEDS_KERNELS}")
        plain = _plain("torch")
        log.warning("the C++ kernels were not built, PyTorch's serve: several times slower; a C++ compiler is missing")
        return plain
    if isa not in ("auto", *usable_isas()):
        raise ConfigError(f"cpu_isa must be auto, {' or '.join(usable_isas())} on this CPU, got {isa!r}")
    if not serves_head_dim(head_dim):
        limit = f"a multiple of 8 up to {MAX_HEAD_DIM}"
        if name == "cpp" or isa != "auto":
            raise ConfigError(f"cpu_isa {isa}: the C++ kernels need heads of {limit}, the model's have {head_dim}")
        plain = _plain("torch")
        log.warning("heads of %d are not %s: PyTorch's kernels serve, several times slower", head_dim, limit)
        return plain
    return BackEnd(name="cpp", is_exact=True, **cpp_ops(usable_isas()[0] if isa == "auto" else isa))


def _plain(name: str) -> BackEnd:
    if find_spec("torch") is None:
        raise NotInstalledError(
            "there are no C++ kernels for this model here (install a wheel, or with a C++ compiler), and without them "
            f"{NEEDS_TORCH}"
        )
    from quire.kernels.reference.back_ends import REFERENCE, TORCH  # noqa: PLC0415 (loads torch)

    return TORCH if name == "torch" else REFERENCE


def cuda_back_end(
    head_dim: int = 8, *, is_exact: bool = False, attention: AttentionBackEnd | None = None
) -> BackEnd:
    """Return the back end for CUDA. ConfigError where Triton is missing, or cannot serve heads of `head_dim`.

    With an `attention` in place of Triton's, also where that is not installed, or where `is_exact` is asked for.
    """
    if find_spec("triton") is None:
        raise NotInstalledError("device cuda needs Triton: pip install 'quire[gpu]'")
    from quire.kernels.reference.back_ends import TORCH  # noqa: PLC0415 (loads torch)
    from quire.kernels.triton import triton_attention, triton_back_end  # noqa: PLC0415 (an optional package)

    if head_dim > triton_attention.MAX_HEAD_DIM:
        limit = triton_attention.MAX_HEAD_DIM
        raise ConfigError(f"device cuda serves heads of at most {limit}, the model's have {head_dim}; use cpu")
    chosen = replace(TORCH, name="cuda", is_exact=is_exact, **triton_back_end.triton_ops(is_exact=is_exact))
    if attention is None:
        return chosen
    if is_exact:
        raise ConfigError(f"attention_backend {attention.name} does not support exact True; use triton")
    return replace(chosen, attention=attention, paged_attention=attention.make(triton_attention.paged_attention))
