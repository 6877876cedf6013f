"""A kernel that runs out of memory fails its step and nothing else."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from quire import LLM, SamplingParams
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from support.random_model import write_random_model
from support.threads import set_num_threads

_kernels = pytest.importorskip("quire.extension._kernels", reason="the C++ kernels were not built")
GREEDY = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)


@pytest.mark.parametrize("in_helper", [False, True], ids=["in the calling thread", "in a helper"])
def test_exception_in_a_thread_of_the_kernels_fails_one_step(
    in_helper: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_threads = torch.get_num_threads()
    with LLM(write_random_model(tmp_path), num_kv_blocks=16, device="cpu") as llm:
        before = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
        with monkeypatch.context() as patch:

            def run_out_of_memory(model: Decoder, batch: ForwardBatch, cache: KVCache) -> Tensor:
                patch.undo()
                set_num_threads(3)
                _kernels.fail_in_chunk(64, 5, in_helper)
                raise AssertionError("the exception was lost")

            patch.setattr(Decoder, "forward", run_out_of_memory)
            try:
                with pytest.raises(MemoryError, match="bad_alloc"):
                    llm.generate([[4, 5, 6]], GREEDY, use_tqdm=False)
            finally:
                set_num_threads(num_threads)
        assert llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids == before
