"""Coding agents, the real ones from npm, hold sessions with a server whose model answers by a script (`make agents`).

No request of theirs may be refused. The rows of the table in docs/agents.md are printed.
"""

import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from support.coding_agents import AFTER, AGENTS, MODEL, NOTES, Agent, Workplace, end
from support.metrics_page import read_metrics
from support.recording_proxy import Exchange, RecordingProxy, recording_proxy
from support.scripted_model import PLAIN, write_scripted_model
from support.server import ServerProcess, running_server, wait_until

SUMMARY = "A summary: the notes were edited."

pytestmark = pytest.mark.agents


class Site(NamedTuple):
    """A server with a proxy in front, and the workplace of each agent."""

    server: ServerProcess
    proxy: RecordingProxy
    folder: Path

    def workplace(self, agent: Agent) -> Workplace:
        return Workplace(agent, self.folder / agent.name, self.proxy.url)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("agents")
    scripts = {PLAIN: [SUMMARY], "endless": ["and one more time, "]}
    for agent in AGENTS.values():
        scripts[agent.name] = agent.steps(folder / agent.name / "project")
        scripts[f"{agent.name} again"] = [f"{agent.name} answers again."]
        scripts[f"{agent.name} after"] = [f"{agent.name} goes on."]
    model = write_scripted_model(folder / "model", scripts, endless=["endless"])
    flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "qwen3", "--kv-cache-memory", "512MiB")
    with (
        running_server(str(model), "--served-model-name", MODEL, "--max-num-seqs", "4", *flags) as server,
        recording_proxy(server.url) as proxy,
    ):
        yield Site(server, proxy, folder)


@pytest.fixture(scope="module", params=AGENTS)
def place(request: pytest.FixtureRequest, site: Site) -> Workplace:
    return site.workplace(AGENTS[request.param])


@pytest.fixture(autouse=True)
def _no_refusal(site: Site) -> Iterator[None]:
    """Fail for an answer that is an error. Claude Code looks at / to see whether there is a server at all."""
    before = len(site.proxy.exchanges)
    yield
    refused = [each for each in site.proxy.exchanges[before:] if (each.status or 200) >= 400 and each.path != "/"]
    assert not refused, "\n".join(map(str, refused))


def test_session_lists_searches_reads_and_edits(
    site: Site, place: Workplace, capsys: pytest.CaptureFixture[str]
) -> None:
    agent, before, computed_before_s = place.agent, len(site.proxy.exchanges), computed_s(site)
    printed = place.run(agent.command, f"[[{agent.name}]] Do it.")
    assert f"{agent.name} has done it." in printed
    assert AFTER in place.notes.read_text()
    turns = turns_of(site, before)
    assert len(turns) >= len(agent.steps(place.project))
    *results, last = results_in(turns[-1].body)
    assert any(NOTES in result for result in results)
    assert "unsupported" not in f"{results}{last}"

    printed = place.run(agent.next_turn, f"[[{agent.name} again]] And now?")
    assert f"{agent.name} answers again." in printed
    turns = turns_of(site, before)
    assert len(results_in(turns[-1].body)) == len(results) + 1
    with capsys.disabled():
        print("\n" + figures(agent.name, turns, computed_s(site) - computed_before_s))


