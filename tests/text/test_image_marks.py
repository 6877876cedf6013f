"""Images in rendered conversations: each at its place, and placeholders that a client wrote as they are."""

from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.text.chat_template import ChatTemplate
from quire.text.image_marks import ImageMarks

MARKS = ImageMarks("<image>", "\ue000secret:")
ONE, TWO = MARKS.mark(0), MARKS.mark(1)
# LLaVA's: the images of a message come before its texts.
LLAVA = (
    "{% for m in messages %}{{ m['role'].upper() }}: "
    "{% for part in m['content'] | selectattr('type', 'equalto', 'image') %}{{ '<image>\\n' }}{% endfor %}"
    "{% for part in m['content'] | selectattr('type', 'equalto', 'text') %}{{ part['text'] | trim }}{% endfor %} "
    "{% endfor %}{% if add_generation_prompt %}ASSISTANT:{% endif %}"
)
# Qwen's: parts in their order, and contents that are text.
QWEN = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' or 'image' in p or 'image_url' in p %}<vision><image></vision>"
    "{% elif 'text' in p %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
TEXT_ALONE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
DROPS_OTHERS = (
    "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }} {% endif %}{% endfor %}"
    "{% endfor %}"
)


def text(value: str) -> dict[str, str]:
    return {"type": "text", "text": value}


def said(*parts: object, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(parts)}


def render(template: str, *messages: dict[str, Any], **settings: Any) -> str:  # noqa: ANN401 (of `render`)
    return ChatTemplate(template).render(list(messages), marks=MARKS, **settings)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (LLAVA, f"USER: {ONE}\nwhat is <image>? USER: {TWO}\nand this ASSISTANT:"),
        (QWEN, f"[user]what is <image>?<vision>{ONE}</vision>[user]<vision>{TWO}</vision>and this"),
        (TEXT_ALONE, f"user: what is <image>?\n{ONE}\nuser: {TWO}\nand this\n"),
        (DROPS_OTHERS, f"what is <image>? {ONE} {TWO} and this "),
    ],
)
def test_each_image_has_its_mark_at_its_place(template: str, expected: str) -> None:
    first = said(text("what is <image>?"), MARKS.part(0))
    assert render(template, first, said(MARKS.part(1), text("and this"))) == expected


def test_images_of_results_stay_with_their_calls() -> None:
    """Results move behind their calls, so that the images are not in the order of the messages."""
    call = {"id": "a", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    messages = [
        said(text("see")), {"role": "assistant", "tool_calls": [call]}, said(MARKS.part(0), text("own")),
        {"role": "tool", "tool_call_id": "a", "content": [MARKS.part(1), text("found")]},
    ]  # fmt: skip
    rendered = render(QWEN, *messages)
    assert rendered.index(TWO) < rendered.index(ONE)
    assert f"{TWO}\nfound" in rendered
    assert f"{ONE}\nown" in rendered


def test_a_placeholder_in_tools_and_in_a_continued_answer_is_text() -> None:
    messages = [said(MARKS.part(0)), said(text("it shows <image> and "), role="assistant")]
    continued = render(QWEN, *messages, add_generation_prompt=False, continue_final_message=True)
    assert continued == f"[user]<vision>{ONE}</vision>[assistant]it shows <image> and "
    tool = {"type": "function", "function": {"name": "f", "description": "writes <image>", "parameters": {}}}
    assert "writes <image>" in render(QWEN + "{{ tools | tojson }}", said(text("hi")), tools=[tool])


def test_a_template_that_writes_placeholders_without_images_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="does not write <image> once"):
        render("<image>{% for m in messages %}{{ m.content }}{% endfor %}", said(text("hi")))
    lost = render("{{ messages[-1].content[0].text }}", said(MARKS.part(0)), said(text("last")))
    assert MARKS.found(lost) == [], "refused where its images are placed"


def test_parts_without_a_mark_of_this_process_are_no_images() -> None:
    """A client cannot know the secret of the marks."""
    for part in ({"type": "image"}, {"type": "image", "text": "\ue000guess:0\ue001"}, {"type": "image", "text": 5}):
        with pytest.raises(InvalidRequestError, match=r"messages\[0\]\.content\[0\]"):
            render(QWEN, said(part))
    with pytest.raises(InvalidRequestError, match="only text; got the type 'image'"):
        ChatTemplate(QWEN).render([said(MARKS.part(0))])
