"""The optional inspection: its routes answer 404 without its package, and the others answer as before."""

import json
import subprocess
import sys
from pathlib import Path

ROOM = "quire.server.watch"
SCRIPT = """
import importlib.abc, json, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == {room!r} or name.startswith({room!r} + "."):
            raise ModuleNotFoundError(f"no module {{name}}", name=name)

sys.meta_path.insert(0, Block())
from pathlib import Path
from quire.engine.options import EngineOptions
from support.openai_server import openai_server

engine = EngineOptions(model={model!r}, max_num_seqs=4, max_model_len=256, num_kv_blocks=64)
with openai_server(engine, enable_debug=True) as server:
    body = {{"prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}}
    completion = server.http.post("/v1/completions", json=body)
    stream = server.http.post("/v1/completions", json=body | {{"stream": True}})
    chat = server.http.post("/v1/chat/completions", json={{"messages": [{{"role": "user", "content": "hi"}}]}})
    paths = (f"/v1/requests/{{completion.json()['id']}}/explain", "/debug/kv", "/debug/blocks")
    statuses = [server.http.get(path).status_code for path in paths]
    loaded = [name for name in sys.modules if name.startswith({room!r})]
print(json.dumps([
    completion.status_code, completion.json()["usage"]["completion_tokens"], stream.text.endswith("data: [DONE]\\n\\n"),
    chat.status_code, statuses, loaded,
]))
"""


def test_server_serves_without_the_inspection(demo_model: Path) -> None:
    script = SCRIPT.format(room=ROOM, model=str(demo_model))
    tests = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300, check=False,
        env={"PYTHONPATH": tests, "OMP_NUM_THREADS": "1", "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [200, 4, True, 200, [404, 404, 404], []]
