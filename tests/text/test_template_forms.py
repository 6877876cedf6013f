"""The probe finds what a template reads, and conversations are fitted to it."""

import json
import logging
import re
from typing import Any

import pytest

from quire.text.chat_template import ChatTemplate
from quire.text.template_forms import TemplateForms

HEAD = "{% for m in messages %}<{{ m.role }}>"
CHATML = HEAD + "{{ m.content }}</>{% endfor %}"


def calls(arguments: str) -> str:
    return "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ " + arguments + " }}]{% endfor %}"


JSON_CALLS = HEAD + "{{ m.content }}" + calls("c.function.arguments | tojson") + "</>{% endfor %}"
TEXT_CALLS = HEAD + "{{ m.content }}" + calls("'' + c.function.arguments") + "</>{% endfor %}"
REPEATED_CALLS = HEAD + "{{ m.content }}" + calls("c.function.arguments") + "</>{% endfor %}"
ONE_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}{{ raise_exception('only one') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
ALTERNATING = (
    "{% set ns = namespace(rest=messages, front='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.rest = messages[1:] %}{% set ns.front = messages[0].content %}"
    "{% endif %}"
    "{% for m in ns.rest %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}<{{ m.role }}>{{ ns.front + '|' if loop.first and ns.front }}{{ m.content }}</>{% endfor %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": {
    "type": "object", "properties": {"city": {"type": "string"}},
}}}  # fmt: skip
SYSTEM, USER = {"role": "system", "content": "S"}, {"role": "user", "content": "U"}
LATE, LAST = {"role": "system", "content": "L"}, {"role": "user", "content": "V"}
ANSWER = {"role": "assistant", "content": "A"}


def forms(source: str) -> TemplateForms:
    return ChatTemplate(source).forms["default"]


def render(source: str, *messages: dict[str, Any], **variables: Any) -> str:  # noqa: ANN401
    return ChatTemplate(source).render(messages, **variables)


def call(id_: str = "call00001", arguments: Any = '{"city": "Ulm"}', **message: Any) -> dict[str, Any]:  # noqa: ANN401
    function = {"name": "get_weather", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": id_, "type": "function", "function": function}], **message}


def result(id_: str = "call00001", content: object = "18") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id_, "content": content}


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


# --- contents ---------------------------------------------------------------------------------------------------------

LOOP = "{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}{% endif %}{% endfor %}"
CONTENTS = {
    "text": "{{ m.content }}",
    "text, trimmed": "{{ m['content'] | trim }}",
    "loop": LOOP,
    "loop by a name": "{% set given = m['content'] %}{% for p in given %}{{ p['text'] }}{% endfor %}",
    "filters": "{{ m.content | selectattr('type', 'equalto', 'text') | map(attribute='text') | join }}",
    "macro": "{% macro show(c) %}{% for p in c %}{{ p.text }}{% endfor %}{% endmacro %}{{ show(m.content) }}",
    "first part": "{{ m.content[0].text }}",
    "either": "{% if m.content is string %}{{ m.content }}{% else %}" + LOOP + "{% endif %}",
    "JSON of what is no text": "{{ m.content if m.content is string else m.content | tojson }}",
}
FORMS = {"loop": "parts", "loop by a name": "parts", "filters": "parts", "macro": "parts", "first part": "one part",
         "either": "text or parts"}  # fmt: skip


@pytest.mark.parametrize("name", CONTENTS)
def test_contents_are_given_as_the_template_reads_them(name: str) -> None:
    source, form = HEAD + CONTENTS[name] + "</>{% endfor %}", FORMS.get(name, "text")
    assert forms(source).contents["user"] == form
    assert render(source, USER) == "<user>U</>"
    between = "" if "parts" in form else "\n"
    assert render(source, {"role": "user", "content": parts("a", "b")}) == f"<user>a{between}b</>"
    assert "<assistant>a" in render(source, USER, {"role": "assistant", "content": parts("a")}, USER)


def test_each_role_has_a_form_of_its_own() -> None:
    source = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'system' %}{{ m.content[0].text }}"
        "{% elif m.role == 'user' %}" + LOOP + "{% else %}{{ m.content | trim }}{% endif %}</>{% endfor %}"
    )
    assert forms(source).contents == {"user": "parts", "system": "one part", "assistant": "text"}
    messages = [{"role": role, "content": parts("a", "b")} for role in ("system", "user", "assistant")]
    assert render(source, *messages) == "<system>a\nb</><user>ab</><assistant>a\nb</>"


