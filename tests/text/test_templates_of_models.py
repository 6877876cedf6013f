"""Templates of models render the texts of transformers, but for the differences that a table lists with their reasons.

The templates are those of trl 1.16 and of ../shared/data/chat_templates, where they are installed, and some of our own.
A difference is a change of the messages: with it made, transformers renders the same text.
"""

import importlib.util
import json
from collections.abc import Callable, Iterator
from fnmatch import fnmatch
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.text.chat_template import ChatTemplate
from quire.text.fitted_messages import WriteCalls, hermes_calls
from quire.text.tool_formats.writing import recognized_writer
from quire.text.tools import tools_text

utils = pytest.importorskip("transformers.utils.chat_template_utils")

DATA = Path(__file__).parents[2] / "../shared/data/chat_templates"
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

Messages = list[dict[str, Any]]


# --- conversations ----------------------------------------------------------------------------------------------------


def says(role: str, content: object, **fields: object) -> dict[str, Any]:
    return {"role": role, "content": content, **fields}


def called(*cities: str, content: str | None = None) -> dict[str, Any]:
    calls = [
        {"id": f"call0000{number}", "type": "function",
         "function": {"name": "get_weather", "arguments": {"city": city}}}
        for number, city in enumerate(cities)
    ]  # fmt: skip
    return {"role": "assistant"} | ({} if content is None else {"content": content}) | {"tool_calls": calls}


def result(number: int, text: str) -> dict[str, Any]:
    return says("tool", text, tool_call_id=f"call0000{number}", name="get_weather")


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


SYSTEM, USER = says("system", "Be terse."), says("user", "Weather in Ulm?")
HOT, WHY = says("assistant", "Hot."), says("user", "Why?")
WEATHER = {"type": "function", "function": {
    "name": "get_weather", "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string", "description": "its name"}},
                   "required": ["city"]},
}}  # fmt: skip
CONVERSATIONS: dict[str, Messages] = {
    "system": [SYSTEM, USER],
    "late system": [SYSTEM, USER, HOT, says("system", "Now be polite."), WHY],
    "turns": [USER, HOT, WHY, HOT, WHY],
    "call": [USER, called("Ulm"), result(0, "18 degrees")],
    "call beside content": [SYSTEM, USER, called("Ulm", content="Let me see."), result(0, "18"), HOT, WHY],
    "calls": [USER, called("Ulm", "Rome", content=""), result(0, "18"), result(1, "25")],
    "user behind a result": [USER, called("Ulm"), result(0, "18"), WHY],
    "parts": [says("system", parts("Be terse.")), says("user", parts("One.", "Two.")), says("assistant", parts("3."))],
    "reasoning": [USER, HOT | {"reasoning_content": "It is summer."}, WHY],
    "empty content": [SYSTEM, USER, says("assistant", ""), WHY],
    "developer": [says("developer", "Be terse."), USER],
}


# --- differences ------------------------------------------------------------------------------------------------------


def text_of(content: object) -> str:
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content)  # type: ignore[attr-defined]


def joined_parts(*roles: str) -> Callable[[Messages], Messages]:
    """Contents of these roles are texts: the template would write a list as it is, or fails on one."""
    return lambda messages: [
        message | {"content": text_of(message["content"])} if message["role"] in roles and "content" in message
        else message for message in messages
    ]  # fmt: skip


def as_parts(messages: Messages) -> Messages:
    """Contents are lists of parts: the template would lose a text."""
    return [
        message | ({"content": parts(message["content"])} if isinstance(message["content"], str) else {})
        for message in messages
    ]


def as_one_part(messages: Messages) -> Messages:
    """Contents of all but the user are lists of one part, of which alone the template reads the text."""
    return [
        message if message["role"] == "user" else message | {"content": parts(text_of(message["content"]))}
        for message in as_parts(messages)
    ]


def developer_as_system(messages: Messages) -> Messages:
    """A developer is a system: the template would only repeat the word, lose the text or fail."""
    return [message | {"role": message["role"].replace("developer", "system")} for message in messages]


