"""Forms of messages that a chat template reads, found by one probe when the template is loaded.

Requests have OpenAI's form, and templates differ. They read contents as texts or as lists of parts, and arguments of
calls as objects or as JSON texts. They write a call only beside a content that is absent, empty or null, and lose or
refuse system messages behind the first message. The probe renders some thirty small conversations with marks in their
texts. A form is read if its marks are in what is rendered; of several such forms the one that transformers passes on is
chosen.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quire.text.conversation import Message, plain_part
from quire.text.tools import Tool

Run = Callable[[Sequence[Message], Sequence[Tool] | None], str | None]

ContentForm = Literal["text", "parts", "one part", "text or parts"]
EmptyContent = Literal["absent", "empty", "null"]
Arguments = Literal["object", "text"]
Role = Literal["system", "user"]

NUM_ID_CHARS = 9  # length of the ids of calls that Mistral's templates accept


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateForms:
    """Forms that a template reads; the defaults are for a template that renders no conversation of the probe."""

    contents: Mapping[str, ContentForm] = field(default_factory=dict)  # keyed by role; "one part": a list of one
    knows_developer: bool = False                  # a first developer message; a later one is a system
    late_system: Literal["kept", "merged", "user"] = "kept"  # "merged": into the first message; "user": has that role
    shows_tools: bool = True
    tool_defaults: tuple[str, ...] = ()            # fields without which a function is refused
    tools_role: Role | None = None                 # the role with a text that describes tools; None: none is shown
    shows_calls: bool = True
    shows_calls_beside_content: bool = True
    shows_parallel_calls: bool = True              # several calls of one message
    shows_results: bool = True                     # messages of the role `tool`
    shows_user_behind_results: bool = True         # where results are shown
    arguments: Arguments = "object"
    empty_contents: tuple[EmptyContent, ...] = ("absent", "empty", "null")  # for calls without a text, preferred first
    id_chars: tuple[int, int | None] = (0, None)   # least and most characters of the id of a call

    def content_form(self, role: str) -> ContentForm:
        """Return the form of a role's contents: that of the user for a role that was not probed."""
        return self.contents.get(role, self.contents.get("user", "text"))

    @property
    def tells_format(self) -> bool:
        """True if tools are described to the model with the format of calls, since the template shows neither."""
        return not self.shows_tools and not self.shows_calls

    def describe(self) -> str:
        """Return the forms in words, for the log."""
        forms = dict.fromkeys(self.contents.values())
        roles = {form: [role for role, own in self.contents.items() if own == form] for form in forms}
        each = [f"{form} ({', '.join(roles[form])})" if len(forms) > 1 else form for form in forms]
        told = f"as text of the {self.tools_role}" if self.tools_role else "not at all"
        words = [f"contents as {', '.join(each) or 'text'}", f"tools {'shown' if self.shows_tools else told}"]
        if self.shows_calls:
            beside = "" if self.shows_calls_beside_content else " where they have no content"
            content, arguments = self.empty_contents[0], {"object": "objects", "text": "JSON text"}[self.arguments]
            each_call = "calls" if self.shows_parallel_calls else "single calls"
            words.append(f"{each_call} shown{beside} (arguments as {arguments}, an empty content {content})")
        else:
            words.append("calls as text")
        words.append(f"results {'shown' if self.shows_results else 'as text of the user'}")
        if not self.shows_user_behind_results:
            words.append("text of the user behind results in the last of them")
        late = {"kept": "kept", "merged": "merged into the first", "user": "as text of the user"}
        words.append(f"late system messages {late[self.late_system]}")
        if not self.knows_developer:
            words.append("developer as system")
        if self.id_chars != (0, None):
            words.append(f"ids of calls of {NUM_ID_CHARS} characters")
        return "; ".join(words)


def as_content(text: str, form: ContentForm) -> str | list[dict[str, Any]]:
    """Return a text as the content of a message."""
    return text if form in ("text", "text or parts") else [plain_part(text)]