def test_parts_have_their_texts_alone() -> None:
    content = [{"type": "text", "text": "a", "cache_control": {}}, {"type": "refusal", "refusal": "b"}]
    source = HEAD + "{% for p in m.content %}{{ p.text }}{{ p | length }}{% endfor %}</>{% endfor %}"
    assert render(source, {"role": "user", "content": content}) == "<user>a2b2</>"


def test_empty_list_of_parts_is_an_empty_part() -> None:
    source = HEAD + "{{ m.content[0].text }}{% for p in m.content[1:] %}{{ p.text }}{% endfor %}</>{% endfor %}"
    assert forms(source).contents["user"] == "parts"
    text = render(source, USER | {"content": parts("U")}, call(content=[]), result(content=[]))
    assert text.startswith("<user>U</><assistant>")


def test_continued_parts_end_with_the_last_one() -> None:
    source = HEAD + LOOP + "</>{% endfor %}"
    begun = {"role": "assistant", "content": parts("a", "b ")}
    text = ChatTemplate(source).render([USER, begun], add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>U</><assistant>ab "


# --- calls ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", [JSON_CALLS, TEXT_CALLS, REPEATED_CALLS], ids=["as JSON", "joined", "repeated"])
@pytest.mark.parametrize("content", [None, "", "Let me see."])
@pytest.mark.parametrize("arguments", ['{"city": "Ulm"}', {"city": "Ulm"}], ids=["text", "object"])
def test_arguments_are_objects_or_text_as_the_template_reads_them(source: str, content: str, arguments: object) -> None:
    text = render(source, USER, call(arguments=arguments, content=content), result(), tools=[WEATHER])
    assert text.endswith(f'<user>U</><assistant>{content or ""}[get_weather {{"city": "Ulm"}}]</><tool>18</>')


def test_arguments_as_text_are_those_that_the_client_sent() -> None:
    assert "[get_weather {\"city\":  'x]" in render(TEXT_CALLS, USER, call(arguments="{\"city\":  'x"), result())
    assert "[get_weather {}]" in render(TEXT_CALLS, USER, call(arguments=None), result())


WHERE_NULL = HEAD + "{% if m.tool_calls and m.content is none %}" + calls("c.function.arguments | tojson") + (
    "{% elif m.content is not none %}{{ m.content }}{% endif %}</>{% endfor %}"
)
WHERE_EMPTY = HEAD + "{{ m.content + '' }}" + calls("c.function.arguments | tojson") + "</>{% endfor %}"
WHERE_ABSENT = HEAD + "{% if m.content is not defined %}" + calls("c.function.arguments | tojson") + (
    "{% else %}{{ m.content }}{% endif %}</>{% endfor %}"
)
WITH_NULL = HEAD + "{{ m.get('content') }}" + calls("c.function.arguments | tojson") + "</>{% endfor %}"


@pytest.mark.parametrize("content", [None, "", []])
@pytest.mark.parametrize(
    ("source", "empty"),
    [(WHERE_NULL, ("null",)), (WHERE_EMPTY, ("empty",)), (WHERE_ABSENT, ("absent",)), (WITH_NULL, ("empty",)),
     (JSON_CALLS, ("absent", "empty"))],
    ids=["null", "empty", "absent", "null is written", "any"],
)  # fmt: skip
def test_content_beside_a_call_lets_the_call_appear(source: str, empty: tuple[str, ...], content: object) -> None:
    assert forms(source).empty_contents == empty
    assert '<assistant>[get_weather {"city": "Ulm"}]</>' in render(source, USER, call(content=content), result())


def test_call_that_a_content_would_hide_is_text_behind_it() -> None:
    text = render(WHERE_NULL, USER, call(content="So."), result())
    assert '<assistant>So.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Ulm"}}\n</tool_call></>' in text
    assert text.endswith("<tool>18</>")


def test_calls_that_no_template_shows_are_in_the_format_for_which_it_is_recognized() -> None:
    source = "{# <|tool_call> #}" + CHATML
    known = ChatTemplate({"default": CHATML, "tool_use": CHATML + "{# <tool_call> <function= <parameter= #}"})
    assert "<function=get_weather>" in known.render([USER, call(), result()])
    assert '<tool_call>\n{"name": "get_weather"' in ChatTemplate(source).render([USER, call(), result()])


def test_calls_that_no_template_shows_are_written_by_the_given_function() -> None:
    source = "{{ tools | tojson if tools }}" + HEAD + (
        "{% if m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}{{ m.content }}{% endif %}</>{% endfor %}"
    )
    messages = [USER, call(content="So."), result()]
    text = ChatTemplate(source).render(messages, tools=[WEATHER], write_calls=lambda made: f"CALLS {made}")
    assert text.endswith(
        "<user>U</><assistant>So.\nCALLS [('get_weather', {'city': 'Ulm'})]</><tool><result>18</result></>"
    )


def test_model_is_told_of_the_format_of_calls_that_is_read() -> None:
    text = ChatTemplate(CHATML).render([USER], tools=[WEATHER], write_calls=lambda made: f"CALLS {made}")
    assert "in this form, once for each call:\nCALLS [('NAME', {'PARAMETER': 'VALUE'})]\n" in text


def test_results_as_text_and_what_follows_them_are_one_message() -> None:
    text = render(ALTERNATING, SYSTEM, USER, call(), result(), result(content=parts("19")), LAST)
    assert text.startswith("<user>S|U</><assistant><tool_call>")
    assert text.endswith(
        "<user><tool_response>\n18\n</tool_response>\n<tool_response>\n19\n</tool_response>\n\nV</>"
    )


SINGLE_CALLS = JSON_CALLS.replace(
    HEAD, HEAD + "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('one call') }}{% endif %}"
)
FIRST_CALLS = JSON_CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")


@pytest.mark.parametrize("source", [SINGLE_CALLS, FIRST_CALLS], ids=["refused", "lost"])
def test_each_call_is_a_message_with_its_results_behind_it_where_the_template_allows_one(source: str) -> None:
    assert not forms(source).shows_parallel_calls
    made = [call(id_, {"city": id_})["tool_calls"][0] for id_ in "abc"]
    results = [result("c", "of c"), result("x", "of x"), result("a", "of a"), result([], "of none")]
    text = render(source, USER, {"role": "assistant", "content": "So.", "tool_calls": made}, *results, LAST)
    assert text == (
        '<user>U</><assistant>So.[get_weather {"city": "a"}]</><tool>of a</><assistant>[get_weather {"city": "b"}]</>'
        '<assistant>[get_weather {"city": "c"}]</><tool>of c</><tool>of x</><tool>of none</><user>V</>'
    )
    assert render(source, USER, call(), result()) == render(JSON_CALLS, USER, call(), result())


def test_each_call_is_followed_by_its_result_where_results_are_text_of_the_user() -> None:
    source = SINGLE_CALLS.replace(HEAD, HEAD + "{% if m.role == 'tool' %}{{ raise_exception('role') }}{% endif %}")
    made = [call(id_)["tool_calls"][0] for id_ in "ab"]
    text = render(source, USER, {"role": "assistant", "tool_calls": made}, result("a", "of a"), result("b", "of b"))
    assert re.findall("<user>|<assistant>|of .", text) == ["<user>", *["<assistant>", "<user>", "of a"],
                                                           *["<assistant>", "<user>", "of b"]]  # fmt: skip


@pytest.mark.parametrize("source", [JSON_CALLS, TEXT_CALLS, CHATML], ids=["as JSON", "joined", "not shown"])
def test_parallel_calls_stay_together_where_the_template_shows_them(source: str) -> None:
    assert forms(source).shows_parallel_calls


ALTERNATING_CALLS = (
    "{% for m in messages | rejectattr('role', 'equalto', 'tool') | selectattr('tool_calls', 'undefined') %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}{% endif %}{% endfor %}"
) + JSON_CALLS
UNHEARD_CALLS = JSON_CALLS.replace(
    "<{{ m.role }}>{{ m.content }}",
    "<{{ m.role }}>{{ m.content if m.role != 'user' or loop.first or loop.previtem.role != 'tool' }}",
)
UNHEARD_RESULTS = UNHEARD_CALLS.replace(calls("c.function.arguments | tojson"), "{{ '!' if m.role == 'tool' }}")


@pytest.mark.parametrize("source", [ALTERNATING_CALLS, UNHEARD_CALLS], ids=["refused", "lost"])
def test_text_of_the_user_behind_results_is_in_the_last_one_where_the_template_has_no_place_for_it(source: str) -> None:
    assert not forms(source).shows_user_behind_results
    two = call()["tool_calls"] + call("call00002")["tool_calls"]
    turn = [{"role": "assistant", "content": "", "tool_calls": two}, result(), result("call00002", parts("19"))]
    text = render(source, USER, *turn, LAST, {"role": "user", "content": parts("W")}, ANSWER, LAST)
    assert text.endswith("<tool>18</><tool>19\n\nV\n\nW</><assistant>A</><user>V</>")
    assert render(source, USER, *turn).endswith("<tool>18</><tool>19</>")


def test_text_of_the_user_behind_results_is_in_the_last_one_where_calls_are_text() -> None:
    text = render(UNHEARD_RESULTS, USER, call(), result(), LAST)
    assert text.endswith("\n</tool_call></><tool>18\n\nV!</>")


@pytest.mark.parametrize("source", [JSON_CALLS, TEXT_CALLS, CHATML], ids=["as JSON", "joined", "not shown"])
def test_text_of_the_user_behind_results_is_a_message_where_the_template_shows_it(source: str) -> None:
    assert forms(source).shows_user_behind_results
    assert render(source, USER, call(), result(), LAST).endswith("V</>")


# --- ids --------------------------------------------------------------------------------------------------------------

CHECKED = "{% if id|length != 9 %}{{ raise_exception('nine') }}{% endif %}{{ id }}"
CUT = "{% if id|length < 9 %}{{ raise_exception('nine') }}{% endif %}{{ id[-9:] }}"


def with_ids(check: str) -> str:
    return (
        HEAD + "{% if m.tool_calls %}{% for c in m.tool_calls %}{% set id = c.id %}" + check
        + "={{ c.function.name }}{{ c.function.arguments | tojson }} {% endfor %}{% elif m.role == 'tool' %}"
        "{% set id = m.tool_call_id %}" + check + ":{{ m.content }}{% else %}{{ m.content }}{% endif %}</>{% endfor %}"
    )


@pytest.mark.parametrize("ids", [["call00001"], ["call_1", "call_2"], ["toolu_" + "0" * 30, "c"], ["é" * 20, "\ud800"]])
def test_ids_have_nine_characters_where_the_template_demands_it(ids: list[str]) -> None:
    source = with_ids(CHECKED)
    assert forms(source).id_chars == (9, 9)
    made = [call(id_)["tool_calls"][0] for id_ in ids]
    results = [result(id_, f"of {number}") for number, id_ in enumerate(ids)]
    text = render(source, USER, {"role": "assistant", "tool_calls": made}, *results)
    written = re.findall(r"([^\s>]+)=get_weather", text)
    assert len(set(written)) == len(ids)
    assert all(len(id_) == 9 and id_.isalnum() and id_.isascii() for id_ in written)
    assert all(f"<tool>{id_}:of {number}</>" in text for number, id_ in enumerate(written))
    assert (written == ids) == (len(ids) == 1)
    assert text == render(source, USER, {"role": "assistant", "tool_calls": made}, *results), "an id stays the same"


def test_long_ids_stay_where_the_template_cuts_them() -> None:
    source = with_ids(CUT)
    assert forms(source).id_chars == (9, None)
    assert "<tool>123456789:18</>" in render(source, USER, call("call_123456789"), result("call_123456789"))
    assert "<tool>c1:" not in render(source, USER, call("c1"), result("c1"))
    assert forms(JSON_CALLS).id_chars == (0, None)


# --- system messages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "messages", "expected"),
    [
        (CHATML, [SYSTEM, USER, LATE], "<system>S</><user>U</><system>L</>"),
        (CHATML, [USER, LATE, ANSWER, LAST], "<user>U</><system>L</><assistant>A</><user>V</>"),
        (ONE_SYSTEM, [SYSTEM, USER, LATE], "<system>S\n\nL</><user>U</>"),
        (ONE_SYSTEM, [SYSTEM, SYSTEM, USER], "<system>S\n\nS</><user>U</>"),
        (ONE_SYSTEM, [USER, LATE], "<system>L</><user>U</>"),
        (ONE_SYSTEM, [USER, LATE, ANSWER, LATE, LAST], "<system>L\n\nL</><user>U</><assistant>A</><user>V</>"),
        (ONE_SYSTEM, [USER, LATE, LAST], "<system>L</><user>U\n\nV</>"),
        (ONE_SYSTEM, [USER, LAST], "<user>U</><user>V</>"),
        (ALTERNATING, [SYSTEM, USER, LATE, LAST, ANSWER], "<user>S\n\nL|U\n\nV</><assistant>A</>"),
        (ALTERNATING, [USER, ANSWER, LATE, LAST], "<user>L|U</><assistant>A</><user>V</>"),
        (NO_SYSTEM, [USER, LATE], "<user>U\n\nL</>"),
        (NO_SYSTEM, [USER, ANSWER, LATE, LAST], "<user>U</><assistant>A</><user>L\n\nV</>"),
        (NO_SYSTEM, [USER, ANSWER, LATE], "<user>U</><assistant>A</><user>L</>"),
    ],
)
def test_late_system_messages_are_kept_or_moved(source: str, messages: list[dict[str, Any]], expected: str) -> None:
    assert render(source, *messages) == expected
    as_developer = [message | {"role": message["role"].replace("system", "developer")} for message in messages]
    assert render(source, *as_developer) == expected