def merged(messages: Messages) -> Messages:
    """Late system messages are part of the first: the template would lose one or fails."""
    first, *others = messages
    late = [message for message in others if message["role"] == "system"]
    whole = {"content": "\n\n".join(text_of(message["content"]) for message in (first, *late))} if late else {}
    return [first | whole, *(message for message in others if message not in late)]


def system_as_user(messages: Messages) -> Messages:
    """Late system messages are text of the user: the template shows none."""
    if messages != CONVERSATIONS["late system"]:
        return messages
    *before, _, last = messages
    return [*before, last | {"content": f"Now be polite.\n\n{last['content']}"}]


def calls_as_text(messages: Messages, write: WriteCalls = hermes_calls) -> Messages:
    """Calls are text: the template would lose them."""
    written = []
    for message in messages:
        if "tool_calls" in message:
            functions = [call["function"] for call in message["tool_calls"]]
            made = write([(function["name"], function["arguments"]) for function in functions])
            written.append(says("assistant", "\n".join(filter(None, [message.get("content"), made]))))
        else:
            written.append(message)
    return written


def calls_beside_content_as_text(messages: Messages, write: WriteCalls = hermes_calls) -> Messages:
    """Calls beside a content are text behind it: the template would lose them."""
    return [calls_as_text([message], write)[0] if message.get("content") else message for message in messages]


def results_as_text(messages: Messages) -> Messages:
    """Results are text of the user: the template does not know the role."""
    written: Messages = []
    for message in messages:
        text = f"<tool_response>\n{message['content']}\n</tool_response>" if message["role"] == "tool" else ""
        if text and written[-1].get("is_result"):
            written[-1]["content"] += f"\n{text}"
        elif message["role"] == "user" and written and written[-1].get("is_result"):
            written[-1]["content"] += f"\n\n{message['content']}"
        else:
            written.append({"role": "user", "content": text, "is_result": True} if text else message)
    return written


def single_calls(messages: Messages) -> Messages:
    """Each call is a message with its result behind it: the template fails on several or loses all but the first."""
    if messages != CONVERSATIONS["calls"]:
        return messages
    asked, calling, of_first, of_second = messages
    first, second = calling["tool_calls"]
    alone = calling | {"tool_calls": [first]}
    return [asked, alone, of_first, {"role": "assistant", "tool_calls": [second]}, of_second]


def user_in_results(messages: Messages) -> Messages:
    """What the user says behind a result is text of it: the template fails."""
    if messages != CONVERSATIONS["user behind a result"]:
        return messages
    *before, last, said = messages
    return [*before, last | {"content": f"{last['content']}\n\n{said['content']}"}]


def told_of_tools(messages: Messages) -> Messages:
    """Tools are described in the first system message: the template shows none."""
    if not has_calls(messages):
        return messages
    text = tools_text([WEATHER], hermes_calls if any("<tool_call>" in str(message) for message in messages) else None)
    first, *others = messages
    if first["role"] != "system":
        return [says("system", text), *messages]
    return [first | {"content": f"{first['content']}\n\n{text}"}, *others]


def user_told_of_tools(messages: Messages) -> Messages:
    """Tools are described in front of the user's first text: the template shows neither tools nor the system's text."""
    if not has_calls(messages):
        return messages
    at = 1 if messages[0]["role"] == "system" else 0
    told = messages[at] | {"content": tools_text([WEATHER], hermes_calls) + f"\n\n{messages[at]['content']}"}
    return [*messages[:at], told, *messages[at + 1 :]]


def json_arguments(messages: Messages) -> Messages:
    """Arguments are JSON text: the template joins them to others, which fails with an object."""
    changed = json.loads(json.dumps(messages))
    for message in changed:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    return changed  # type: ignore[no-any-return]


def with_content(content: str | None) -> Callable[[Messages], Messages]:
    """The content beside calls is this one: only then the template shows the calls."""
    return lambda messages: [
        message | {"content": content} if "tool_calls" in message and not message.get("content") else message
        for message in messages
    ]