def probe(run: Run) -> TemplateForms:
    """Return the forms that a template reads. `run` renders messages and tools; it returns None for a failure."""
    return _Probe(run).forms()


# --- the probe --------------------------------------------------------------------------------------------------------

# Marks are words of letters and digits, which no template changes.
_MARKS = _SYSTEM, _USER, _ANSWER, _LATE, _LAST, _RESULT = tuple(f"quire{number}mark" for number in range(6))
_PAIR = ("quirefirst", "quiresecond")
_UNKNOWN_ROLE = "quirerole"
_CALL = ("quirecall", "quirekey", "quirevalue")   # name, key and value of an argument
_OTHER_CALL = ("quirenext", "quirekey", "quireother")
_IDS = {"short": "c1", "nine": "quirecall", "long": "call_0123456789abcdef01234567", "other": "quirenext"}
_TOOL: Mapping[str, Any] = {
    "name": "quiretool",
    "description": "quiredescribes",
    "parameters": {
        "type": "object", "properties": {"other": {"type": "string", "description": "d"}}, "required": ["other"],
    },
}  # fmt: skip
_EMPTY: Mapping[EmptyContent, dict[str, Any]] = {"absent": {}, "empty": {"content": ""}, "null": {"content": None}}
_NONE: Message = {}
_PART_AS_TEXT = re.compile(r"""(['"])type\1 ?: ?(['"])text\2""")   # a list of parts that was written as it is
_NULL_AS_TEXT = re.compile(r"\b(?:None|null)\b")


