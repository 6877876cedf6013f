"""What `pytest --device cuda` runs, on a GPU that is imitated: some settings of it, in a process of their own."""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
SOME = (
    "test_forks.py::test_prompt_blocks_count_once_and_tails_are_copied[inside a block]",
    "test_prefix_caching.py::test_prompt_logprobs_of_a_cached_prompt_are_all_there[stories260k-float32]",
    "test_prefix_caching.py::test_salts_share_nothing_and_change_nothing[stories260k-bfloat16]",
    "test_covering_table.py::test_swapped_beams_keep_their_bits",
    "test_covering_table.py::test_grammars_keep_their_bits[forced]",
    *(f"../engine/test_cuda.py::test_graph_that_cannot_be_captured_is_the_only_one_and_changes_no_answer[{fault}]"
      for fault in range(1, 5)),
)  # fmt: skip


def test_answers_keep_to_the_margin_on_an_imitated_gpu(stories260k: Path) -> None:
    nodes = [str(Path(__file__).parent / name) for name in SOME]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--device", "imitated", *nodes]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "." * len(SOME) in result.stdout, result.stdout
