"""The examples of docs/embeddings.md run."""

import json
import re
from pathlib import Path

from support.server import running_server

PAGE = (Path(__file__).parents[2] / "docs/embeddings.md").read_text(encoding="utf-8")


def run(example: str) -> None:
    exec(compile(example, "docs/embeddings.md", "exec"), {})


def test_examples_run(demo_model: Path) -> None:
    offline, client = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)
    run(offline.replace("LLM(", "LLM(max_model_len=256, "))
    ((path, body),) = re.findall(r"curl http://127.0.0.1:8000(\S+) .*?-d '(.*?)'", PAGE, flags=re.DOTALL)
    with running_server(str(demo_model), "--runner", "pooling", "--served-model-name", "quire-demo") as server:
        run(client.replace("http://127.0.0.1:8000", server.url))
        assert len(server.post(path, json.loads(body)).json()["results"]) == 1
