"""`quire chat` says the same with a model in its own process and with Quire's server."""

import os
import subprocess
import sys
from pathlib import Path

from support.server import ENTRY, running_server

SMALL = ("--num-kv-blocks", "64", "--max-num-seqs", "8", "--max-model-len", "256")
TALK = "Write a function parse_header.\nWhat does read_file do?\n"
GREEDY = ("--temperature", "0", "--max-tokens", "40")


def chat(stdin: str, *arguments: str) -> tuple[int, str, str]:
    """Run the command as a process and return its exit code and what it wrote."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("QUIRE_")}
    ran = subprocess.run(
        [sys.executable, "-c", ENTRY, "chat", *arguments],
        env=environment | {"OMP_NUM_THREADS": "1"},
        input=stdin.encode(),
        capture_output=True,
        timeout=120,
        check=False,
    )
    return ran.returncode, ran.stdout.decode(), ran.stderr.decode()


def test_server_and_local_model_give_the_same_answers(demo_model: Path) -> None:
    local = chat(TALK, *GREEDY, *SMALL)
    assert local[0] == 0
    with running_server("--api-key", "secret", *SMALL) as server:
        assert chat(TALK, "--url", server.url, "--api-key", "secret", *GREEDY) == local
        code, out, complaint = chat(TALK, "--url", server.url, "--api-key", "wrong")
        assert (code, out, complaint.count("\n")) == (1, "", 1)
        assert complaint.startswith("quire: the server answered 401: ")
        code, out, complaint = chat("word " * 300 + "\n", "--url", server.url, "--api-key", "secret")
        assert (code, out) == (1, "")
        assert "the conversation no longer fits" in complaint
        assert "256 tokens" in complaint
        code, out, summary = chat("hi\n/stats\n", "--url", server.url, "--api-key", "secret", *GREEDY)
        assert code == 0
        assert "prompt of" in summary
