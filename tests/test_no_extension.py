"""What a machine with a GPU runs without the C++ extension: from the sources, with a torch of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from support.imitated_ranks import Case, run_imitated
from support.random_model import write_random_model

TESTS = Path(__file__).parent
MISSING = """
import sys

class Without:
    def __init__(self, finder):
        self._finder = finder

    def find_spec(self, name, *where):
        return None if name == "quire.extension._kernels" else self._finder.find_spec(name, *where)

    def __getattr__(self, name):
        return getattr(self._finder, name)

sys.meta_path[:] = map(Without, sys.meta_path)
"""


@pytest.fixture
def without_extension(tmp_path: Path) -> Path:
    """A folder for PYTHONPATH, with which processes find no extension."""
    (tmp_path / "sitecustomize.py").write_text(MISSING)
    return tmp_path


def test_tests_of_a_gpu_are_collected(without_extension: Path) -> None:
    """One file that cannot be imported would keep pytest from running any."""
    names = "engine/test_cuda.py", "engine/test_exactness.py", "e2e", "kernels/triton", "execution/cuda"
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *names]
    environment = os.environ | {"PYTHONPATH": str(without_extension)}
    result = subprocess.run(command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr


def test_ranks_on_gpus_answer(without_extension: Path, tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="Triton is not installed")
    model, prompt, params = write_random_model(tmp_path), [3, 5, 7], {"temperature": 0.0, "max_tokens": 4}
    settings = {"tensor_parallel_size": 2, "dtype": "float32", "num_kv_blocks": 40}
    (found,) = run_imitated([Case(str(model), settings, [prompt], params)], [without_extension])
    with LLM(model, device="cpu", dtype="float32") as llm:
        (expected,) = llm.generate([prompt], SamplingParams(**params), use_tqdm=False)
    assert found.token_ids == [[expected.outputs[0].token_ids]]
