"""The tables of formats: names, fingerprints, and the page that is made from them."""

from pathlib import Path

import pytest

from format_tables import PAGE
from quire.text.tool_formats.table import FALLBACK, REASONING_FORMATS, TOOL_FORMATS, find_format, find_reasoning
from quire.text.tool_formats.tool_format import ReasoningFormat, ToolFormat

DATA = Path(__file__).parents[3] / "../shared/data/chat_templates"
# Templates that take tools, and the format of the calls that they ask for.
TEMPLATES = {
    "ct_granite-3.0-instruct": "granite",
    "ct_qwen2.5-instruct": "hermes",
    "vllm_tool_chat_template_granite": "granite",
    "vllm_tool_chat_template_granite_20b_fc": "granite-20b-fc",
    "vllm_tool_chat_template_hermes": "hermes",
    "vllm_tool_chat_template_internlm2_tool": "internlm",
    "vllm_tool_chat_template_llama3.1_json": "llama3_json",
    "vllm_tool_chat_template_llama3.2_json": "llama3_json",
    "vllm_tool_chat_template_llama3.2_pythonic": "pythonic",
    "vllm_tool_chat_template_mistral": "mistral_v3",
    "vllm_tool_chat_template_mistral_parallel": "mistral_v3",
    "vllm_tool_chat_template_toolace": "pythonic",
}


def test_fingerprints_find_the_format_of_templates_that_take_tools() -> None:
    if not DATA.is_dir():
        pytest.skip("../shared/data is not here")
    templates = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DATA.glob("*.jinja"))}
    found = {name: row.name for name, text in templates.items() if (row := find_format("auto", text))}
    assert found == TEMPLATES
    assert found.keys() == {name for name, text in templates.items() if "tools" in text}
    assert not any(find_reasoning("auto", text) for text in templates.values())


SHOWN = [row for row in TOOL_FORMATS if not row.is_bare and row.name != "phi4_mini_json"]  # their templates show calls


@pytest.mark.parametrize("row", SHOWN, ids=lambda row: row.name)
def test_template_with_a_call_has_the_format_of_the_call(row: ToolFormat) -> None:
    parts = (row.section[0], row.call, row.parameter, row.section[1], *row.drops)
    template = f"{{% if tools %}}<|start|>{''.join(parts)}<|message|>"
    assert find_format("auto", template) is row


@pytest.mark.parametrize("row", [row for row in REASONING_FORMATS if row.fingerprints], ids=lambda row: row.name)
def test_reasoning_is_recognized_by_its_markers(row: ReasoningFormat) -> None:
    template = "".join(text for pair in row.markers for text in pair) + "".join(row.marker_texts)
    assert find_reasoning("auto", template) is row


@pytest.mark.parametrize("rows", [TOOL_FORMATS, REASONING_FORMATS], ids=["tools", "reasoning"])
def test_each_name_is_one_format(rows: tuple[ToolFormat | ReasoningFormat, ...]) -> None:
    names = [name for row in rows for name in (row.name, *row.aliases)]
    assert len(set(names)) == len(names)
    find = find_format if rows is TOOL_FORMATS else find_reasoning
    assert {find(name) for name in names} == set(rows)


def test_no_format_is_found_without_a_template_that_has_one() -> None:
    assert find_format("auto") is None
    assert find_format("auto", "no tools here") is None
    assert find_format("none", "<tool_call></tool_call>") is None
    assert FALLBACK is find_format("hermes")


def test_page_has_the_tables_of_the_rows() -> None:
    page = PAGE.path.read_text(encoding="utf-8")
    assert PAGE.filled(page) == page, "run python tools/format_tables.py"
