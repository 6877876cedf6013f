"""Tasks and scopes: a closed union, and limits of prefix sharing."""

from itertools import product

import pytest

from quire.core.config import CacheConfig
from quire.core.pooling import BeamTask, Generate, PinTask, Scope, Task, beam_params
from quire.core.sampling_params import BeamSearchParams
from quire.scheduling.scheduler import make_cache

SCOPES = [Scope(salt, adapter) for salt, adapter in product((None, "a", "b"), repeat=2)]


@pytest.mark.parametrize("task", [Generate(), PinTask()])
def test_only_a_beam_search_has_its_parameters(task: Task) -> None:
    assert beam_params(task) is None
    assert beam_params(BeamTask(BeamSearchParams(2, 3))) == BeamSearchParams(2, 3)


@pytest.mark.parametrize("own", SCOPES)
def test_equal_tokens_of_different_salts_or_adapters_never_share(own: Scope) -> None:
    cache, tokens = make_cache(CacheConfig(16, 4)), list(range(8))
    cache.create(0, tokens, own)
    cache.append(0, 8)
    cache.end_step()
    found = {scope: cache.match(tokens, 8, scope).blocks for scope in SCOPES}
    assert found.pop(own) == cache.block_ids(0)
    assert not any(found.values())
