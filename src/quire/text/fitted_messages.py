"""Messages of a checked conversation in the forms that one chat template reads.

Results stand right behind their calls. What a template does not show becomes text that it shows: tools and their
results, calls, and system messages that are not the first message. What the user says behind results becomes text of
the last one where the template loses it. Calls of one message become messages of their own where the template shows one
alone.
"""

import json
from collections.abc import Callable, Sequence
from hashlib import sha256
from typing import Any

from quire.core.checks import shown
from quire.core.errors import InvalidRequestError
from quire.text.conversation import paired, plain_part, refuse, text_of
from quire.text.template_forms import NUM_ID_CHARS, EmptyContent, TemplateForms, as_content

Json = dict[str, Any]
# Calls of a message, names and arguments, as the text in which a model writes them. Arguments that are no JSON object
# are text.
WriteCalls = Callable[[Sequence[tuple[str, Any]]], str]

_SYSTEM_ROLES = ("system", "developer")
_ID_LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


def hermes_calls(calls: Sequence[tuple[str, Any]]) -> str:
    """Return calls in the form of Hermes' models, which many others know too."""
    texts = (json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False) for name, arguments in calls)
    return "\n".join(f"<tool_call>\n{text}\n</tool_call>" for text in texts)


def fitted_messages(conversation: Sequence[Json], forms: TemplateForms, write_calls: WriteCalls) -> list[Json]:
    """Return the messages that a template with such forms is run with, as new dicts."""
    first, *others = paired(conversation)
    messages = [_with_known_role(first, forms.knows_developer, forms)]
    messages += [_with_known_role(message, False, forms) for message in others]
    if forms.late_system != "kept":
        messages = _with_early_system(messages, forms)
    if not forms.shows_parallel_calls:
        messages = _with_single_calls(messages)
    if not forms.shows_results:
        messages = _with_results_as_text(messages, forms)
    elif not forms.shows_user_behind_results:
        messages = _with_user_in_results(messages)
    return [
        _with_calls(message, forms, write_calls) if "tool_calls" in message else _with_call_id(message, forms)
        for message in messages
    ]


def told_of_tools(messages: Sequence[Json], text: str, forms: TemplateForms) -> list[Json]:
    """Return fitted messages with a text about tools: at the end of the system's, or in front of the user's."""
    if forms.tools_role == "system":
        if messages[0]["role"] not in _SYSTEM_ROLES:
            return [_text_message("system", text, forms), *messages]
        return [_with_more(messages[0], [text]), *messages[1:]]
    index = next((index for index, message in enumerate(messages) if message["role"] == "user"), None)
    if index is None:
        return list(messages)
    told = _with_more(_text_message("user", text, forms), [text_of(messages[index].get("content"))])
    return [*messages[:index], messages[index] | told, *messages[index + 1 :]]


# --- contents ---------------------------------------------------------------------------------------------------------


def _text_message(role: str, text: str, forms: TemplateForms) -> Json:
    return {"role": role, "content": as_content(text, forms.content_form(role))}


def _with_more(message: Json, texts: Sequence[str], between: str = "\n\n") -> Json:
    """Return a message with texts behind its content: in the last of parts, since some templates trim each part."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return message | {"content": between.join([content, *texts] if content else texts)}
    *earlier, last = content
    joined = between.join([last["text"], *texts] if earlier or last["text"] else texts)
    return message | {"content": [*earlier, plain_part(joined)]}


# --- roles of the system ----------------------------------------------------------------------------------------------


def _with_known_role(message: Json, may_develop: bool, forms: TemplateForms) -> Json:
    """Return a message with its content in a form that the template reads; a developer is a system unless it may be."""
    role = "system" if message["role"] == "developer" and not may_develop else message["role"]
    if "content" not in message:
        return message | {"role": role}
    content, form = message["content"], forms.content_form(role)
    is_read = form == "text or parts" or (form == "parts" and not isinstance(content, str))
    is_read &= content != []           # some templates read the first part
    return message | {"role": role, "content": content if is_read else as_content(text_of(content), form)}


def _with_early_system(messages: Sequence[Json], forms: TemplateForms) -> list[Json]:
    """Return the messages with late system messages in the first message, or as text of the user.

    Messages of the user that would follow each other only because of that become one: many templates demand that roles
    alternate.
    """
    first, joins = list[str](), False      # texts for the first message; True: the user's next text joins the last one
    turns = [(messages[0], list[str]())]   # messages, each with the texts that follow its own
    for message in messages[1:]:
        last, more = turns[-1]
        is_late, follows_user = message["role"] == "system", last["role"] == "user"
        if is_late and forms.late_system == "merged":
            first.append(text_of(message.get("content")))
            joins = follows_user
        elif follows_user and (is_late or (joins and message["role"] == "user")):
            more.append(text_of(message.get("content")))
            joins = True
        else:
            turns.append((message | {"role": "user"} if is_late else message, []))
            joins = is_late
    placed = [_with_more(message, more) if more else message for message, more in turns]
    if first and placed[0]["role"] in _SYSTEM_ROLES:
        placed[0] = _with_more(placed[0], first)
    elif first:
        placed.insert(0, _text_message("system", "\n\n".join(first), forms))
    return placed


# --- calls and results ------------------------------------------------------------------------------------------------


def _with_single_calls(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with a message for each call, and behind it the results with its id.

    Results without a call's id are behind the last call.
    """
    single, index = list[Json](), 0
    while index < len(messages):
        message, calls = messages[index], messages[index].get("tool_calls", ())
        index += 1
        if len(calls) < 2:
            single.append(message)
            continue
        ids = [_id_or_none(call.get("id")) for call in calls]
        results: dict[str | None, list[Json]] = {id_: [] for id_ in (*ids, None)}
        while index < len(messages) and messages[index]["role"] == "tool":
            given = _id_or_none(messages[index].get("tool_call_id"))
            results[given if given in results else None].append(messages[index])
            index += 1
        others = results.pop(None)
        for number, (id_, call) in enumerate(zip(ids, calls, strict=True)):
            alone = message if number == 0 else {"role": message["role"]}
            single += [alone | {"tool_calls": [call]}, *results.pop(id_, ())]
        single += others
    return single


