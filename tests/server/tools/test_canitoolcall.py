"""Outputs recorded by canitoolcall, whole and in each of its ways to cut them.

A call counts if its `CallEnded` was emitted: a whole message contains these alone. In streams the beginning of a call
was sent before the output was cut, as with OpenAI's API; `finish_reason` says so.
"""

import re
from collections.abc import Iterable

import pytest
from canitoolcall.checks import case_status, run_checks
from canitoolcall.chunking import DEFAULT_STRATEGIES, ChunkStrategy, split, split_text
from canitoolcall.fixtures import Family, Fixture, load_families, load_fixtures
from canitoolcall.results import Observation, ParsedToolCall, ParseResult, Status

from quire.server.tools.call_reader import Content, Reasoning
from quire.text.tool_formats.table import find_reasoning
from support.outputs import ended_calls, parse, texts

FAMILIES = load_families()
FIXTURES = load_fixtures()
# Names of the parsers, of tools and of reasoning, by an expression for the model.
PARSERS = {
    r"Qwen3-(0\.6B|4B-.*-2507)": ("hermes", "qwen3"),
    r"Qwen3-Coder|Qwen3\.": ("qwen3_coder", "qwen3"),
    r"gpt-oss": ("openai", "openai_gptoss"),
    r"DeepSeek-V4\.1": ("deepseek_v41", "deepseek_v4"),
    r"DeepSeek-V4": ("deepseek_v4", "deepseek_v4"),
    r"DeepSeek-V3\.2": ("deepseek_v32", "deepseek_v3"),
    r"DeepSeek-V3\.1": ("deepseek_v31", "deepseek_v3"),
    r"DeepSeek-V3": ("deepseek_v3", "none"),
    r"Kimi-K3": ("kimi_k3", "kimi_k3"),
    r"Kimi-K2": ("kimi_k2", "kimi_k2"),
    r"GLM-4\.[56]": ("glm45", "glm45"),
    r"GLM": ("glm47", "glm47"),
    r"Llama-4": ("llama4_pythonic", "none"),
    r"Llama-3": ("llama3_json", "none"),
    r"Mistral-7B": ("mistral_v3", "none"),
    r"[mM]istral|Magistral|Ministral|Devstral": ("mistral", "mistral"),
    r"gemma-4": ("gemma4", "gemma4"),
}
SOFT_PASSES = {
    # White space in front of a call is content by gemma4/sglang-text-before-call, and is none by this one.
    "gemma4/vllm-text-before-call"
}


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_outputs_are_parsed(family: str) -> None:
    failures = {}
    soft = set()
    for fixture in FIXTURES:
        if fixture.family == family:
            rows = run_checks(fixture, FAMILIES[family], observation(fixture, FAMILIES[family]))
            status = case_status(rows)
            if status is Status.SOFT_PASS:
                soft.add(fixture.id)
            elif status is not Status.PASS:
                failures[fixture.id] = [row for row in rows if row.status is status][:2]
    assert failures == {}
    assert soft == {name for name in SOFT_PASSES if name.startswith(f"{family}/")}


def test_all_recorded_outputs_have_a_parser() -> None:
    assert len(FIXTURES) >= 469
    assert all(parsers_of(fixture) for fixture in FIXTURES)


def parsers_of(fixture: Fixture) -> tuple[str, str]:
    return next(names for model, names in PARSERS.items() if re.search(model, fixture.reference_model))


def observation(fixture: Fixture, family: Family) -> Observation:
    """Parse an output in every way to cut it; the tokenizers are not at hand: markers and short words are the units."""
    markers = "|".join(re.escape(marker) for marker in sorted(family.markers, key=len, reverse=True))
    units = re.findall(rf"{markers}|\s?\w{{1,5}}|\s|[^\w\s]{{1,2}}", fixture.raw_output)
    assert "".join(units) == fixture.raw_output
    streams = {
        strategy.id: result(fixture, family, ("".join(group) for group in split(units, strategy, set(family.markers))))
        for strategy in DEFAULT_STRATEGIES
    }
    streams["rand:9:1"] = result(fixture, family, split_text(fixture.raw_output, ChunkStrategy("char", 0)))
    return Observation(nonstream=result(fixture, family, [fixture.raw_output]), streams=streams)


def result(fixture: Fixture, family: Family, pieces: Iterable[str]) -> ParseResult:
    tool_parser, reasoning_parser = parsers_of(fixture)
    reasoning = find_reasoning(reasoning_parser)
    model = family.reference_for(fixture.reference_model)
    assert model is not None
    prompt = fixture.generation_prompt or model.default_generation_prompt or ""
    starts = reasoning is not None and reasoning.starts(prompt)
    events = parse(tool_parser, pieces, reasoning_parser, starts, fixture.tools)
    return ParseResult(
        content=texts(events, Content) or None,
        reasoning_content=texts(events, Reasoning) or None,
        tool_calls=tuple(ParsedToolCall(*call) for call in ended_calls(events)),
    )
