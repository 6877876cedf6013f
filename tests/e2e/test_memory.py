"""The paper's measure of waste: how many slots of the blocks in use hold a token, over real request lengths."""

from pathlib import Path

import pytest

from quire import LLM
from quire_lab.bench.passes import watched_pass
from quire_lab.sim.datasets import DATA_FOLDER
from quire_lab.sim.workloads import length_workload

LENGTHS = DATA_FOLDER / "sharegpt_sample_turns.csv.gz"
BLOCK_SIZE = 16


@pytest.mark.timeout(900)
def test_real_lengths_waste_less_than_a_block_per_sequence(demo_model: Path) -> None:
    """A few short requests here; `quire bench throughput` prints the same figures for any number of them."""
    workload = length_workload(LENGTHS, num_prompts=16, max_total_len=300, vocab_size=4000, seed=0)
    with LLM(str(demo_model), block_size=BLOCK_SIZE) as llm:
        use = watched_pass(llm, workload)
        assert use["peak_waste_slots_per_sequence"] < BLOCK_SIZE
        assert 0 < use["mean_tail_waste_ratio"] < BLOCK_SIZE / 2 / 50, "half a block of sequences of 50 tokens and more"
        assert llm.kv_stats().used_blocks == 0