def _id_or_none(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _with_results_as_text(messages: Sequence[Json], forms: TemplateForms) -> list[Json]:
    """Return the messages with results of tools as text of the user.

    Results in a row, and what the user says behind them, are one message: many templates demand that roles alternate.
    """
    turns: list[tuple[Json, list[str]]] = []    # messages, each with the texts that follow its own
    follows_result = False
    for message in messages:
        is_result, text = message["role"] == "tool", text_of(message.get("content"))
        if not is_result and not (follows_result and message["role"] == "user"):
            turns.append((message, []))
        elif follows_result:
            turns[-1][1].append(_result_text(text) if is_result else f"\n{text}")
        else:
            turns.append((_text_message("user", _result_text(text), forms), []))
        follows_result = is_result
    return [_with_more(message, more, "\n") if more else message for message, more in turns]


def _with_user_in_results(messages: Sequence[Json]) -> list[Json]:
    """Return the messages with what the user says behind results as text of the last one."""
    turns: list[tuple[Json, list[str]]] = []    # messages, each with the texts that follow its own
    follows_result = False                      # maybe with texts of the user between
    for message in messages:
        if follows_result and message["role"] == "user":
            turns[-1][1].append(text_of(message.get("content")))
        else:
            turns.append((message, []))
            follows_result = message["role"] == "tool"
    return [_with_more(message, more) if more else message for message, more in turns]


def _result_text(text: str) -> str:
    return f"<tool_response>\n{text}\n</tool_response>"


def _with_calls(message: Json, forms: TemplateForms, write_calls: WriteCalls) -> Json:
    """Return a message with its calls in the template's form, or as text where the template would not show them."""
    plain = {name: value for name, value in message.items() if name not in ("tool_calls", "content")}
    content, calls = message.get("content"), message["tool_calls"]
    has_text = bool(text_of(content))
    if not forms.shows_calls or (has_text and not forms.shows_calls_beside_content):
        text = write_calls([(call["function"]["name"], _as_object(call["function"]["arguments"])) for call in calls])
        if has_text:
            return _with_more(plain | {"content": content}, [text], "\n")
        return plain | _text_message(message["role"], text, forms)
    read = _as_object if forms.arguments == "object" else _as_text
    plain["tool_calls"] = [
        _with_call_id(call, forms)
        | {"function": call["function"] | {"arguments": read(call["function"]["arguments"])}}
        for call in calls
    ]
    if has_text:
        return plain | {"content": content}
    given: EmptyContent = "absent" if content is None else "empty"
    chosen = given if given in forms.empty_contents else forms.empty_contents[0]
    empty = {"absent": {}, "empty": _text_message(message["role"], "", forms), "null": {"content": None}}
    return plain | empty[chosen]


def _with_call_id(value: Json, forms: TemplateForms) -> Json:
    """Return a call, or the message of its result, with an id of a length that the template accepts.

    An id always becomes the same other one, so that results stay with their calls, and prompts with their prefixes.
    """
    name = "tool_call_id" if "role" in value else "id"
    given, (least, most) = value.get(name), forms.id_chars
    if not isinstance(given, str) or (least <= len(given) and (most is None or len(given) <= most)):
        return value
    number = int.from_bytes(sha256(given.encode(errors="surrogatepass")).digest())
    digits = (_ID_LETTERS[number // len(_ID_LETTERS) ** place % len(_ID_LETTERS)] for place in range(NUM_ID_CHARS))
    return value | {name: "".join(digits)}


def check_arguments(conversation: Sequence[Json], error: InvalidRequestError) -> None:
    """Name arguments that are no object, such as cut ones, as the cause of a template's error, if there are any."""
    for index, message in enumerate(conversation):
        for number, call in enumerate(message.get("tool_calls", ())):
            arguments = call["function"]["arguments"]
            if not isinstance(_as_object(arguments), dict):
                field = f"messages[{index}].tool_calls[{number}].function.arguments"
                refuse(f"{field} must be a JSON object, got {shown(arguments)}: {error}", error.__cause__)


def _as_object(arguments: object) -> object:
    """Return the object that a JSON text is. A text that is none, such as a cut one, remains as it is."""
    if arguments is None or arguments == "":
        return {}
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(arguments: object) -> str:
    """Return arguments as JSON text: the one that is given."""
    if isinstance(arguments, str):
        return arguments or "{}"
    return json.dumps({} if arguments is None else arguments, ensure_ascii=False)
