"""Faults of the machine that a server survives: files, pipes, clocks, processes."""

import ast
import os
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from support.server import ANSWER_LIMIT_S, ServerProcess, running_server, wait_until

SOURCES = Path(__file__).parents[2] / "src"
SMALL = ("--num-kv-blocks", "512")
BODY = {"prompt": "def area(", "max_tokens": 5, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
# The only places that may ask what time of day it is: what clients, logs and readers are told, names of files, and
# templates.
WALL_CLOCKS = {
    *("engine/requests/pinned_prefixes.py", "engine/metrics/engine_metrics.py", "server/service.py"),
    *("server/http/application.py", "server/apis/completions/completion_routes.py"),
    *("server/apis/messages/messages_routes.py", "server/apis/responses/responses_routes.py"),
    *("server/apis/responses/responses_builder.py", "server/apis/embeddings/embedding_routes.py"),
    *("server/adapter_names.py", "server/pages/page_routes.py", "cli/top/reading.py"),
    *("server/models/models_app.py", "server/models/ollama.py", "server/models/ollama_forms.py"),
    *("server/apis/profile_routes.py", "engine/recording/recorder.py", "engine/event_publisher.py"),
    *("engine/requests/saved_sessions.py", "server/api/sessions.py"),
    "engine/recording/fault_files.py",
}


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the server's temporary files alone."""
    return tmp_path_factory.mktemp("temporary")


@pytest.fixture(scope="module")
def server(demo_model: Path, temporary: Path) -> Iterator[ServerProcess]:
    with running_server(*SMALL, "--swap-space", "1MiB", env={"TMPDIR": str(temporary)}) as running:
        yield running


def text_of(server: ServerProcess) -> str:
    return str(server.post("/v1/completions", BODY).json()["choices"][0]["text"])


def cpu_ticks(pid: int) -> int:
    return sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))


@pytest.mark.parametrize(
    "redirection", ["2>/dev/full", "2> >(exec true)"], ids=["full disk", "closed pipe"]
)
def test_log_that_cannot_be_written_disturbs_nobody(demo_model: Path, redirection: str) -> None:
    with running_server(*SMALL, command=("bash", "-c", f'exec "$@" {redirection}', "bash")) as running:
        running.stdout.close()  # what is printed is not read either
        for _ in range(3):
            assert text_of(running)
        assert running.get("/nothing").status_code == 404
        assert running.stop() == 0


@pytest.mark.parametrize("num_spare", [1, -6], ids=["at its limit", "past a limit that has been lowered"])
def test_no_file_descriptors_left_keeps_new_clients_out_and_nobody_else(
    server: ServerProcess, num_spare: int
) -> None:
    expected, (_, hard) = text_of(server), resource.prlimit(server.pid, resource.RLIMIT_NOFILE)
    with httpx.Client(base_url=server.url, timeout=ANSWER_LIMIT_S) as old, ExitStack() as clients:
        old.get("/health")
        open_files = {int(path.name) for path in Path(f"/proc/{server.pid}/fd").iterdir()}
        most = max(open_files) + num_spare
        before = resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (most, hard))
        try:
            for _ in range(max(0, most - len(open_files)) + 3):  # requests that are left, and three that are not
                clients.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert old.post("/v1/completions", json=BODY).json()["choices"][0]["text"] == expected
        finally:
            resource.prlimit(server.pid, resource.RLIMIT_NOFILE, before)
    wait_until(lambda: server.get("/health").status_code == 200)
    assert text_of(server) == expected


def test_killed_template_process_is_replaced(server: ServerProcess) -> None:
    assert server.post("/v1/chat/completions", CHAT).status_code == 200
    (template,) = set(server.child_pids()) - {server.engine_pid()}
    os.kill(template, signal.SIGKILL)
    wait_until(lambda: template not in server.child_pids())
    assert server.post("/v1/chat/completions", CHAT).status_code == 200, server.log


def test_swap_file_has_no_name_and_goes_with_its_process(server: ServerProcess, temporary: Path) -> None:
    maps = Path(f"/proc/{server.engine_pid()}/maps").read_text()
    assert any(line.endswith(" (deleted)") and str(temporary) in line for line in maps.splitlines())
    assert not list(temporary.iterdir())


def test_engine_at_rest_uses_no_processor(server: ServerProcess) -> None:
    text_of(server)
    engine = server.engine_pid()
    wait_until(lambda: server.get("/metrics").text.count('quire:kv_blocks{engine="0",state="used"} 0.0') == 1)

    def is_quiet() -> bool:
        before = cpu_ticks(engine)
        time.sleep(2)
        return cpu_ticks(engine) - before <= 1  # ticks of 10 ms

    wait_until(is_quiet)  # once it has looked for lost blocks
    assert server.engine_pid() == engine, "the engine has ended"


def test_limits_are_kept_by_a_clock_that_nobody_sets() -> None:
    found = set()
    for path in (SOURCES / "quire").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("time.time", "datetime.now", "time.localtime"):
                found.add(str(path.relative_to(SOURCES / "quire")))
    assert found == WALL_CLOCKS