BEHIND_RESULT = "{% if m.role == 'system' and loop.previtem and loop.previtem.role == 'tool' %}"
LOSES_BEHIND_RESULTS = JSON_CALLS.replace(
    HEAD + "{{ m.content }}", HEAD + BEHIND_RESULT + "{% else %}{{ m.content }}{% endif %}"
)
FAILS_BEHIND_RESULTS = JSON_CALLS.replace(HEAD, HEAD + BEHIND_RESULT + "{{ raise_exception('no') }}{% endif %}")
ALTERNATING_AROUND_SYSTEM = (
    "{% set ns = namespace(last='') %}{% for m in messages %}{% if m.role != 'system' %}{% if m.role == ns.last %}"
    "{{ raise_exception('alternate') }}{% endif %}{% set ns.last = m.role %}{% endif %}"
    "{% if m.role not in ('system', 'user', 'assistant') %}{{ raise_exception('role') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}</>{% endfor %}"
)


@pytest.mark.parametrize("source", [FAILS_BEHIND_RESULTS, LOSES_BEHIND_RESULTS, ALTERNATING_AROUND_SYSTEM])
@pytest.mark.parametrize("behind", [[], [ANSWER, LAST], [LAST]], ids=["at the end", "answer", "user"])
def test_late_system_messages_behind_results_are_merged_where_the_template_has_no_place_for_them(
    source: str, behind: list[dict[str, Any]]
) -> None:
    text = render(source, SYSTEM, USER, call(content=""), result(), LATE, *behind)
    assert text.startswith("<system>S\n\nL</><user>U</>")
    assert "18" in text.split("L</>")[1]
    assert all(message["content"] in text for message in behind)


