"""The examples of docs/structured-output.md run."""

import json
import re
from pathlib import Path

import pytest

from support.server import running_server

PAGE = (Path(__file__).parents[2] / "docs/structured-output.md").read_text(encoding="utf-8")


def test_example_in_python_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)
    exec(compile(example.replace("LLM()", "LLM(max_model_len=256)"), "docs/structured-output.md", "exec"), {})
    assert re.fullmatch(r"\d{3}-\d{4}\n", capsys.readouterr().out)


def test_example_over_http_runs(demo_model: Path) -> None:
    (body,) = re.findall(r"chat/completions .*? -d '(.*?)'", PAGE, flags=re.DOTALL)
    with running_server(str(demo_model), "--max-model-len", "512") as server:
        (choice,) = server.post("/v1/chat/completions", json.loads(body)).json()["choices"]
    assert choice["message"]["content"] in ("yes", "no")
