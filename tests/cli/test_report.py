"""`quire report` writes what a bug's report needs, with and without a server, and no secret."""

import json
from pathlib import Path

import pytest

from quire.engine.options import EngineOptions
from support.command_line import Run
from support.nodes import free_port
from support.openai_server import openai_server


def test_report_has_the_machine_and_the_server(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_API_KEY", "mine")
    monkeypatch.setenv("QUIRE_MAX_NUM_SEQS", "7")
    with openai_server(EngineOptions(num_kv_blocks=64), api_key=("mine",), enable_debug=True) as server:
        ran = run("report", "--url", server.url, "-o", str(tmp_path / "bug.json"))
    assert (ran.code, ran.err) == (0, "")
    assert "bug.json" in ran.out
    text = (tmp_path / "bug.json").read_text()
    found = json.loads(text)
    assert "mine" not in text
    assert found["environment"] == {"QUIRE_API_KEY": "(not shown)", "QUIRE_MAX_NUM_SEQS": "7"} | {
        name: value for name, value in found["environment"].items() if not name.startswith("QUIRE_")
    }
    assert found["packages"]["numpy"]
    assert found["instruction_sets"]
    assert found["server"]["status"]["num_blocks"] == 64
    assert found["server"]["debug/top"]["engines"][0]["is_alive"]
    assert any(line.startswith("vllm:num_requests_running") for line in found["server"]["metrics"])


def test_report_without_a_server_says_so(run: Run, tmp_path: Path) -> None:
    ran = run("report", "--url", f"http://127.0.0.1:{free_port()}", "-o", str(tmp_path / "bug.json"))
    assert (ran.code, ran.err) == (0, "")
    found = json.loads((tmp_path / "bug.json").read_text())
    assert "refused" in found["server"]["status"]["missing"]
    assert run("report", "--url", "nowhere").code == 1