def has_calls(messages: Messages) -> bool:
    return any(word in str(messages) for word in ("tool_calls", "tool_response"))


TEXTS, SYSTEM_TEXT = joined_parts("system", "user", "assistant", "developer"), joined_parts("system")
NO_TOOLS = (calls_as_text, results_as_text, told_of_tools)
DIFFERENCES: dict[tuple[Callable[[Messages], Messages], ...], str] = {
    (): "diffusion_gemma* gemma4 gemma4_v4 gemma4_v5 own_all",
    (SYSTEM_TEXT,): "gemma4_v2 gemma4_v3",
    (developer_as_system,): "glm4moe* lfm2_2_5* muse_glimmer* own_either",
    (TEXTS, developer_as_system): (
        "lfm2_v2* nemotron_3* qwen2_5 qwen2_5_training qwen3 qwen3_training qwen3_instruct_2507* "
        "ct_qwen2.5-instruct vllm_tool_chat_template_granite vllm_tool_chat_template_hermes "
        "vllm_tool_chat_template_llama3.2_pythonic vllm_tool_chat_template_toolace own_calls"
    ),
    (TEXTS, developer_as_system, single_calls): "llama3_1 llama3_2",
    (SYSTEM_TEXT, developer_as_system, single_calls): "vllm_tool_chat_template_llama3.?_json",
    (developer_as_system, merged): "qwen3_5* qwen3_6* qwen3_8* qwen3_vl*",
    (TEXTS, merged, single_calls): "gptoss*",
    (TEXTS, developer_as_system, merged): "vllm_tool_chat_template_internlm2_tool own_one_system",
    (TEXTS, developer_as_system, merged, user_in_results): "vllm_tool_chat_template_mistral*",
    (TEXTS, developer_as_system, system_as_user): "vllm_tool_chat_template_granite_20b_fc",
    (TEXTS, developer_as_system, calls_as_text): "lfm2 lfm2_training own_no_calls",
    (TEXTS, developer_as_system, calls_as_text, results_as_text): "ct_granite-3.0-instruct",
    (TEXTS, developer_as_system, told_of_tools, json_arguments, with_content("")): "deepseekv3 own_joined",
    (TEXTS, developer_as_system, told_of_tools, with_content("")): "deepseekv3_training",
    (
        TEXTS, developer_as_system, merged, told_of_tools, calls_beside_content_as_text, json_arguments,
        with_content(None),
    ): "deepseek_r1_distill*",
    (developer_as_system, *NO_TOOLS): "qwen2_5_vl* vllm_template_dse_qwen2_vl",
    (TEXTS, developer_as_system, *NO_TOOLS): (
        "llama3 llama3_training phi3* vllm_template_chatml vllm_template_falcon_180b own_chatml"
    ),
    (TEXTS, developer_as_system, merged, *NO_TOOLS): (
        "cohere* ct_* vllm_template_alpaca vllm_template_baichuan vllm_template_deepseek_vl2 "
        "vllm_template_inkbot vllm_template_llava"
    ),
    (SYSTEM_TEXT, developer_as_system, merged, *NO_TOOLS): "gemma3 gemma3_training",
    (TEXTS, developer_as_system, system_as_user, calls_as_text, results_as_text, user_told_of_tools): (
        "gemma gemma_training vllm_template_blip2 vllm_template_chatglm* vllm_template_falcon own_no_system"
    ),
    (developer_as_system, *NO_TOOLS, as_parts): "idefics3* smolvlm* own_parts",
    (developer_as_system, *NO_TOOLS, as_one_part): "llava_next*",
    (developer_as_system, system_as_user, calls_as_text, results_as_text, user_told_of_tools, as_parts):
        "vllm_template_vlm2vec",
}  # fmt: skip

# --- templates --------------------------------------------------------------------------------------------------------

