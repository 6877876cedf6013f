"""Coding agents from npm: how each is pointed at a server, what it is told to do, and the sessions that it holds.

`make agents` installs them. Each runs in a home and a project of its own, and sees no settings of the machine's.
"""

import json
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

BIN = Path(__file__).parents[2] / ".agents/node_modules/.bin"
LIMIT_S = 300.0                 # against hangs
MODEL, CONTEXT_TOKENS = "quire", 128_000
NOTES, BEFORE, AFTER = "notes.txt", "forty-one", "forty-two"


def call(name: str, /, **arguments: Any) -> str:  # noqa: ANN401 (JSON)
    """Return a call as the model writes it, in Hermes' format."""
    return "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"


def _codex_patch() -> str:
    change = f"@@\n-The answer is {BEFORE}.\n+The answer is {AFTER}."
    return f"apply_patch <<'EOF'\n*** Begin Patch\n*** Update File: {NOTES}\n{change}\n*** End Patch\nEOF"


@dataclass(frozen=True)
class Agent:
    """An agent's name, and its commands and settings for a server. `{url}`: that of the server."""

    name: str
    command: Sequence[str]                      # command of a session's first turn, without the prompt
    next_turn: Sequence[str]                    # command of a later turn
    compaction: Sequence[str] | None            # command that compacts the session, and may answer a prompt behind it
    env: Mapping[str, str]
    files: Mapping[str, str]                    # files in the home, keyed by path

    def steps(self, project: Path) -> list[str]:
        """Return what the model answers in a session that lists, searches, reads and edits a file."""
        path = str(project / NOTES)
        done = f"{self.name} has done it."
        match self.name:
            case "claude":
                return [
                    "I look around.\n" + call("Bash", command="ls", description="List the files"),
                    call("Grep", pattern="answer", output_mode="content", path=str(project)),
                    call("Read", file_path=path),
                    call("Edit", file_path=path, old_string=BEFORE, new_string=AFTER), done,
                ]  # fmt: skip
            case "codex":
                return [
                    "I look around.\n" + call("exec_command", cmd="ls"), call("exec_command", cmd="grep -n answer *"),
                    call("multi_agent_v1__close_agent", target="nobody"),
                    call("exec_command", cmd=_codex_patch()), done,
                ]  # fmt: skip
            case "qwen":
                return [
                    "I look around.\n" + call("run_shell_command", command="ls", is_background=False),
                    call("grep_search", pattern="answer"), call("read_file", file_path=path),
                    call("edit", file_path=path, old_string=BEFORE, new_string=AFTER), done,
                ]  # fmt: skip
        return [
            "I look around.\n" + call("bash", command="ls", description="List the files"),
            call("glob", pattern="*.txt"), call("read", filePath=path),
            call("edit", filePath=path, oldString=BEFORE, newString=AFTER), done,
        ]  # fmt: skip


_CLAUDE = ("--output-format", "stream-json", "--verbose", "--allowedTools", "Bash,Grep,Glob,Read,Edit,Write")
_CODEX = ("--skip-git-repo-check", "--json", "--dangerously-bypass-approvals-and-sandbox")
_QWEN = ("--output-format", "stream-json", "--approval-mode", "yolo")
_CODEX_TOML = f"""\
model = "{MODEL}"
model_provider = "quire"
model_context_window = {CONTEXT_TOKENS}

[model_providers.quire]
name = "Quire"
base_url = "{{url}}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
_OPENCODE_JSON = {
    "model": f"quire/{MODEL}", "small_model": f"quire/{MODEL}", "share": "disabled", "autoupdate": False,
    "permission": {"edit": "allow", "bash": "allow"},
    "provider": {"quire": {
        "npm": "@ai-sdk/openai-compatible", "name": "Quire", "options": {"baseURL": "{url}/v1", "apiKey": "none"},
        "models": {MODEL: {"name": MODEL, "limit": {"context": CONTEXT_TOKENS, "output": 8192}}},
    }},
}  # fmt: skip

AGENTS = {
    agent.name: agent
    for agent in (
        Agent(
            "claude", ("claude", *_CLAUDE, "-p"), ("claude", *_CLAUDE, "--continue", "-p"),
            ("claude", *_CLAUDE, "--continue", "-p", "/compact"),
            {
                "ANTHROPIC_BASE_URL": "{url}", "ANTHROPIC_API_KEY": "none", "ANTHROPIC_MODEL": MODEL,
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL, "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_AUTOUPDATER": "1",
            },
            {},
        ),
        Agent(
            "codex", ("codex", "exec", *_CODEX), ("codex", "exec", "resume", "--last", *_CODEX),
            ("codex", "exec", "resume", "--last", *_CODEX, "-c", "model_auto_compact_token_limit=20000"),
            {"CODEX_HOME": "{home}/.codex"}, {".codex/config.toml": _CODEX_TOML},
        ),
        Agent(
            "opencode", ("opencode", "run", "--format", "json"), ("opencode", "run", "--continue", "--format", "json"),
            None,
            {f"OPENCODE_DISABLE_{name}": "1" for name in ("AUTOUPDATE", "MODELS_FETCH", "LSP_DOWNLOAD")},
            {".config/opencode/opencode.json": json.dumps(_OPENCODE_JSON)},
        ),
        Agent(
            "qwen", ("qwen", *_QWEN, "-p"), ("qwen", *_QWEN, "--continue", "-p"), None,
            {"OPENAI_BASE_URL": "{url}/v1", "OPENAI_API_KEY": "none", "OPENAI_MODEL": MODEL}, {},
        ),
    )
}  # fmt: skip


class Workplace:
    """A home and a project with one file, for the sessions of one agent with one server."""

    def __init__(self, agent: Agent, folder: Path, url: str) -> None:
        if not (BIN / agent.command[0]).exists():
            pytest.skip(f"{agent.name} is not installed: make agents runs this test")
        self.agent, self.project, self._home = agent, folder / "project", folder / "home"
        self.project.mkdir(parents=True)
        self._home.mkdir()
        self.notes = self.project / NOTES
        self.notes.write_text(f"The answer is {BEFORE}.\n")
        subprocess.run(["git", "init", "-q", str(self.project)], check=True)
        for name, text in agent.files.items():
            path = self._home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.replace("{url}", url))
        self._env = {"PATH": os.environ["PATH"], "HOME": str(self._home)}
        for name, value in agent.env.items():
            self._env[name] = value.replace("{url}", url).replace("{home}", str(self._home))

    def start(self, command: Sequence[str], *prompt: str) -> "subprocess.Popen[str]":
        """Start the agent, in a group of processes of its own."""
        program, *arguments = command
        return subprocess.Popen(
            [str(BIN / program), *arguments, *prompt], cwd=self.project, env=self._env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        )  # fmt: skip

    def run(self, command: Sequence[str], *prompt: str) -> str:
        """Return what the agent prints in a turn; none may end with an error."""
        process = self.start(command, *prompt)
        try:
            printed, _ = process.communicate(timeout=LIMIT_S)
        finally:
            if process.poll() is None:
                end(process, signal.SIGKILL)
        assert process.returncode == 0, f"{command} ended with {process.returncode}: {printed}"
        return printed


def end(process: "subprocess.Popen[str]", number: signal.Signals) -> None:
    """Send a signal to an agent and to all that it has started, and wait for its end."""
    os.killpg(process.pid, number)
    process.communicate(timeout=LIMIT_S)
