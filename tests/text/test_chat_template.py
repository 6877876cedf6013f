"""Chat templates render as in transformers, run in a sandbox, and fail as the request's fault."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.text.chat_template import CONTINUE_MARK, MAX_ERROR_CHARS, MAX_RENDERED_CHARS, ChatTemplate

DATA = Path(__file__).parents[2] / "../shared/data/chat_templates"
HELLO = [{"role": "user", "content": "hi"}]
PARTS_ALONE = "vllm_template_vlm2vec.jinja"     # loses a content that is a text


def clock() -> datetime:
    return datetime(2024, 7, 26, tzinfo=UTC)


def render(source: str, messages: object = HELLO, **variables: object) -> str:
    return ChatTemplate(source, clock).render(messages, **variables)


def refusal(source: str, messages: object = HELLO, **variables: object) -> str:
    with pytest.raises(InvalidRequestError) as caught:
        render(source, messages, **variables)
    assert caught.value.param == "messages"
    return str(caught.value)


def outcome(template: ChatTemplate, messages: object, **variables: object) -> dict[str, str]:
    try:
        return {"text": template.render(messages, bos_token="<s>", eos_token="</s>", **variables)}
    except InvalidRequestError as error:
        return {"error": f"{type(error.__cause__).__name__}: {error.__cause__}"}


def test_real_templates_render_as_expected() -> None:
    if not DATA.is_dir():
        pytest.skip("../shared/data is not here")
    data = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
    num_renders = 0
    for name, renders in data["expected"].items():
        template = ChatTemplate((DATA / name).read_text(encoding="utf-8"), clock)
        for conversation, expected in renders.items():
            tools = {"tools": data["tools"]} if conversation == "tools" else {}
            got = outcome(template, data["conversations"][conversation], **tools)
            got = {kind: text.replace("TemplateError: ", "Exception: ") for kind, text in got.items()}
            if name == PARTS_ALONE and conversation == "user":
                assert (got, expected) == ({"text": "Hello, who are you?"}, {"text": ""})
            elif expected == {"error": "TypeError: 'NoneType' object is not iterable"}:  # null contents are empty here
                assert "get_weather" in got["text"]
            else:
                assert got == expected, f"{name}, {conversation}"
            num_renders += 1
    assert num_renders == 92


# --- what templates may use -------------------------------------------------------------------------------------------


def test_block_lines_leave_no_trace() -> None:
    assert render("{% for m in messages %}\n  {% if true %}\n{{ m.role }}\n  {% endif %}\n{% endfor %}") == "user\n"


def test_json_keeps_characters_and_takes_options() -> None:
    messages = [{"role": "user", "content": "<é>"}]
    assert render("{{ messages | tojson }}", messages) == '[{"role": "user", "content": "<é>"}]'
    assert render("{{ messages[0] | tojson(indent=1, sort_keys=true) }}", messages) == (
        '{\n "content": "<é>",\n "role": "user"\n}'
    )


def test_loops_can_be_left() -> None:
    assert render("{% for i in range(9) %}{% if i == 3 %}{% break %}{% endif %}{{ i }}{% endfor %}") == "012"


def test_generation_blocks_render_their_content() -> None:
    source = "{% set a = 1 %}{% generation %}{% set a = 2 %}{{ a }}{{ messages[0].content }}{% endgeneration %}{{ a }}"
    assert render(source) == "2hi1"


def test_clock_namespaces_and_dicts() -> None:
    assert render("{{ strftime_now('%d %b %Y') }}") == "26 Jul 2024"
    assert render("{% set n = namespace(a=1) %}{% for i in [5] %}{% set n.a = i %}{% endfor %}{{ n.a }}") == "5"
    assert render("{{ dict(a=1).a }}{{ dict.fromkeys('ab', 2).b }}") == "12"


def test_variables_reach_the_template() -> None:
    assert render("{{ thinking }} {{ tools is none }} {{ add_generation_prompt }}", thinking=False) == "False True True"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_no_name_of_a_variable_is_in_the_way() -> None:
    names = {"self": 1, "context": 2, "messages": 3}
    assert ChatTemplate("{{ context }}{{ messages[0].content }}").render(HELLO, **names) == "2hi"


def test_tools_are_rendered_as_given() -> None:
    parameters = {"type": "object", "properties": {"place": {"type": "string"}}}
    bare = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    full = {"type": "function", "function": {"parameters": parameters, "description": "d", "name": "g"}}
    nulls = {"type": "function", "function": {"name": "h", "description": None, "parameters": None}}
    text = render("{{ tools | tojson }}", tools=[bare, full, nulls])
    assert text == json.dumps([bare, full, {"type": "function", "function": {"name": "h"}}])


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@pytest.mark.parametrize(
    ("source", "function", "written"),
    [
        ("{{ '// ' + f.description }}", {}, {"name": "f", "description": ""}),
        ("{{ f.parameters | tojson }}", {}, {"name": "f", "parameters": NO_PARAMETERS}),
        ("{{ f.parameters.properties.items() | list }}", {}, {"name": "f", "parameters": NO_PARAMETERS}),
        ("{{ f.parameters.properties.items() | list }}", {"parameters": {"type": "object"}},
         {"name": "f", "parameters": NO_PARAMETERS}),
        ("{{ '// ' + f.description }}", {"description": "d"}, {"name": "f", "description": "d"}),
    ],
)  # fmt: skip
def test_functions_get_the_fields_that_a_template_needs(
    source: str, function: dict[str, Any], written: dict[str, Any]
) -> None:
    source = "{% for t in tools or [] %}{% set f = t.function %}" + source + "={{ f | tojson }}{% endfor %}"
    source += "{{ messages }}"
    tools = [{"type": "function", "function": {"name": "f"} | function}]
    assert f"={json.dumps(written)}" in render(source, tools=tools)


def test_text_parts_become_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"


@pytest.mark.parametrize(
    ("parts", "content", "reasoning"),
    [
        (["a", {"type": "input_text", "text": "b"}, {"type": "output_text", "text": "c"}], "a\nb\nc", ""),
        ([{"type": "refusal", "refusal": "no"}], "no", ""),
        ([{"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "text", "text": "a"}], "a", "hm"),
        ([{"type": "thinking", "thinking": [{"type": "text", "text": "hm"}]}, "a"], "a", "hm"),
        ([{"type": "reasoning", "text": "1"}, "a", {"type": "reasoning_text", "text": "2"}], "a", "1\n2"),
        ([{"type": "redacted_thinking", "data": "x"}, "a"], "a", ""),
    ],
)
def test_parts_of_all_apis_are_text_or_reasoning(parts: list[Any], content: str, reasoning: str) -> None:
    shown = "{{ messages[0].content }}|{{ messages[0].reasoning }}"
    assert render(shown, [{"role": "assistant", "content": parts}]) == f"{content}|{reasoning}"


def test_a_messages_own_reasoning_wins_over_that_of_its_parts() -> None:
    message = {"role": "assistant", "content": [{"type": "thinking", "thinking": "b"}], "reasoning_content": "a"}
    assert render("{{ messages[0].reasoning }}", [message]) == "a"


def test_null_content_renders_as_empty() -> None:
    for message in ({"content": None}, {"tool_calls": []}):
        assert render("[{{ messages[0].content }}]", [{"role": "assistant"} | message]) == "[]"


# --- a last message that goes on --------------------------------------------------------------------------------------

CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>\n{% endfor %}"
TRIMMED = CHATML.replace("m.content", "m.content | trim")
BEGUN = ("Sure, ", " well", "one\ntwo\n", "tab \t", "", "hi", "<think>so</think> yes", 'a "b" \\')


def continued(source: str, messages: list[dict[str, Any]], **variables: object) -> str:
    return render(source, messages, add_generation_prompt=False, continue_final_message=True, **variables)


@pytest.mark.parametrize(
    ("source", "content", "end"),
    [(CHATML, "Sure, ", "<bot>Sure, "), (TRIMMED, " Sure, ", "<bot>Sure,"), (CHATML, "", "<bot>")],
    ids=["as it is", "trimmed by the template", "empty"],
)
def test_text_ends_with_the_message_that_is_continued(source: str, content: str, end: str) -> None:
    assert continued(source, [*HELLO, {"role": "bot", "content": content}]) == "<user>hi</>\n" + end


def test_only_the_last_of_equal_messages_is_continued() -> None:
    assert continued(CHATML, HELLO * 2) == "<user>hi</>\n<user>hi"


def test_continued_parts_end_with_the_last_one() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]
    assert continued(CHATML, [{"role": "bot", "content": parts}]) == "<bot>a\nb "


def test_continuing_leaves_the_messages_as_they_were() -> None:
    messages = [*HELLO, {"role": "bot", "content": "Sure, "}]
    continued(CHATML, messages)
    assert messages == [*HELLO, {"role": "bot", "content": "Sure, "}]


def test_a_message_is_not_both_continued_and_begun() -> None:
    with pytest.raises(InvalidRequestError, match="add_generation_prompt") as caught:
        render(CHATML, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


@pytest.mark.parametrize(
    ("source", "message", "reason"),
    [
        ("{{ messages[0].role }}", {"role": "bot", "content": "Sure"}, "does not write the last message"),
        ("{{ messages[0].content | upper }}", {"role": "bot", "content": "Sure"}, "does not write the last message"),
        ("{{ messages | tojson }}", {"role": "bot", "content": 'a "b"'}, "does not write the last message"),
        (CHATML, {"role": "bot", "content": None}, "a last message with a content"),
        (CHATML, {"role": "bot", "tool_calls": []}, "a last message with a content"),
    ],
)
def test_a_message_that_cannot_be_continued_is_refused(source: str, message: dict[str, Any], reason: str) -> None:
    assert reason in refusal(source, [message], add_generation_prompt=False, continue_final_message=True)


def in_transformers(source: str, messages: list[dict[str, Any]]) -> str | None:
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    try:
        texts, _ = utils.render_jinja_template([messages], chat_template=source, continue_final_message=True, **tokens)
    except Exception:  # values of many types
        return None
    assert CONTINUE_MARK.strip() not in texts[0]
    return str(texts[0])


def or_none(source: str, messages: list[dict[str, Any]]) -> str | None:
    try:
        return continued(source, messages, bos_token="<s>", eos_token="</s>")
    except InvalidRequestError:
        return None


@pytest.mark.parametrize(
    "source", [CHATML, TRIMMED, "{{ messages | tojson }}{# content #}", "{{ messages[0].content }}"]
)
@pytest.mark.parametrize("content", BEGUN)
def test_small_templates_continue_as_in_transformers(source: str, content: str) -> None:
    messages = [*HELLO, {"role": "assistant", "content": content}]
    assert or_none(source, messages) == in_transformers(source, messages)


def test_real_templates_continue_as_in_transformers() -> None:
    if not DATA.is_dir():
        pytest.skip("../shared/data is not here")
    data = json.loads((DATA / "expected.json").read_text(encoding="utf-8"))
    begun = [[*HELLO, {"role": "assistant", "content": content}] for content in BEGUN]
    begun += [data["conversations"]["user"], data["conversations"]["multi"]]
    num_texts = 0
    for name in data["expected"]:
        source = (DATA / name).read_text(encoding="utf-8")
        if "strftime_now" in source or name == PARTS_ALONE:
            continue  # two clocks; texts that are lost
        for messages in begun:
            text = or_none(source, messages)
            assert text == in_transformers(source, messages), f"{name}, {messages[-1]}"
            num_texts += text is not None
    assert num_texts > 300


# --- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([], "at least one message"),
        ("hi", "list"),
        (None, "list"),
        (["hi"], r"messages[0] must be an object"),
        ([*HELLO, {"content": "hi"}], "messages[1] must have a role"),
        ([{"role": 1, "content": "hi"}], "role"),
        ([{"role": "user", "content": None}], "[0].content must be a string or a list of at least one part, got null"),
        ([*HELLO, {"role": "user", "content": []}], "[1].content must be a string or a list of at least one part, got"),
        ([{"role": "user", "content": 5}], "content must be"),
        ([{"role": "user", "content": [5]}], "content[0] must be a text or a part of text"),
        ([{"role": "user", "content": ["a", {"type": "image_url", "image_url": {}}]}], "[1]: images, audio"),
        ([{"role": "user", "content": [{"type": "thinking", "thinking": "hm"}]}], "got the type 'thinking'"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], "content[0].text must be a string, got None"),
        ([{"role": "user", "content": [{"type": "refusal", "text": "x"}]}], "content[0].refusal must be a string"),
        ([{"role": "user", "content": "hi", "extra": object()}], "plain JSON"),
    ],
)
def test_messages_of_wrong_shape_are_refused(messages: object, reason: str) -> None:
    assert reason in refusal("{{ messages }}", messages)


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "chat template"),
        ("{{ none + 1 }}", "unsupported operand"),
        ("{{ messages[0].content.missing.deeper }}", "missing"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ],
)
def test_template_errors_are_the_requests(source: str, reason: str) -> None:
    assert reason in refusal(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ dict.fromkeys.__self__.os }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace() %}{% set n.__class__ = 1 %}",
        "{{ namespace(__class__=1) }}",
        "{{ cycler.__init__.__globals__.os }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
    ],
)
def test_sandbox_holds(source: str) -> None:
    assert "unsafe" in (text := refusal(source)) or "attribute" in text


@pytest.mark.parametrize(
    "source",
    [
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as secret %}",
        "{% from 'os' import system %}",
        "{% extends '../secret' %}",
    ],
)
def test_files_are_out_of_reach(source: str) -> None:
    assert "no loader" in refusal(source)


@pytest.mark.parametrize("source", ["{{ range(10 ** 9) | list }}", "{% for i in range(10 ** 9) %}{% endfor %}"])
def test_long_ranges_are_refused(source: str) -> None:
    assert "Range too big" in refusal(source)


def test_long_output_is_cut_short() -> None:
    source = "{% for i in range(99999) %}{{ messages[0].content }}{% endfor %}"
    assert f"longer than {MAX_RENDERED_CHARS}" in refusal(source, [{"role": "user", "content": "x" * 1000}])


def test_long_errors_are_cut_short() -> None:
    assert "a" * MAX_ERROR_CHARS in (text := refusal("{{ raise_exception('a' * 10000) }}"))
    assert len(text) < MAX_ERROR_CHARS + 100


def test_messages_nested_without_end_are_refused() -> None:
    nested: list[Any] = []
    nested.append(nested)
    assert "recursion" in refusal("{{ 1 }}", [{"role": "user", "content": "hi", "extra": nested}])


def test_a_refused_render_leaves_the_template_usable() -> None:
    template = ChatTemplate("{% if messages[0].content == 'no' %}{{ raise_exception('no') }}{% endif %}yes")
    with pytest.raises(InvalidRequestError):
        template.render([{"role": "user", "content": "no"}])
    assert template.render(HELLO) == "yes"
