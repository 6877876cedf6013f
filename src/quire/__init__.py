"""Quire: an inference and serving engine for large language models that treats the KV cache as paged memory.

Importing this package loads no engine: `LLM` is looked up on first use.
"""

from typing import TYPE_CHECKING, Any

from quire.core.garbage import collections_paused
from quire.core.lora import LoRARequest
from quire.core.outputs import (
    CompletionOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    KVStats,
    Logprob,
    PinnedPrefix,
    Preemption,
    RequestMetrics,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.core.pooling import PoolingParams
from quire.core.sampling_params import BeamSearchParams, RepetitionDetectionParams, SamplingParams, branch_seed
from quire.core.structured_outputs import GuidedDecodingParams, StructuredOutputsParams
from quire.core.version import __version__ as __version__

if TYPE_CHECKING:
    from quire.llm import LLM

__all__ = [
    "LLM",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "GuidedDecodingParams",
    "KVStats",
    "LoRARequest",
    "Logprob",
    "PinnedPrefix",
    "PoolingParams",
    "Preemption",
    "RepetitionDetectionParams",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
    "branch_seed",
]


def __dir__() -> list[str]:
    """Return the public names, also that which is loaded on first use."""
    return sorted([*__all__, "__version__"])


def __getattr__(name: str) -> Any:  # noqa: ANN401 (PEP 562 leaves no narrower type)
    """Load `LLM` when it is first asked for."""
    if name == "LLM":
        with collections_paused():  # among 100,000 objects the collector takes 40 ms of 340 to find no garbage
            from quire.llm import LLM  # noqa: PLC0415 (the point of this function)
        return LLM
    raise AttributeError(f"module 'quire' has no attribute {name!r}")
