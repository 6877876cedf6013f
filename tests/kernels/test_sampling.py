"""Foundation of plain token sampling: PyTorch's sums of one row, in an order that its length alone decides."""

import numpy as np
import pytest
import torch

from support.threads import set_num_threads


@pytest.mark.parametrize("vocab_size", [5, 37, 512, 4096, 4099, 32_003, 151_936])
def test_threads_change_no_bit_of_a_row(vocab_size: int) -> None:
    row = torch.from_numpy(np.random.default_rng(0).normal(0, 5, vocab_size).astype(np.float32))
    for operation in (torch.softmax, torch.log_softmax, lambda row, dim: row.double().cumsum(dim)):
        outcomes = []
        for num_threads in (1, 2):
            set_num_threads(num_threads)
            outcomes.append(operation(row, 0))
        assert torch.equal(*outcomes)


def test_torch_sums_one_after_the_other() -> None:
    numbers = np.random.default_rng(0).random(5000).astype(np.float32)
    assert (torch.from_numpy(numbers).double().cumsum(0).numpy() == np.cumsum(numbers.astype(np.float64))).all()
