"""One transfer for a step's inputs, as they are or padded to a graph."""

import numpy as np
import pytest
import torch

from quire.execution.batch import StepInputs
from quire.execution.cuda.graph_inputs import InputLayout, upload
from quire.kernels.low_rank import RowAdapters
from quire.kernels.sampling import SETTINGS
from quire.model.language_model import ForwardBatch

CPU = torch.device("cpu")


def step_of(counts: list[int], adapters: RowAdapters | None = None) -> StepInputs:
    """Return a step of made-up rows with so many tokens each; a sample for each, for the rows from 30 on."""
    num_rows, num_tokens = len(counts), sum(counts)
    ends = np.cumsum(counts)
    batch = ForwardBatch(
        token_ids=torch.arange(num_tokens) + 7,
        positions=torch.arange(num_tokens) + 3,
        slot_mapping=torch.arange(2 * num_tokens)[::2],
        query_starts=torch.tensor([0, *ends.tolist()], dtype=torch.int32),
        context_lens=torch.arange(num_rows, dtype=torch.int32) + 4,
        block_tables=torch.empty(num_rows, 0, dtype=torch.int32),
        adapters=adapters,
    )
    samples = np.arange(num_rows)
    return StepInputs(batch, samples + 20, samples, samples, samples + 30, samples, ends - 1, [], [])


@pytest.mark.parametrize("counts", [[1], [1, 1, 1], [5, 1, 3]], ids=str)
def test_step_of_its_own_size_arrives_as_it_was(counts: list[int]) -> None:
    step = step_of(counts)
    layout = InputLayout(len(counts), sum(counts))
    arrived = layout.inputs(layout.pack(step, None, 0, CPU), None)
    sent, there = [*step.forward.tensors, torch.from_numpy(step.rows)], [*arrived.forward.tensors, arrived.rows]
    pairs = list(zip(sent, there, strict=True))
    assert all(there.dtype == here.dtype and torch.equal(there, here) for here, there in pairs)
    assert arrived.draws is None
    assert len({tensor.untyped_storage().data_ptr() for tensor in there if tensor.numel()}) == 1


@pytest.mark.parametrize("num_tokens", [4, 16])
def test_step_is_padded_with_what_reads_and_writes_nothing(num_tokens: int) -> None:
    """In a graph of decodes each row has a token, in others those without a sequence have none."""
    of_row = torch.tensor([1, 0, 5], dtype=torch.int32)
    step = step_of([1, 1, 1], RowAdapters((), of_row, None))
    layout = InputLayout(4, num_tokens, has_adapters=True, draws=True)
    settings = np.arange(12.0)
    batch, rows, draws = layout.inputs(layout.pack(step, settings.view(SETTINGS), 99, CPU), step.forward.adapters)
    assert batch.token_ids.tolist() == [7, 8, 9, *[0] * (num_tokens - 3)]
    assert batch.slot_mapping.tolist() == [0, 2, 4, *[-1] * (num_tokens - 3)]
    assert batch.query_starts.tolist() == [0, 1, 2, 3, 4 if num_tokens == 4 else 3]
    assert batch.context_lens.tolist() == [4, 5, 6, 0]
    assert rows.tolist() == [20, 21, 22, 0]
    assert batch.adapters is not None
    assert batch.adapters.of_row.tolist() == [1, 0, 5, *[-1] * (num_tokens - 3)]
    assert draws is not None
    assert draws.settings[:3].flatten().tolist() == settings.tolist()
    [[idle]] = draws.settings[3:].numpy().view(SETTINGS)
    assert (idle["temperatures"], idle["top_ks"], idle["top_ps"]) == (0, 1, 1), "the highest logit"
    assert draws.rows.tolist() == [30, 31, 32, 99]
    assert draws.logit_rows.tolist() == [0, 1, 2, 0]


def test_arrays_share_a_transfer_whatever_their_sizes() -> None:
    arrays = [np.arange(3), np.empty(0, np.int64), np.arange(5, dtype=np.int32), np.arange(10)[::2]]
    arrived = upload(arrays, CPU)
    assert [there.tolist() for there in arrived] == [here.tolist() for here in arrays]
    assert [there.dtype for there in arrived] == [torch.from_numpy(here).dtype for here in arrays]
    assert len({there.untyped_storage().data_ptr() for there in arrived if len(there)}) == 1
