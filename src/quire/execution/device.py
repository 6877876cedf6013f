"""Device of a model: its memory, and the executor of steps there. The host here; a GPU in `execution/cuda`."""

import ctypes
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from quire.core.config import DEFAULT_MAX_NUM_BATCHED_TOKENS
from quire.core.host_limits import HOST_KV_SHARE, free_memory_bytes
from quire.execution.executor import Executor, LocalExecutor
from quire.execution.swapper import Swapper, allocate_swap_space
from quire.execution.worker import StepCompute, Worker
from quire.kernels.back_end import BackEnd
from quire.model.kv_cache import KVCache, KVGeometry
from quire.model.language_model import LanguageModel

if TYPE_CHECKING:
    from quire.kernels.triton.triton_low_rank import TritonSlots


class StepLimits(NamedTuple):
    """The largest step that an engine runs."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_positions: int   # most tokens of a sequence
    block_size: int      # tokens


class Device(Protocol):
    """Device of a model, as an engine uses it. It exists before the model is loaded."""

    @property
    def tensor_device(self) -> Any:  # noqa: ANN401 ("cpu", or a torch.device)
        """Device on which tensors are made: "cpu", or a torch.device."""

    @property
    def kv_share(self) -> float:
        """Share of `kv_bytes` that the KV cache takes by default."""

    @property
    def default_batched_tokens(self) -> int:
        """Tokens in one step where no setting names them."""

    def free_bytes(self) -> int:
        """Return the bytes that can be allocated now."""

    def kv_bytes(self, model: LanguageModel, limits: StepLimits, slots: "TritonSlots | None") -> int:
        """Return the bytes that are left for the KV cache beside a loaded model, slots of adapters and the steps.

        Raises ConfigError if there are none.
        """

    def default_swap_bytes(self) -> int:
        """Return the bytes of the swap space where no setting names them."""

    def allocate_cache(
        self, geometry: KVGeometry, num_blocks: int, block_size: int, back_end: BackEnd, num_slots: int = 0
    ) -> KVCache:
        """Return a cache of zeros, as `KVCache.allocate` does."""

    def swapper(
        self, cache: KVCache, geometry: KVGeometry, num_blocks: int, back_end: BackEnd, directory: str | None,
        num_slots: int = 0,
    ) -> Swapper:  # fmt: skip
        """Allocate a swap space of `num_blocks` blocks, and of `num_slots` slots for states.

        It is in files of `directory` where it is not in memory.
        Raises ConfigError if there is too little memory, or too little room in the directory.
        """

    def executor(self, compute: StepCompute, max_num_batched_tokens: int) -> Executor:
        """Return the executor over a worker of this computation, ready for steps of so many tokens."""

    def release(self) -> None:
        """Return unreferenced memory to the system."""


def _trim_heap() -> None:
    """Return free pages of glibc's heap to the system; other C libraries return them by themselves."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class HostDevice:
    """The CPUs of this machine: a step runs when its result is collected."""

    tensor_device, kv_share, default_batched_tokens = "cpu", HOST_KV_SHARE, DEFAULT_MAX_NUM_BATCHED_TOKENS

    def free_bytes(self) -> int:
        """Return the memory that can be allocated without swapping."""
        return free_memory_bytes()

    def kv_bytes(self, model: LanguageModel, limits: StepLimits, slots: "TritonSlots | None") -> int:
        """Return the free memory: `HOST_KV_SHARE` leaves enough for steps."""
        return free_memory_bytes()

    def default_swap_bytes(self) -> int:
        """Return 0: files are written only where a setting asks for them."""
        return 0

    def allocate_cache(
        self, geometry: KVGeometry, num_blocks: int, block_size: int, back_end: BackEnd, num_slots: int = 0
    ) -> KVCache:
        """Return a cache that takes memory only where something has been written."""
        return KVCache.allocate(geometry, num_blocks, block_size, back_end, num_slots=num_slots)

    def swapper(
        self, cache: KVCache, geometry: KVGeometry, num_blocks: int, back_end: BackEnd, directory: str | None,
        num_slots: int = 0,
    ) -> Swapper:  # fmt: skip
        """Allocate the swap space in an unlinked file of `directory`; None is the system's for temporary files."""
        space = allocate_swap_space(geometry, num_blocks, cache.block_size, back_end, directory, num_slots)
        return Swapper(cache, space, back_end.copy_blocks)

    def executor(self, compute: StepCompute, max_num_batched_tokens: int) -> Executor:
        """Return an executor of one step at a time."""
        return LocalExecutor(Worker(compute))

    def release(self) -> None:
        """Return free memory of the C library's heap; that of tensors is returned when the last one is freed."""
        _trim_heap()
