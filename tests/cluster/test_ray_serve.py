"""Quire on a small Ray cluster, in processes of its own: what clients get, and that nothing is left behind."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from quire import LLM, SamplingParams
from support.nodes import free_port

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
TESTS = Path(__file__).parents[1]


def lines_of(mode: str) -> list[str]:
    port = next(port for port in iter(free_port, None) if port >= 20_000)   # workers of Ray have the lower ones
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1",
        "RAY_worker_niceness": "0",  # else 15: replicas that get no CPU on a busy machine, and runs that time out
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",  # else 5, of which the proxy's imports take most
    }  # fmt: skip
    run = subprocess.run(
        [sys.executable, TESTS / "ray_serve.py", mode, str(port)],
        env=os.environ | settings | {"PYTHONPATH": paths},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout.splitlines()


@pytest.mark.ray
def test_replica_of_two_ranks_has_their_cpus_and_answers_as_llm(demo_model: Path) -> None:
    lines = lines_of("ranks")
    with LLM(str(demo_model), max_model_len=1024) as llm:
        (expected,) = llm.generate("def area(", SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    (answer,) = [line.split()[1] for line in lines if line.startswith("ANSWER")]
    assert bytes.fromhex(answer).decode() == expected.outputs[0].text
    assert [line for line in lines if line.isupper() and not line.startswith("ANSWER")] == ["RANKS", "ENDED", "DONE"]


def test_model_is_deployed_answers_as_llm_and_gets_a_second_replica_under_load(demo_model: Path) -> None:
    lines = lines_of("small")
    with LLM(str(demo_model), max_model_len=1024) as llm:
        (expected,) = llm.generate("def area(", SamplingParams(max_tokens=8, temperature=0), use_tqdm=False)
    (answer,) = [line.split()[1] for line in lines if line.startswith("ANSWER")]
    assert bytes.fromhex(answer).decode() == expected.outputs[0].text
    assert [line for line in lines if line.isupper() and not line.startswith("ANSWER")] == ["SCALED UP", "DONE"]


@pytest.mark.ray
def test_replicas_grow_shrink_are_upgraded_and_die_under_load() -> None:
    ends = [line for line in lines_of("full") if line.isupper() and not line.startswith("ANSWER")]
    assert ends == ["SCALED UP", "SCALED DOWN", "UPGRADED", "KILLED", "DONE"]