class _Probe:
    """Questions to one template. Conversations have the forms that earlier questions found."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._contents: dict[str, ContentForm] = {}

    def forms(self) -> TemplateForms:
        self._contents["user"] = self._content_form("user")
        user = self._says("user", _USER)
        if self._run([user], None) is None:
            return TemplateForms()
        self._contents["system"] = self._content_form("system", after=[user])
        self._contents["assistant"] = self._content_form("assistant", [user], [self._says("user", _LAST)])
        knows_developer = self._knows("developer", lambda role: [{"role": role, "content": _SYSTEM}, user], _SYSTEM)
        if knows_developer:
            self._contents["developer"] = self._contents["system"]
        tools = self._tools(user)
        calls, called = self._calls(user, shows_tools=tools.get("shows_tools", True))
        late_system = self._late_system(user, called)
        return TemplateForms(
            contents=self._contents, knows_developer=knows_developer, late_system=late_system, **tools, **calls
        )

    def _content_form(
        self, role: str, before: Sequence[Message] = (), after: Sequence[Message] = (), fields: Message = _NONE
    ) -> ContentForm:
        """Return the form of a role's contents; if the template shows none, that of the user, or text.

        `fields`: others of the message.
        """

        def reads(content: object) -> bool:
            text = self._run([*before, {"role": role, "content": content, **fields}, *after], [_tool()])
            return text is not None and all(mark in text for mark in _PAIR) and not _PART_AS_TEXT.search(text)

        reads_text, reads_parts = reads(" ".join(_PAIR)), reads([plain_part(mark) for mark in _PAIR])
        if reads_text:
            return "text or parts" if reads_parts else "text"
        if reads_parts:
            return "parts"
        return "one part" if reads([plain_part(" ".join(_PAIR))]) else self._contents.get("user", "text")

    def _late_system(self, user: Message, called: Sequence[Message]) -> Literal["kept", "merged", "user"]:
        """Return what is done with a system message that is not the first message.

        It may follow a text of the user, one of the assistant, or the result of a call, which `called` ends with, and
        precede each of them.
        """
        system, late, last = self._says("system", _SYSTEM), self._says("system", _LATE), self._says("user", _LAST)
        answer = self._says("assistant", _ANSWER)
        places = [[user, late], [system, user, late], [system, user, answer, late, last]]
        if self._run(called, [_tool()]) is not None:
            places += [[*called, late, *behind] for behind in ([], [last], [answer, last])]
        if all(self._shows_all(messages) for messages in places):
            return "kept"
        return "merged" if self._shows([system, user], (_SYSTEM, _USER)) else "user"

    def _tools(self, user: Message) -> dict[str, Any]:
        """Return the fields of the record that are about tools."""
        opening = [self._says("system", _SYSTEM), user]
        if not any(self._shows(messages, (_TOOL["name"],), [_tool()]) for messages in ([user], opening)):
            roles: tuple[tuple[Role, str], ...] = (("system", _SYSTEM), ("user", _USER))
            shown = (role for role, mark in roles if self._shows(opening if role == "system" else [user], (mark,)))
            return {"shows_tools": False, "tools_role": next(shown, None)}
        lacking = {
            "description": {name: value for name, value in _TOOL.items() if name != "description"},
            "parameters": {name: value for name, value in _TOOL.items() if name != "parameters"},
            "properties": {**_TOOL, "parameters": {"type": "object"}},
        }
        if self._run([user], [_tool()]) is None:
            return {}
        failed = (name for name, function in lacking.items() if self._run([user], [_tool(function)]) is None)
        return {"tool_defaults": tuple(failed)}

    def _calls(self, user: Message, *, shows_tools: bool) -> tuple[dict[str, Any], list[Message]]:
        """Return the fields of the record that are about calls and their results, and messages that end with a result.

        A template that shows calls or tools is of a model that knows the role of results, also if it repeats the role.
        """
        for shows_results in (True, False):
            turns = [self._turn(user, arguments, shows_results=shows_results) for arguments in ("object", "text")]
            shown = [turn for turn in turns if turn.empty_contents]
            if shown:
                turn = next((turn for turn in shown if turn.is_json), shown[0])
                return self._shown_calls(turn), turn.messages(_EMPTY[turn.empty_contents[0]])
        said = [user, self._says("assistant", _ANSWER)]
        fields = {"name": _CALL[0], "tool_call_id": _IDS["nine"]}

        def result(role: str) -> list[Message]:
            return [*said, {"role": role, "content": _RESULT, **fields}]

        is_known = self._shows(result("tool"), (_RESULT,)) if shows_tools else self._knows("tool", result, _RESULT)
        if is_known:
            self._contents["tool"] = self._content_form("tool", said, fields=fields)
        known = {
            "shows_calls": False,
            "shows_results": is_known,
            "shows_user_behind_results": not is_known or self._shows_user_behind(result("tool")),
        }
        return known, result("tool") if is_known else [*said, user]

    def _turn(self, user: Message, arguments: Arguments, *, shows_results: bool) -> "_Turn":
        """Return which contents beside a call with such arguments let the call appear."""
        turn = _Turn(user, arguments, shows_results)
        texts = {name: self._run(turn.messages(_EMPTY[name]), [_tool()]) for name in _EMPTY}
        marks = (*_CALL, _RESULT) if shows_results else _CALL
        shown = {name: text for name, text in texts.items() if text is not None and all(mark in text for mark in marks)}
        num_nulls = {name: len(_NULL_AS_TEXT.findall(text)) for name, text in shown.items()}
        turn.empty_contents = tuple(name for name in shown if num_nulls[name] == min(num_nulls.values()))
        turn.is_json = bool(shown) and f"'{_CALL[1]}'" not in shown[turn.empty_contents[0]]  # no dict of Python
        return turn

    def _shown_calls(self, turn: "_Turn") -> dict[str, Any]:
        """Return the fields of the record for a template that shows the calls of a turn."""
        empty = _EMPTY[turn.empty_contents[0]]
        beside = {"content": as_content(_ANSWER, self._contents["assistant"])}
        if turn.shows_results:
            *before, result = turn.messages(empty)
            fields = {name: result[name] for name in ("name", "tool_call_id")}
            self._contents["tool"] = self._content_form("tool", before, fields=fields)
        two_calls = [turn.two_calls(empty, together=together) for together in (True, False)]
        together, single = (self._shows(turns, (_CALL[2], _OTHER_CALL[2]), [_tool()]) for turns in two_calls)
        works = {kind: self._shows(turn.messages(empty, kind), _CALL, [_tool()]) for kind in ("short", "long")}
        return {
            "shows_calls_beside_content": self._shows(turn.messages(beside), _CALL, [_tool()]),
            "shows_parallel_calls": together or not single,
            "shows_results": turn.shows_results,
            "shows_user_behind_results": not turn.shows_results or self._shows_user_behind(turn.messages(empty)),
            "arguments": turn.arguments,
            "empty_contents": turn.empty_contents,
            "id_chars": (0 if works["short"] else NUM_ID_CHARS, None if works["long"] else NUM_ID_CHARS),
        }

    def _shows_user_behind(self, messages: Sequence[Message]) -> bool:
        """Return whether a text of the user is shown behind messages that end with a result."""
        return self._shows([*messages, self._says("user", _LAST)], (_LAST,), [_tool()])

    def _knows(self, role: str, conversation: Callable[[str], list[Message]], mark: str) -> bool:
        """Return whether a role's text is shown otherwise than that of a role which no template knows."""
        text, other = self._run(conversation(role), None), self._run(conversation(_UNKNOWN_ROLE), None)
        return text is not None and mark in text and (other is None or text != other.replace(_UNKNOWN_ROLE, role))

    def _says(self, role: str, text: str) -> Message:
        """Return a message with a text, in the form that was found for the role."""
        return {"role": role, "content": as_content(text, self._contents[role])}

    def _shows_all(self, messages: Sequence[Message]) -> bool:
        """Return whether the marks of all messages are shown."""
        return self._shows(messages, [mark for mark in _MARKS if mark in str(messages)], [_tool()])

    def _shows(self, messages: Sequence[Message], marks: Sequence[str], tools: Sequence[Tool] | None = None) -> bool:
        text = self._run(messages, tools)
        return text is not None and all(mark in text for mark in marks)


