"""Conversations with tools in the values that templates expect, and as text for templates that render none."""

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.text.chat_template import ChatTemplate
from quire.text.conversation import paired
from quire.text.fitted_messages import hermes_calls
from quire.text.tools import ToolLimits, tools_text

DATA = Path(__file__).parents[2] / "../shared/data/chat_templates"
CHATML = "{% for m in messages %}<{{ m.role }}>{{ m.content }}</>{% endfor %}"
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
NUM_BYTES = len(json.dumps(PARAMETERS, separators=(",", ":")))
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
CALL = {"id": "call00001", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}
CONVERSATION = [
    {"role": "user", "content": "Weather in Ulm?"},
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "content": [{"type": "text", "text": "18 degrees"}]},
]


def render(source: str, messages: object = CONVERSATION, **variables: Any) -> str:  # noqa: ANN401
    return ChatTemplate(source).render(messages, **variables)  # type: ignore[arg-type]


def refusal(messages: object = CONVERSATION, **variables: Any) -> tuple[str | None, str]:  # noqa: ANN401
    with pytest.raises(InvalidRequestError) as caught:
        render(CHATML, messages, **variables)
    return caught.value.param, str(caught.value)


# --- values that templates expect -------------------------------------------------------------------------------------


def test_arguments_are_objects() -> None:
    shown = "{{ messages[1].tool_calls[0].function.arguments.items() | list }}"
    assert render(shown) == "[('city', 'Ulm')]"


@pytest.mark.parametrize(("arguments", "shown"), [("", "{}"), ('{"city": "U', '"{\\"city\\": \\"U"'), ("[1]", '"[1]"')])
def test_arguments_that_are_no_object_remain_text(arguments: str, shown: str) -> None:
    call = {"function": {"name": "f", "arguments": arguments}}
    messages = [{"role": "assistant", "tool_calls": [call]}]
    assert render("{{ messages[0].tool_calls[0].function.arguments | tojson }}", messages) == shown


def test_message_of_a_tool_has_the_name_of_its_function() -> None:
    assert render("{{ messages[2].name }}{{ messages[2].tool_calls }}") == "get_weather"


def test_null_fields_count_as_absent() -> None:
    messages = [{"role": "assistant", "content": "hi", "tool_calls": None, "name": None}]
    assert render("{{ 'tool_calls' in messages[0] or messages[0].name is defined }}", messages) == "False"


@pytest.mark.parametrize("name", ["reasoning", "reasoning_content"])
def test_reasoning_is_found_under_each_name(name: str) -> None:
    messages = [{"role": "assistant", "content": "4", name: "2 + 2"}]
    assert render("{{ messages[0].reasoning }}|{{ messages[0].reasoning_content }}", messages) == "2 + 2|2 + 2"


# --- OpenAI's older calls of functions --------------------------------------------------------------------------------

SHOWS_IDS = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}[{{ c.id }} {{ c.function.name }} "
    "{{ c.function.arguments | tojson }}]{% endfor %}{{ m.tool_call_id }}{{ m.name }}={{ m.content or '' }}{% endfor %}"
)


def older_call(name: str, arguments: str = "{}") -> dict[str, Any]:
    return {"role": "assistant", "content": None, "function_call": {"name": name, "arguments": arguments}}


def older_result(name: str, content: str) -> dict[str, Any]:
    return {"role": "function", "name": name, "content": content}


def test_older_calls_are_calls_of_tools() -> None:
    messages = [older_call("f", '{"x": 1}'), older_result("f", "a"), older_call("g"), older_result("g", "b")]
    assert render(SHOWS_IDS, messages) == (
        '<assistant>[function_call_0 f {"x": 1}]=<tool>function_call_0f=a'
        "<assistant>[function_call_1 g {}]=<tool>function_call_1g=b"
    )


def test_older_result_belongs_to_the_last_call_of_its_function() -> None:
    again = [older_call("f"), older_result("f", "a"), older_call("f"), older_result("f", "b"), older_result("h", "c")]
    assert render(SHOWS_IDS, again).endswith("<tool>function_call_1f=b<tool>h=c")


