"""Tasks and scopes of requests: what is computed for a request, and what it may share.

A task is one record of a closed union. `beam_params` matches all kinds and ends in `assert_never`, so that the type
checker reports it when a kind is added; code that treats one kind apart tests for it with `isinstance`.
"""

from typing import NamedTuple, assert_never

import msgspec

from quire.core.beam_search_params import BeamSearchParams
from quire.core.pooling import Pool

MAX_PINNED_PREFIXES = 64  # prefixes that are still being computed count too


class Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """Sample n answers."""


class BeamTask(msgspec.Struct, tag="beam_search", array_like=True, frozen=True):
    """Search the best answers; the sequences of the request are beams."""

    params: BeamSearchParams


class PinTask(msgspec.Struct, tag="pin", array_like=True, frozen=True):
    """Compute the prompt and keep its blocks under the request's id; the output is ignored."""


Task = Generate | BeamTask | PinTask | Pool

GENERATE = Generate()


def beam_params(task: Task) -> BeamSearchParams | None:
    """Return the parameters of a beam search, None for other tasks."""
    match task:
        case BeamTask(params):
            return params
        case Generate() | PinTask() | Pool():
            return None
        case _:
            assert_never(task)


def pool_of(task: Task) -> Pool | None:
    """Return the pooling of a request for a vector, None for other tasks."""
    return task if isinstance(task, Pool) else None


class Scope(NamedTuple):
    """Limit of prefix sharing: requests of different scopes never share keys and values."""

    salt: str | None = None     # cache_salt of the client
    adapter: str | None = None  # digest of the adapter that changes keys and values; None: the model alone


NO_SCOPE = Scope()