def test_late_system_messages_behind_results_are_kept_where_the_template_shows_them() -> None:
    text = render(JSON_CALLS, SYSTEM, USER, call(content=""), result(), LATE, LAST)
    assert text.endswith("<tool>18</><system>L</><user>V</>")


def test_late_parts_are_added_to_the_last_part() -> None:
    source = ONE_SYSTEM.replace("{{ m.content }}", "{% for p in m.content %}{{ p.text | trim }}{% endfor %}")
    messages = [{"role": "system", "content": parts("a", "b")}, USER, {"role": "system", "content": parts("c", "d")}]
    assert render(source, *messages) == "<system>ab\n\nc\nd</><user>U</>"


def test_role_of_a_developer_is_kept_where_the_template_knows_it() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'developer' %}DEVELOPER {{ m.content }}"
        "{% else %}<{{ m.role }}>{{ m.content }}</>{% endif %}{% endfor %}"
    )
    assert render(source, {"role": "developer", "content": "D"}, USER) == "DEVELOPER D<user>U</>"
    assert render(CHATML, {"role": "developer", "content": "D"}, USER) == "<system>D</><user>U</>"


def test_many_late_messages_take_linear_time() -> None:
    template = ChatTemplate(ONE_SYSTEM)
    late = {"role": "system", "content": "x" * 100}
    assert len(template.render([USER, *[late] * 30_000])) > 3_000_000