def test_older_call_is_shown_where_a_template_shows_no_calls() -> None:
    older = older_call("get_weather", '{"city": "Ulm"}'), older_result("get_weather", "18")
    text = render(CHATML, [CONVERSATION[0], *older])
    assert text == render(CHATML, [*CONVERSATION[:2], {"role": "tool", "content": "18"}])
    assert '"Ulm"' in text


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"function_call": "f"}, "messages[0].function_call must be an object, got str"),
        ({"function_call": {}}, "messages[0].function_call must have a name"),
        ({"function_call": {"name": "f", "arguments": "x" * 9}}, "[0].function_call.arguments must have at most 8"),
        ({"function_call": {"name": "f"}, "tool_calls": [CALL]}, "messages[0] must have tool_calls or function_call"),
        ({"role": "function", "content": "x"}, "messages[0] must have a name"),
    ],
)
def test_invalid_older_calls_are_refused(message: dict[str, Any], reason: str) -> None:
    limits = ToolLimits(max_argument_bytes=8)
    assert reason in refusal([{"role": "assistant", **message}], limits=limits)[1]


# --- results behind their calls ---------------------------------------------------------------------------------------


def calling(*ids: str) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [CALL | {"id": id_} for id_ in ids]}


def told(id_: object) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "name": "get_weather", "content": "18"}


USER, WAIT, BRIEF = ({"role": role, "content": "x"} for role in ("user", "user", "system"))
AGAIN = [calling("1"), told("1")]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([USER, calling("1"), told("1"), USER], [USER, calling("1"), told("1"), USER]),
        ([calling("1", "2"), told("2"), WAIT, told("1")], [calling("1", "2"), told("2"), told("1"), WAIT]),
        ([calling("1"), BRIEF, USER, told("1")], [calling("1"), told("1"), BRIEF, USER]),
        (
            [calling("1"), WAIT, calling("2"), told("2"), told("1")],
            [calling("1"), told("1"), WAIT, calling("2"), told("2")],
        ),
        ([*AGAIN, WAIT, *AGAIN], [*AGAIN, WAIT, *AGAIN]),
        ([told("1"), calling("1"), USER, told("2"), told(None)], None),
    ],
    ids=["as sent", "parallel", "late system", "turns", "an id again", "unknown"],
)
def test_messages_between_a_call_and_its_result_follow_the_result(given: list[Any], expected: list[Any] | None) -> None:
    expected = expected or given
    assert paired(given) == expected
    source = "{% for m in messages %}{{ m.role }}{{ m.tool_call_id }}{{ m.tool_calls }}{% endfor %}"
    assert render(source, given) == render(source, expected)


# --- templates that render no tools -----------------------------------------------------------------------------------


def test_tools_and_calls_become_text() -> None:
    rendered = render(CHATML, tools=[WEATHER])
    system, user, assistant, response, rest = rendered.split("</>")
    assert system == "<system>" + tools_text([WEATHER], hermes_calls)
    assert json.dumps(WEATHER) in system
    assert user == "<user>Weather in Ulm?"
    assert assistant == '<assistant><tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call>'
    assert (response, rest) == ("<user><tool_response>\n18 degrees\n</tool_response>", "")


def test_tools_follow_the_system_message() -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    rendered = render(CHATML, messages, tools=[WEATHER])
    assert rendered.startswith("<system>Be brief.\n\nYou can call these functions")


@pytest.mark.parametrize(
    "source",
    [
        "{% for m in messages %}{{ raise_exception('no') if m.role == 'system' else m.content }}{% endfor %}",
        "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}",
    ],
)
def test_tools_precede_the_users_message_where_no_system_message_is_shown(source: str) -> None:
    assert render(source, CONVERSATION[:1], tools=[WEATHER]) == (
        tools_text([WEATHER], hermes_calls) + "\n\nWeather in Ulm?"
    )


def test_template_that_shows_no_text_of_ours_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="does not show tools") as caught:
        render("{{ messages | length }}", tools=[WEATHER])
    assert caught.value.param == "tools"


def test_template_with_calls_of_its_own_format_is_told_of_no_other() -> None:
    source = CHATML + "{% for m in messages if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endfor %}"
    rendered = render(source, tools=[WEATHER])
    assert "<tools>" in rendered
    assert "<tool_call>" not in rendered
    assert "<tool>18 degrees</>" in rendered


def test_responses_in_a_row_are_one_message() -> None:
    tool = {"role": "tool", "content": "x"}
    assert render(CHATML, [*CONVERSATION[:2], tool, tool]).endswith(
        "<user><tool_response>\nx\n</tool_response>\n<tool_response>\nx\n</tool_response></>"
    )


