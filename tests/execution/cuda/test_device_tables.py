"""Block tables on the device: those of the host after every plan, and no table of a step is sent."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import Tensor

from quire import LLM, BeamSearchParams, SamplingParams
from quire.core.plan import StepPlan
from quire.execution.batch import StepInputs
from quire.execution.cuda.cuda_graphs import Graph
from quire.execution.cuda.cuda_worker import CudaWorker
from quire.model.language_model import ForwardBatch
from support.random_model import write_random_model
from support.steps_in_flight import executor_in_flight


def test_rows_of_every_step_are_those_of_the_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts in chunks, forks, beams and preemptions, in rows that get new owners."""
    num_checked, upload_inputs = 0, CudaWorker._upload

    def checking(
        self: CudaWorker, plan: StepPlan, inputs: StepInputs, settings: NDArray[np.void] | None = None
    ) -> tuple[ForwardBatch, list[Tensor], Graph | None]:
        nonlocal num_checked
        found = upload_inputs(self, plan, inputs, settings)
        tables, num_blocks = self.compute.batch.block_tables, -(-inputs.stops // self.compute.batch.block_size)
        for own, row, count in zip(found[0].block_tables.tolist(), inputs.rows, num_blocks, strict=True):
            assert own[:count] == tables[row, :count].tolist()
        assert inputs.forward.block_tables.nbytes == 0, "a table was gathered on the host"
        num_checked += 1
        return found

    monkeypatch.setattr(CudaWorker, "_upload", checking)
    monkeypatch.setattr("quire.execution.device.HostDevice.executor", executor_in_flight)
    prompts = [[(7 * i + seed) % 290 for i in range(length)] for seed, length in enumerate((40, 3, 33, 17))]
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=50, n=2, ignore_eos=True)
    settings = {"num_kv_blocks": 10, "num_swap_blocks": 6, "max_num_batched_tokens": 16, "max_num_seqs": 5}
    model = write_random_model(tmp_path)
    with LLM(model, **settings) as llm:  # type: ignore[arg-type]
        found = llm.generate(prompts, params, use_tqdm=False)
        llm.beam_search(prompts[:2], BeamSearchParams(beam_width=3, max_tokens=8))
        assert sum(llm.kv_stats().preemptions.values())
    assert num_checked > 50
    monkeypatch.undo()
    with LLM(model, **settings) as llm:  # type: ignore[arg-type]
        expected = llm.generate(prompts, params, use_tqdm=False)
    assert [each.outputs for each in found] == [each.outputs for each in expected]