def test_compaction_and_a_turn_behind_it(site: Site, place: Workplace) -> None:
    agent, before = place.agent, len(site.proxy.exchanges)
    if agent.compaction is None:
        pytest.skip(f"{agent.name} has no command that compacts a session")
    prompt = f"[[{agent.name} after]] Go on."
    if agent.name == "claude":
        place.run(agent.compaction)
        printed = place.run(agent.next_turn, prompt)
    else:
        printed = place.run(agent.compaction, prompt)
    assert f"{agent.name} goes on." in printed
    *_, last = turns_of(site, before)
    # Codex asks for a summary without tools. Claude Code keeps the last turn, and asks for one behind its prompt.
    assert (SUMMARY if agent.name == "codex" else f"{agent.name} answers again.") in json.dumps(last.body)
    assert results_in(last.body) == []      # tokens that the turns before had


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_answer_that_is_cancelled_frees_its_blocks_and_the_next_turn_works(
    site: Site, place: Workplace, number: signal.Signals
) -> None:
    agent, before = place.agent, len(site.proxy.exchanges)
    process = place.start(agent.command, "[[endless]] Do not stop.")
    try:
        wait_until(lambda: process.poll() is not None or _is_answered(site, before))
        assert process.poll() is None, "the agent ended by itself"
    finally:
        end(process, number)
    wait_until(lambda: is_idle(site))
    printed = place.run(agent.next_turn, f"[[{agent.name} again]] And now?")
    assert f"{agent.name} answers again." in printed


def _is_answered(site: Site, before: int) -> bool:
    return any("one more" in each.text for each in turns_of(site, before))


# --- what was sent ----------------------------------------------------------------------------------------------------


def turns_of(site: Site, before: int) -> list[Exchange]:
    """Return the requests for answers with tools since then; without titles, counts and checks."""
    paths = ("/v1/messages", "/v1/responses", "/v1/chat/completions")
    return [each for each in site.proxy.exchanges[before:] if each.path in paths and each.body.get("tools")]


def results_in(body: dict[str, Any]) -> list[str]:
    """Return the results of tools in a body of any of the three APIs."""
    found = []
    for item in body.get("messages") or body["input"]:
        blocks = item.get("content") if isinstance(item.get("content"), list) else []
        if item.get("role") == "tool" or str(item.get("type")).endswith("_output"):
            found.append(json.dumps(item))
        found += [json.dumps(block) for block in blocks if block.get("type") == "tool_result"]
    return found


def is_idle(site: Site) -> bool:
    """Whether no request runs, and no block is used but those of pinned prefixes."""
    samples = read_metrics(site.server.url)
    running = samples["vllm:num_requests_running"] + samples["vllm:num_requests_waiting"]
    return running == 0 and samples['quire:kv_blocks{state="used"}'] == samples["quire:kv_blocks_pinned"]


def computed_s(site: Site) -> float:
    """Return the seconds that requests were computed for, so far."""
    samples = read_metrics(site.server.url)
    return sum(samples[f"vllm:request_{part}_time_seconds_sum"] for part in ("prefill", "decode"))


def figures(name: str, turns: list[Exchange], model_s: float) -> str:
    """Return a row of the table in docs/agents.md."""
    usages = [usage_of(turn.text) for turn in turns]
    prompt, cached, output = (sum(column) for column in zip(*usages, strict=True))
    longest, total_s = max(usage[0] for usage in usages), sum(turn.duration_s for turn in turns)
    later = sorted(turn.duration_s for turn in turns[1:])
    fields = (
        name, len(turns), f"{prompt:,}", f"{longest:,}", f"{cached:,} ({cached / prompt:.0%})", output,
        f"{turns[0].duration_s:.2f} s", f"{1e3 * later[len(later) // 2]:.0f} ms", f"{total_s:.2f} s",
        f"{model_s:.2f} s",
    )  # fmt: skip
    return f"| {' | '.join(map(str, fields))} |"


def usage_of(stream: str) -> tuple[int, int, int]:
    """Return the tokens of the prompt, those of them that were cached, and those of the output."""
    events = [json.loads(line[6:]) for line in stream.splitlines() if line.startswith("data: {")]
    readers: list[Callable[[dict[str, Any]], dict[str, Any] | None]] = [
        lambda event: event.get("usage"), lambda event: (event.get("response") or {}).get("usage"),
    ]  # fmt: skip
    usage = next(found for event in reversed(events) for reader in readers if (found := reader(event)))
    if "cache_read_input_tokens" in usage:
        cached, written = usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]
        return usage["input_tokens"] + cached + written, cached, usage["output_tokens"]
    if "input_tokens" in usage:
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"], usage["output_tokens"]
    return usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], usage["completion_tokens"]