@dataclass(slots=True)
class _Turn:
    """A question, a call and its result, and what the probe found out about them."""

    user: Message
    arguments: Arguments
    shows_results: bool
    empty_contents: tuple[EmptyContent, ...] = ()
    is_json: bool = False

    def messages(self, content: Message, kind: str = "nine") -> list[Message]:
        """Return the messages, with this content beside the call and an id of this kind."""
        calling = {"role": "assistant", **content, "tool_calls": [self._call(_CALL, kind)]}
        return [self.user, calling, self._result(_CALL, kind)]

    def two_calls(self, content: Message, *, together: bool) -> list[Message]:
        """Return the messages with another call, in the message of the first one or behind its result."""
        calls = self._call(_CALL, "nine"), self._call(_OTHER_CALL, "other")
        results = self._result(_CALL, "nine"), self._result(_OTHER_CALL, "other")
        calling: dict[str, Any] = {"role": "assistant", **content}
        if together:
            answers = results if self.shows_results else results[:1]
            return [self.user, {**calling, "tool_calls": list(calls)}, *answers]
        single = [{**calling, "tool_calls": [call]} for call in calls]
        return [self.user, single[0], results[0], single[1], results[1]]

    def _call(self, words: tuple[str, str, str], kind: str) -> dict[str, Any]:
        name, key, value = words
        arguments = {key: value} if self.arguments == "object" else f'{{"{key}": "{value}"}}'
        return {"id": _IDS[kind], "type": "function", "function": {"name": name, "arguments": arguments}}

    def _result(self, words: tuple[str, str, str], kind: str) -> Message:
        if not self.shows_results:
            return self.user
        return {"role": "tool", "tool_call_id": _IDS[kind], "name": words[0], "content": _RESULT}


def _tool(function: Mapping[str, Any] = _TOOL) -> Tool:
    return {"type": "function", "function": dict(function)}
