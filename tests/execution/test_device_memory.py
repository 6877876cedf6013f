"""One transfer for a step's inputs."""

import torch

from quire.execution.device_memory import upload


def test_tensors_arrive_as_they_were_whatever_their_sizes() -> None:
    tensors = [
        torch.arange(5), torch.arange(3, dtype=torch.int32), torch.empty(0, dtype=torch.int32),
        torch.arange(12, dtype=torch.int32).view(3, 4)[:, :2], torch.tensor([1.5], dtype=torch.float64),
    ]  # fmt: skip
    arrived = upload(tensors, torch.device("cpu"), pins=False)
    assert all(x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(tensors, arrived, strict=True))
    assert len({x.untyped_storage().data_ptr() for x in arrived}) == 1
