"""A server on a Unix domain socket: it answers there, and removes the socket when it ends."""

import signal
from contextlib import closing
from pathlib import Path

import httpx

from support.server import ServerProcess


def test_socket_is_served_and_removed_at_the_end(demo_model: Path, tmp_path: Path) -> None:
    path = tmp_path / "quire.sock"
    flags = "--uds", str(path), "--num-kv-blocks", "16"
    with closing(ServerProcess(str(demo_model), *flags, is_forked=True)) as server:
        server.wait_ready()
        assert server.url == f"unix:{path}"
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://quire", timeout=60) as client:
            body = {"prompt": [5, 6], "max_tokens": 3, "ignore_eos": True}
            assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 3
        assert path.is_socket()
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=60) == 0
        assert not path.exists()
