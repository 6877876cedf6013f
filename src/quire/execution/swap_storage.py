"""Storage of the swap space of a cache in host memory: a mapped file.

Such a cache cannot swap to host memory, which is what ran out. The file is unlinked as soon as it is open, so that no
crash leaves it behind, and its bytes are allocated at once: were the disk full later, writing to the mapping would kill
the process.
"""

import mmap
import os
import tempfile
from pathlib import Path

import torch
from torch import Tensor

from quire.core.errors import ConfigError
from quire.kernels.back_end import BackEnd
from quire.model.kv_cache import ALIGNMENT, KVCache
from quire.model.kv_geometry import KVGeometry


def allocate_swap_space(
    geometry: KVGeometry, num_blocks: int, block_size: int, back_end: BackEnd, directory: str | None
) -> KVCache:
    """Return tensors like the cache's for `num_blocks` blocks.

    `directory`: of the file; None is the system's directory for temporary files. Raises ConfigError if it is not
    writable or has too little room.
    """
    sizes = geometry.tensor_bytes(num_blocks * block_size)
    space = UnlinkedFile(Path(directory or tempfile.gettempdir()), sum(sizes) + len(sizes) * ALIGNMENT)
    return KVCache.allocate(geometry, num_blocks, block_size, back_end, space.allocate)


class UnlinkedFile:
    """An unlinked file as memory, allocated from its beginning. It is deleted with the last tensor in it."""

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
