"""The number of threads that the kernels' tests run with, and the cases of them that `make test` leaves out."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from quire.extension.isas import usable_isas
from support.threads import set_num_threads

FOLDER = Path(__file__).parent
# Tests of kernels that multiply no bytes. The compiler makes the same instructions of their sources for avx512_vnni as
# for avx512, except in attention over caches of 8 bits.
WITHOUT_PRODUCTS_OF_BYTES = {
    "test_activation", "test_cpp_attention", "test_cpp_embedding", "test_cpp_kv_cache_write", "test_cpp_linear",
    "test_cpp_norm", "test_cpp_sampling", "test_cpp_short_conv", "test_delta_net", "test_expanded_linear",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave cases to `make matrix` that run the very instructions of another."""
    for item in items:
        if isinstance(item, pytest.Function) and item.path.is_relative_to(FOLDER) and repeats_instructions(item):
            item.add_marker("matrix")


def repeats_instructions(case: pytest.Function) -> bool:
    """Return whether a case for avx512_vnni runs what one for avx512 does. Where it is the best set, it is run."""
    is_vnni = hasattr(case, "callspec") and case.callspec.params.get("isa") == "avx512_vnni"
    return is_vnni and usable_isas()[0] != "avx512_vnni" and case.path.stem in WITHOUT_PRODUCTS_OF_BYTES


@pytest.fixture(autouse=True)
def num_threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Set torch's number of threads for the test, 1 where it is not parametrized, and put it back."""
    before = torch.get_num_threads()
    count = int(getattr(request, "param", 1))
    set_num_threads(count)
    yield count
    set_num_threads(before)
