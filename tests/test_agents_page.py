"""docs/agents.md has the settings with which `make agents` runs each agent."""

import json
import tomllib
from pathlib import Path

import pytest

from support.coding_agents import AGENTS, Agent
from support.doc_blocks import blocks_of

PAGE = Path(__file__).parents[1] / "docs/agents.md"
URL = "http://127.0.0.1:8000"
UNSAID = ("CODEX_HOME", "OPENCODE_DISABLE_AUTOUPDATE", "OPENCODE_DISABLE_MODELS_FETCH", "OPENCODE_DISABLE_LSP_DOWNLOAD")


@pytest.mark.parametrize("agent", AGENTS.values(), ids=AGENTS)
def test_page_has_the_settings_of(agent: Agent) -> None:
    texts = [block.text for block in blocks_of(PAGE)]
    for name, value in agent.env.items():
        line = f"export {name}={value.replace('{url}', URL)}\n"
        assert name in UNSAID or any(line in text for text in texts), line
    for name, text in agent.files.items():
        read = tomllib.loads if name.endswith(".toml") else json.loads
        languages = {"toml": tomllib.loads, "json": json.loads}
        settings = [languages[block.language](block.text) for block in blocks_of(PAGE) if block.language in languages]
        assert read(text.replace("{url}", URL)) in settings
