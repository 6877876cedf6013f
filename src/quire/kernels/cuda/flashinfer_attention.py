"""Paged attention by FlashInfer's wrappers, which read Quire's cache as it is: the layout NHD, a page for each block.

Steps in which every sequence has one query go to the wrapper for decodes, all others to that for prompts. FlashInfer
plans on the host: once a step, for all layers of one form, the lengths are copied there, which waits for the device, so
the host prepares no step while another one runs, and no step is captured as a graph. Nothing has run on a card yet;
tests hold what the wrappers are given against the reference.
"""

import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.core.optional_package import needs_library
from quire.kernels.paged_attention import AttentionBackEnd, AttentionMetadata, AttentionSpec

WORKSPACE_BYTES = 128 << 20  # as FlashInfer's documentation has it, for what parts of long contexts leave
LAYOUT = "NHD"               # [page, token, head, dimension]: `cache_layout.PLAIN`
DTYPES, HEAD_DIMS = (torch.float16, torch.bfloat16), (64, 128, 256)
COMPILED_KERNELS = "flashinfer_jit_cache"  # a package of kernels that FlashInfer need not compile
MAX_GROUP_OF_VECTORS = 2     # query heads per key-value head; more are faster on matrix units


class Pages(NamedTuple):
    """A step's sequences in FlashInfer's form: the blocks of all of them end to end. int32."""

    query_starts: Tensor   # [num_seqs + 1], on the host
    indptr: Tensor         # [num_seqs + 1], on the host: where each sequence's blocks begin in `indices`
    indices: Tensor        # [indptr[-1]], on the device: blocks
    last_page_len: Tensor  # [num_seqs], on the host: tokens of the context in the last block, 1 to block_size


def pages_of(metadata: AttentionMetadata, window: int | None = None) -> Pages:
    """Return the blocks of a step's sequences.

    Entries of the table that no query sees, behind a window, may hold anything; they are replaced by the first block
    that one sees, for FlashInfer may load it. A context of 0 is no sequence: block 0 takes the place of its blocks.
    """
    starts, lens, device = metadata.query_starts.cpu(), metadata.context_lens.cpu(), metadata.block_tables.device
    counts, is_there = starts.diff(), lens > 0
    lens = torch.where(is_there, lens, counts.clamp(min=1))
    num_pages = (lens + metadata.block_size - 1) // metadata.block_size
    indptr = torch.cat([starts.new_zeros(1), num_pages.cumsum(0)]).int()
    rows = torch.repeat_interleave(torch.arange(len(lens)), num_pages)
    columns = torch.arange(len(rows)) - indptr[rows]
    if window is not None:
        first = (lens - counts - window + 1).clamp(min=0) // metadata.block_size
        columns = columns.maximum(first[rows])
    columns = torch.where(is_there[rows], columns, 0)
    indices = metadata.block_tables[rows.to(device), columns.to(device)]
    if not is_there.all():
        indices = torch.where(is_there[rows].to(device), indices, 0)
    return Pages(starts, indptr, indices, ((lens - 1) % metadata.block_size + 1).int())


class FlashInferAttention:
    """The op. `flashinfer` is the package."""

    def __init__(self, flashinfer: Any) -> None:  # noqa: ANN401 (a module without types)
        self._flashinfer = flashinfer
        self._wrappers = dict[tuple[bool, AttentionSpec], Any]()  # decodes or not, layer; each keeps its last plan
        self._workspace: Tensor | None = None

    def __call__(
        self, spec: AttentionSpec, query: Tensor, key_cache: Tensor, value_cache: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        """Attend as `paged_attention.reference` does; caches in the plain layout. A context of 0 gives anything."""
        is_decode = len(query) == len(metadata.context_lens)
        key = "flashinfer", is_decode, spec
        if key not in metadata.plans:
            metadata.plans[key] = self._plan(spec, metadata, query, is_decode=is_decode)
        out: Tensor = metadata.plans[key].run(query.contiguous(), (key_cache, value_cache))
        return out

    def _plan(
        self, spec: AttentionSpec, metadata: AttentionMetadata, query: Tensor, *, is_decode: bool
    ) -> Any:  # noqa: ANN401 (a wrapper)
        """Return the wrapper of equal layers, with the plan of this step."""
        if (is_decode, spec) not in self._wrappers:
            self._wrappers[is_decode, spec] = self._wrapper(spec, query.device, is_decode=is_decode)
        key = "flashinfer pages", spec.window
        if key not in metadata.plans:
            metadata.plans[key] = pages_of(metadata, spec.window)
        wrapper, pages = self._wrappers[is_decode, spec], metadata.plans[key]
        how: dict[str, Any] = {
            "sm_scale": spec.scale, "window_left": -1 if spec.window is None else spec.window - 1,
            "logits_soft_cap": spec.softcap or None, "q_data_type": query.dtype, "kv_data_type": query.dtype,
        }  # fmt: skip
        sequences, sizes = (pages.indptr, pages.indices, pages.last_page_len), (*spec.heads, metadata.block_size)
        if is_decode:
            wrapper.plan(*sequences, *sizes, **how)
        else:
            wrapper.plan(pages.query_starts, *sequences, *sizes, causal=True, **how)
        return wrapper

    def _wrapper(self, spec: AttentionSpec, device: torch.device, *, is_decode: bool) -> Any:  # noqa: ANN401
        if self._workspace is None:
            self._workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        if not is_decode:
            return self._flashinfer.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
        on_matrix_units = spec.heads.num_heads > MAX_GROUP_OF_VECTORS * spec.heads.num_kv_heads
        return self._flashinfer.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=on_matrix_units
        )


def _make(_: Callable[..., Tensor]) -> FlashInferAttention:
    """Return the op. ConfigError if the package is missing, or has neither compiled kernels nor what compiles them."""
    try:
        with needs_library("attention_backend flashinfer", "flashinfer", "flashinfer-python"):
            import flashinfer  # type: ignore[import-not-found]  # noqa: PLC0415 (an optional library)
    except RuntimeError as error:  # versions of its packages that differ
        raise ConfigError(f"attention_backend flashinfer: {error}") from error
    if find_spec(COMPILED_KERNELS) is None and (missing := [name for name in ("nvcc", "ninja") if not _has(name)]):
        raise ConfigError(
            f"attention_backend flashinfer compiles its kernels when they first run, and there is no "
            f"{' and no '.join(missing)}; install {COMPILED_KERNELS.replace('_', '-')} of its version, or the CUDA "
            "toolkit and ninja"
        )
    return FlashInferAttention(flashinfer)


def _has(program: str) -> bool:
    """Return whether FlashInfer finds a program: in PATH, or where CUDA is installed."""
    folders = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    return any(shutil.which(program, path=place and f"{place}/bin") for place in (None, *filter(None, folders)))


FLASHINFER_ATTENTION = AttentionBackEnd(
    name="flashinfer",
    make=_make,
    serves=lambda dtype, head_dim: dtype in DTYPES and head_dim in HEAD_DIMS,
    shapes="float16 and bfloat16 heads of 64, 128 or 256",
    features=frozenset({"softcap on attention scores"}),
    is_capturable=False,
)
