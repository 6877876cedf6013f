"""Interface of what an `LLM` computes with: an engine in its own process, or several in processes of their own."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from quire.core.lora import Adapter
from quire.core.outputs import KVStats, RequestOutput
from quire.core.structured_outputs import StructuredOutputsParams
from quire.engine.input_processor import InputProcessor, PreparedRequest
from quire.engine.messages import Ready
from quire.engine.output_processor import OutputKind
from quire.engine.pinned_prefixes import PinnedPrefixes
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")


class OfflineEngine(ABC):
    """Computes the requests that an `LLM` has prepared and numbered, while the caller waits. Not for several threads.

    After `close` every method raises RuntimeError.
    """

    tokenizer: Tokenizer | None
    ready: Ready
    pinned: PinnedPrefixes

    @property
    @abstractmethod
    def inputs(self) -> InputProcessor:
        """The input processor, with the current limits."""

    @abstractmethod
    def run(self, requests: Sequence[PreparedRequest], kind: OutputKind) -> Iterator[RequestOutput]:
        """Queue requests at the first `next`; yield their outputs until all have ended. On exit they have ended."""

    @abstractmethod
    def check_grammar(self, params: StructuredOutputsParams) -> None:
        """Raise InvalidRequestError for a grammar that cannot be compiled."""

    @abstractmethod
    def read_adapter(self, folder: str) -> Adapter:
        """Read the LoRA adapter of a folder. ModelError with the reason if it cannot be used."""

    @abstractmethod
    def unpin(self, request_id: int) -> None:
        """Release what a request has pinned; its blocks are free on return."""

    @abstractmethod
    def kv_stats(self) -> KVStats:
        """Return the state of the KV cache between two steps; of several engines the sum."""

    @abstractmethod
    def observe(self, read: Callable[[], T]) -> T:
        """Return what `read` makes of the engines' observers, which have their current state."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory, and end all requests. Idempotent."""