_HEAD = "{{ bos_token }}{% for m in messages %}<|{{ m.role }}|>"
_END = "<|end|>{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
_PARTS = "{% for p in m.content %}{{ p.text }}{% endfor %}"
_ARGUMENTS = "{{ c.function.arguments | tojson }}"
_CALLS = "{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} " + _ARGUMENTS + "</call>{% endfor %}"
_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}"
_EITHER = "{% if m.content is string %}{{ m.content }}{% else %}" + _PARTS + "{% endif %}"
OWN = {
    "own_all": _TOOLS + _HEAD.replace("m.role", "'SYS' if m.role == 'developer' else m.role") + _EITHER + _CALLS + _END,
    "own_either": _TOOLS + _HEAD + _EITHER + _CALLS + _END,
    "own_calls": _TOOLS + _HEAD + "{{ m.content }}" + _CALLS + _END,
    "own_one_system": _TOOLS + _HEAD + "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late') }}"
    "{% endif %}{{ m.content }}" + _CALLS + _END,
    "own_no_calls": _TOOLS + _HEAD + "{{ m.content }}" + _END,
    "own_joined": _HEAD + "{{ m.content + '' }}" + _CALLS.replace(_ARGUMENTS, "{{ '' + c.function.arguments }}") + _END,
    "own_chatml": _HEAD + "{{ m.content }}" + _END,
    "own_parts": _HEAD + _PARTS + _END,
    "own_no_system": _HEAD + "{% if m.role not in ('user', 'assistant') %}{{ raise_exception('role') }}{% endif %}"
    "{{ m.content }}" + _END,
}  # fmt: skip


def templates(source: str) -> Iterator[tuple[str, str]]:
    """Yield names and texts of templates."""
    if source == "our own":
        yield from OWN.items()
        return
    folder, reason = DATA, "../shared/data is not here"
    if source == "trl":
        spec = importlib.util.find_spec("trl")
        reason = "needs trl: pip install --no-deps trl==1.16.0"
        folder = Path("absent" if spec is None or spec.origin is None else spec.origin).parent / "chat_templates"
    if not folder.is_dir():
        pytest.skip(reason)
    for path in sorted(folder.glob("*.jinja")):
        yield path.stem, path.read_text(encoding="utf-8")


def changes_of(name: str) -> tuple[Callable[[Messages], Messages], ...]:
    """Return the differences of a template: by its own name before a pattern of names."""
    for names in ([name], None):
        for changes, patterns in DIFFERENCES.items():
            listed = patterns.split()
            if name in listed if names else any(fnmatch(name, pattern) for pattern in listed):
                return changes
    raise AssertionError(f"{name} is in no row of the table")


def in_transformers(source: str, messages: Messages, tools: list[Any] | None) -> str | None:
    try:
        texts, _ = utils.render_jinja_template(
            [messages], tools=tools, chat_template=source, add_generation_prompt=True, **TOKENS
        )
    except Exception:  # values of many types
        return None
    return str(texts[0])


def ours(template: ChatTemplate, messages: Messages, tools: list[Any] | None) -> str | None:
    sent = json_arguments(messages)     # as clients do
    for message in sent:
        message.setdefault("content", None)
    try:
        return template.render(sent, tools=tools, **TOKENS)
    except InvalidRequestError:
        return None


@pytest.mark.parametrize(("source", "num_same"), [("our own", 62), ("trl", 529), ("shared", 232)])
def test_texts_are_those_of_transformers_but_for_listed_differences(source: str, num_same: int) -> None:
    found = 0
    for name, text in templates(source):
        template, changes = ChatTemplate(text), changes_of(name)
        for kind, messages in CONVERSATIONS.items():
            tools = [WEATHER] if has_calls(messages) else None
            rendered, expected = ours(template, messages, tools), in_transformers(text, messages, tools)
            found += rendered == expected
            if rendered != expected:
                assert rendered is not None, f"{name}, {kind}: refused, and rendered by transformers"
                changed, write = messages, recognized_writer([text]) or hermes_calls
                for change in changes:
                    writes = change in (calls_as_text, calls_beside_content_as_text)
                    changed = partial(change, write=write)(changed) if writes else change(changed)
                shown = None if told_of_tools in changes or user_told_of_tools in changes else tools
                assert rendered == in_transformers(text, changed, shown), f"{name}, {kind}"
    assert found == num_same
