"""Chat templates: render a conversation as the text that the model was trained to continue.

A template is a program of the model's authors, so it runs in Jinja's immutable sandbox, on plain data, with bounded
output. Names and settings are those of transformers, for which templates are written: trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that leaves characters as they are, and `generation` blocks, which mark
the assistant's words for training and mean nothing here.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.core.errors import InvalidRequestError

MAX_RENDERED_CHARS = 16 * 1024 * 1024  # longer than any context
MAX_ERROR_CHARS = 1000                 # of an error that a template raises
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the one of transformers, so that templates treat it the same

Message = Mapping[str, Any]


class ChatTemplate:
    """One template, compiled when it is first used. `clock` returns the time for `strftime_now`."""

    def __init__(self, source: str, clock: Callable[[], datetime] = datetime.now) -> None:
        self.source = source
        self._clock = clock

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **variables: Any,  # noqa: ANN401 (variables of the template)
    ) -> str:
        """Return the text of a conversation.

        A message has a `role` and a `content`: a string, a list of text parts (joined by newlines), or null. Raises
        InvalidRequestError for the field `messages` if the messages are invalid or the template fails. With
        `continue_final_message`, instead of a generation prompt, the text ends where the last message's content does.
        """
        if not isinstance(messages, list | tuple) or not messages:
            _refuse("messages must be a list of at least one message")
        conversation = [_checked(index, message) for index, message in enumerate(messages)]
        if not continue_final_message:
            return self._render(conversation, add_generation_prompt, variables)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message cannot be used together with add_generation_prompt: "
                "a message is either continued or begun",
                param="continue_final_message",
            )
        content = conversation[-1].get("content")
        if not isinstance(content, str):
            _refuse("continue_final_message needs a last message with a content")
        marked = [*conversation[:-1], conversation[-1] | {"content": content + CONTINUE_MARK}]
        return _cut_after(content, self._render(marked, add_generation_prompt, variables))

    def _render(
        self, conversation: list[dict[str, Any]], add_generation_prompt: bool, variables: dict[str, Any]
    ) -> str:
        context = {"tools": None, "documents": None} | variables | {"messages": conversation}
        try:
            plain = _plain(context)
            pieces = self._compiled.generate(plain, add_generation_prompt=add_generation_prompt)
            return _join_bounded(pieces)
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            reason = (str(error) or type(error).__name__)[:MAX_ERROR_CHARS]
            _refuse(f"the model's chat template cannot render the messages: {reason}", error)

    @cached_property
    def _compiled(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda layout: self._clock().strftime(layout),
            dict=_make_dict,
            namespace=PlainNamespace,
        )
        return environment.from_string(self.source)


class GenerationBlock(Extension):
    """`{% generation %}...{% endgeneration %}`: renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class declares it so)

    def parse(self, parser: Parser) -> nodes.Node:
        """Return the block's body, with a scope of its own as in transformers."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class PlainNamespace(Namespace):
    """Jinja's `namespace`, without names that begin with an underscore: they reach Python's internals."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # noqa: ANN401 (like the base: `self` may be a keyword)
        self, *rest = args
        attributes = dict(*rest, **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(self, attributes)

    def __setitem__(self, name: str, value: Any) -> None:  # noqa: ANN401
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: str) -> None:
    if str(name).startswith("_"):
        raise SecurityError(f"a namespace cannot have an attribute {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401
    """Replace `dict`: its attributes as a type would reach Python's internals."""
    return dict(*args, **kwargs)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _join_bounded(pieces: Any) -> str:  # noqa: ANN401 (an iterator of strings)
    """Join the output of a template; refuse it past MAX_RENDERED_CHARS."""
    written, num_chars = [], 0
    for piece in pieces:
        num_chars += len(piece)
        if num_chars > MAX_RENDERED_CHARS:
            _refuse(f"the rendered chat template is longer than {MAX_RENDERED_CHARS} characters")
        written.append(piece)
    return "".join(written)


def _cut_after(content: str, text: str) -> str:
    """Return a rendered text up to the end of the last message, which was marked."""
    mark = CONTINUE_MARK.strip()  # templates may strip contents
    place = text.rfind(mark)
    if place < 0 or content.strip() not in text:
        _refuse("continue_final_message: the model's chat template does not write the last message as it is")
    kept = text[:place]
    return kept if text.startswith(CONTINUE_MARK, place) else kept.rstrip()


def _checked(index: int, message: object) -> dict[str, Any]:
    """Return a copy of a message whose content is text or None."""
    where = f"messages[{index}]"
    if not isinstance(message, dict):
        _refuse(f"{where} must be an object, got {type(message).__name__}")
    if not isinstance(message.get("role"), str):
        _refuse(f"{where} must have a role that is a string")
    if "content" in message:
        return message | {"content": _content_text(where, message["content"])}
    if "tool_calls" not in message:
        _refuse(f"{where} must have a content")
    return message


def _content_text(where: str, content: object) -> str | None:
    """Return the content of a message as one text, parts joined by newlines: most templates accept text only."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list | tuple):
        _refuse(f"{where}.content must be a string, a list of parts or null, got {type(content).__name__}")
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            _refuse(f'{where}.content must have parts of the form {{"type": "text", "text": "..."}} only')
    return "\n".join(part["text"] for part in content)


def _plain(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a copy made of JSON's types alone: an object with methods could be called by the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        _refuse(f"a chat template takes plain JSON values, got {type(value).__name__}")
    return [_plain(item) for item in value]


def _refuse(message: str, cause: Exception | None = None) -> NoReturn:
    raise InvalidRequestError(message, param="messages") from cause