def test_real_templates_show_tools_and_calls() -> None:
    if not DATA.is_dir():
        pytest.skip("../shared/data is not here")
    num_renders = 0
    for path in sorted(DATA.glob("*.jinja")):
        template = ChatTemplate(path.read_text(encoding="utf-8"))
        try:
            turns = [CONVERSATION[0], {"role": "assistant", "content": "?"}, CONVERSATION[0]]
            template.render(turns, bos_token="<s>", eos_token="</s>")
        except InvalidRequestError:
            continue  # the template of a model for something else
        rendered = template.render(CONVERSATION, tools=[WEATHER], bos_token="<s>", eos_token="</s>")
        assert all(text in rendered for text in ("get_weather", "city", "Ulm", "18 degrees")), path.name
        num_renders += 1
    assert num_renders == 40


# --- bounds -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tools", "reason"),
    [
        ({}, "tools must be a list"),
        ([{"type": "custom", "custom": {"name": "x"}}], "tools[0] must be of the form"),
        ([WEATHER, {"type": "function", "function": {"name": "a b"}}], "tools[1].function.name must be 1 to 128"),
        ([{"type": "function", "function": {"name": "f", "strict": "yes"}}], "tools[0].function.strict must be a bool"),
        ([{"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}], "schema of an object"),
    ],
)  # fmt: skip
def test_invalid_tools_are_refused(tools: object, reason: str) -> None:
    param, message = refusal(tools=tools)
    assert param == "tools"
    assert reason in message


@pytest.mark.parametrize(
    ("limits", "flag"),
    [
        (ToolLimits(max_schema_bytes=NUM_BYTES - 1), f"(max_schema_bytes), got {NUM_BYTES}"),
        (ToolLimits(max_schema_depth=2), "nested at most 2 levels deep (max_schema_depth)"),
        (ToolLimits(max_schema_properties=0), "at most 0 properties (max_schema_properties), got 1"),
    ],
)
def test_schemas_are_bounded(limits: ToolLimits, flag: str) -> None:
    param, message = refusal(tools=[WEATHER], limits=limits)
    assert (param, flag in message) == ("tools", True), message
    just = ToolLimits(max_schema_bytes=NUM_BYTES, max_schema_depth=3, max_schema_properties=1)
    assert render(CHATML, tools=[WEATHER], limits=just)


def test_arguments_are_bounded() -> None:
    assert refusal(limits=ToolLimits(max_argument_bytes=14)) == (
        "messages",
        "messages[1].tool_calls[0].function.arguments must have at most 14 bytes (max_argument_bytes), got 15",
    )
    assert render(CHATML, limits=ToolLimits(max_argument_bytes=15))


@pytest.mark.parametrize(
    ("calls", "reason"),
    [
        ("f", "tool_calls must be a list"),
        (["f"], "tool_calls[0] must be an object with a function"),
        ([{"function": {}}], "function must have a name"),
    ],
)
def test_invalid_calls_are_refused(calls: object, reason: str) -> None:
    param, message = refusal([{"role": "assistant", "tool_calls": calls}])
    assert param == "messages"
    assert reason in message


def test_arguments_that_a_template_cannot_read_are_named() -> None:
    source = CHATML + (
        "{% for m in messages for c in m.tool_calls or [] %}{{ c.function.name }}"
        "{% for name, value in c.function.arguments.items() %}{{ name }}{{ value }}{% endfor %}{% endfor %}"
    )
    cut = CALL | {"function": {"name": "f", "arguments": '{"city": "U'}}
    with pytest.raises(InvalidRequestError) as caught:
        render(source, [CONVERSATION[0], {"role": "assistant", "tool_calls": [CALL, cut]}])
    assert str(caught.value).startswith("messages[1].tool_calls[1].function.arguments must be a JSON object, got '{")
    assert caught.value.param == "messages"


def test_hostile_arguments_and_schemas_take_bounded_time() -> None:
    deep: Any = []
    for _ in range(900):
        deep = [deep]
    nested = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[" * 1_000_000}}]}
    assert "[[[" in render("{{ messages[0].tool_calls[0].function.arguments }}", [nested])
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "x": deep}}}
    assert "max_schema_depth" in refusal(tools=[tool])[1]


# --- schemas that become grammars -------------------------------------------------------------------------------------