# --- templates by name, and the record --------------------------------------------------------------------------------


def test_template_for_tools_renders_conversations_with_tools() -> None:
    template = ChatTemplate({"default": CHATML, "tool_use": "{{ tools | tojson }}" + HEAD + LOOP + "</>{% endfor %}"})
    assert template.source == CHATML
    assert template.render([USER]) == template.render([USER], tools=[]) == "<user>U</>"
    assert template.render([USER], tools=[WEATHER]) == json.dumps([WEATHER]) + "<user>U</>"
    assert [own.contents["user"] for own in template.forms.values()] == ["text", "parts"]


def test_probe_knows_the_special_tokens() -> None:
    source = "{% if image_token == '<i>' %}{{ bos_token + messages[0].content }}{% endif %}"
    assert ChatTemplate(source, tokens={"image_token": "<i>"}).forms["default"].contents
    template = ChatTemplate(HEAD + "{{ bos_token + m.content[0].text }}{% endfor %}")
    assert template.render([USER], bos_token="<s>") == "<user><s>U"


def test_given_forms_are_not_probed() -> None:
    template = ChatTemplate(CHATML, forms={"default": TemplateForms(contents={"user": "parts"})})
    assert template.render([USER]) == "<user>" + str(parts("U")) + "</>"


@pytest.mark.parametrize("source", ["{% for %}", "{{ raise_exception('never') }}", "{{ 1 / 0 }}", ""])
def test_template_that_renders_nothing_gets_the_defaults(source: str) -> None:
    assert forms(source) == TemplateForms() or source == ""


def test_one_line_of_the_log_says_what_the_probe_found(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(with_ids(CHECKED))
    with caplog.at_level(logging.INFO, "quire.text.chat_template"):
        template.render([USER])
        template.render([USER, ANSWER])
    assert caplog.messages == [
        "chat template: contents as text; tools as text of the system; calls shown (arguments as objects, an empty "
        "content absent); results shown; late system messages kept; developer as system; ids of calls of 9 characters"
    ]
