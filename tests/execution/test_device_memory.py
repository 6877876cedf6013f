"""One transfer for a step's inputs."""

import torch

from quire.execution.device_memory import upload_step
from quire.model.batch import ForwardBatch


def test_tensors_arrive_as_they_were_whatever_their_sizes() -> None:
    forward = ForwardBatch(
        token_ids=torch.arange(5),
        positions=torch.arange(5) + 3,
        slot_mapping=torch.arange(10)[::2],
        query_starts=torch.arange(3, dtype=torch.int32),
        context_lens=torch.arange(2, dtype=torch.int32),
        block_tables=torch.arange(12, dtype=torch.int32).view(3, 4)[:2, :3],
    )
    logit_rows, sample_rows = torch.arange(3), torch.empty(0, dtype=torch.int64)
    arrived, *rows = upload_step(forward, logit_rows, sample_rows, torch.device("cpu"))
    pairs = list(zip([*forward.tensors, logit_rows, sample_rows], [*arrived.tensors, *rows], strict=True))
    assert all(there.dtype == here.dtype and torch.equal(there, here) for here, there in pairs)
    assert len({there.untyped_storage().data_ptr() for _, there in pairs}) == 1
