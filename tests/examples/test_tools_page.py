"""The examples of docs/tools.md run."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.server import ServerProcess, running_server

PAGE = (Path(__file__).parents[2] / "docs/tools.md").read_text(encoding="utf-8")
EXAMPLES = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def server(demo_model: Path) -> Iterator[ServerProcess]:
    with running_server("--max-model-len", "1024") as running:
        yield running


def test_examples_run(server: ServerProcess, capsys: pytest.CaptureFixture[str]) -> None:
    values: dict[str, Any] = {}
    printed = []
    for example in EXAMPLES:
        exec(compile(example.replace("http://127.0.0.1:8000", server.url), "docs/tools.md", "exec"), values)
        printed.append(capsys.readouterr().out)
    values["client"].close()
    called, streamed, offline = printed
    assert called.startswith("tool_calls get_weather {'city': ")
    assert streamed.startswith("0 get_weather")
    assert offline.startswith("True ")
