"""The number of threads that the kernels' tests run with."""

from collections.abc import Iterator

import pytest
import torch

from support.threads import set_num_threads


@pytest.fixture(autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set torch's number of threads for the test, 1 where it is not parametrized, and put it back."""
    before = torch.get_num_threads()
    count = int(getattr(request, "param", 1))
    set_num_threads(count)
    yield count
    set_num_threads(before)
