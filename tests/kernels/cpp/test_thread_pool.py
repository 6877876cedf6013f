"""The thread pool of the C++ kernels after an exception: the job ends, the caller gets it, the next job runs."""

import pytest
import torch

from quire.extension import _kernels
from quire.kernels.linear_weight import LinearWeight

dense = LinearWeight.dense

NUM_CHUNKS = 64


@pytest.mark.parametrize("num_threads", [1, 2, 4], indirect=True)
@pytest.mark.parametrize("failing", [0, 5, NUM_CHUNKS - 8])
def test_exception_in_the_calling_thread_leaves_the_pool_usable(failing: int, num_threads: int) -> None:
    for _ in range(20):
        with pytest.raises(MemoryError):
            _kernels.fail_in_chunk(NUM_CHUNKS, failing, False)
        assert _kernels.fail_in_chunk(NUM_CHUNKS, -1, False) == NUM_CHUNKS


@pytest.mark.parametrize("num_threads", [2, 4], indirect=True)
@pytest.mark.parametrize("failing", [0, 5, NUM_CHUNKS - 8])
def test_exception_in_a_helper_reaches_the_caller(failing: int, num_threads: int) -> None:
    for _ in range(20):
        with pytest.raises(MemoryError):
            _kernels.fail_in_chunk(NUM_CHUNKS, failing, True)
        assert _kernels.fail_in_chunk(NUM_CHUNKS, -1, False) == NUM_CHUNKS


@pytest.mark.parametrize("num_threads", [3], indirect=True)
def test_kernels_compute_the_same_after_an_exception(num_threads: int) -> None:
    from support.cpp_kernels import CppLinear

    layer, x = CppLinear(dense(torch.randn(700, 256))), torch.randn(70, 256)
    before = layer(x)
    for in_helper in (False, True):
        with pytest.raises(MemoryError):
            _kernels.fail_in_chunk(NUM_CHUNKS, 3, in_helper)
        assert torch.equal(layer(x), before)
