"""Where the swap space is kept.

A cache on a GPU swaps to host memory. One in host memory swaps to a file, mapped into memory: what has no room in one
kind of memory would have none beside it either. The file loses its name as soon as it is open, so that nothing is left
behind whatever happens. Its bytes are really taken: were the disk full later, writing to the mapping would kill the
process.
"""

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.execution.device_memory import PinnedMemory
from quire.kernels.back_end import BackEnd
from quire.model.footprint import kv_bytes_per_token
from quire.model.kv_cache import ALIGNMENT, KVCache
from quire.model.spec import DecoderSpec

HOST = torch.device("cpu")


def allocate_swap_space(
    spec: DecoderSpec,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    back_end: BackEnd,
    directory: str | None,
    device: torch.device = HOST,
) -> KVCache:
    """Return tensors like the cache's for `num_blocks` blocks, in the kind of memory that suits where the cache is.

    The one place that chooses: pinned memory of the host for a GPU, a file for the host. `directory`: for the file;
    None is the system's directory for temporary files. Raises ConfigError where it cannot be written to or has too
    little room.
    """
    if device.type == "cuda":
        memory = PinnedMemory(2 * spec.num_layers)
        return KVCache.allocate(spec, num_blocks, block_size, dtype, back_end, memory.allocate)
    block_bytes = block_size * kv_bytes_per_token(spec, back_end.cache_layout.dtype(dtype).itemsize)
    num_bytes = num_blocks * block_bytes + 2 * spec.num_layers * ALIGNMENT
    space = UnlinkedFile(Path(directory or tempfile.gettempdir()), num_bytes)
    return KVCache.allocate(spec, num_blocks, block_size, dtype, back_end, space.allocate)


class UnlinkedFile:
    """A file without a name, as memory that is handed out from its beginning. It goes with the last tensor in it."""

    def __init__(self, directory: Path, num_bytes: int) -> None:
        self._memory = torch.frombuffer(_mapped_file(directory, num_bytes), dtype=torch.uint8)
        self._num_used = 0

    def allocate(self, num_bytes: int) -> Tensor:
        """Return the next so many bytes, aligned, uint8 [num_bytes]."""
        start = self._num_used + -self._num_used % ALIGNMENT
        self._num_used = start + num_bytes
        return self._memory[start : self._num_used]


def _mapped_file(directory: Path, num_bytes: int) -> mmap.mmap:
    try:
        with tempfile.TemporaryFile(prefix="quire-swap-", dir=directory) as file:
            disk = os.fstatvfs(file.fileno())
            free_bytes = disk.f_bavail * disk.f_frsize
            if num_bytes <= free_bytes:
                os.posix_fallocate(file.fileno(), 0, num_bytes)
                return mmap.mmap(file.fileno(), num_bytes)
    except OSError as error:
        raise ConfigError(f"swap_dir {str(directory)!r} cannot take a file of {num_bytes} bytes: {error}") from error
    raise ConfigError(
        f"the swap space takes {num_bytes} bytes, but only {free_bytes} are free in swap_dir {str(directory)!r}; lower "
        "swap_space or num_swap_blocks, or choose another swap_dir"
    )
