"""Chat templates: render a conversation as the text that the model was trained to continue.

A template is a program of the model's authors, so it runs in Jinja's immutable sandbox, on plain data, with bounded
output. Names and settings are those of transformers, for which templates are written: trimmed blocks, loop controls,
`raise_exception`, `strftime_now`, a `tojson` that leaves characters as they are, and `generation` blocks, which mark
the assistant's words for training and mean nothing here.

Tools are rendered by the template. One that does not know them gets them as text, in the system message if it shows
that, else in the first message of the user; one that does not know tool calls gets those as text, too.
"""

import json
from collections.abc import Callable, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from quire.core.errors import InvalidRequestError
from quire.text.conversation import Message, checked_conversation, refuse, with_calls_as_text, with_text_in_front
from quire.text.tools import (
    DEFAULT_TOOL_LIMITS,
    Tool,
    ToolLimits,
    check_schemas,
    check_tools,
    tools_text,
    with_defaults,
    without_nulls,
)

MAX_RENDERED_CHARS = 16 * 1024 * 1024  # longer than any context
MAX_ERROR_CHARS = 1000                 # of an error that a template raises
CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the one of transformers, so that templates treat it the same

Conversation = list[dict[str, Any]]


class _Knowledge(NamedTuple):
    """What a template reads: the variable `tools`, and the tool calls of messages."""

    of_tools: bool
    of_calls: bool


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
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        limits: ToolLimits = DEFAULT_TOOL_LIMITS,
        **variables: Any,  # noqa: ANN401 (variables of the template)
    ) -> str:
        """Return the text of a conversation.

        A message has a `role` and a `content`: a string, a list of text parts (joined by newlines), or null. Raises
        InvalidRequestError for the field `messages` if the messages are invalid or the template fails, for `tools` if
        those are invalid. With `continue_final_message`, instead of a generation prompt, the text ends where the last
        message's content does.
        """
        conversation = checked_conversation(messages, limits)
        functions = None if tools is None else check_tools(tools)
        if functions is not None:
            check_schemas(functions, limits)
        if not continue_final_message:
            return self._render(conversation, functions, add_generation_prompt, variables)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message cannot be used together with add_generation_prompt: "
                "a message is either continued or begun",
                param="continue_final_message",
            )
        content = conversation[-1]["content"]
        if messages[-1].get("content") is None:
            refuse("continue_final_message needs a last message with a content")
        marked = [*conversation[:-1], conversation[-1] | {"content": content + CONTINUE_MARK}]
        return _cut_after(content, self._render(marked, functions, add_generation_prompt, variables))

    def _render(
        self, conversation: Conversation, tools: list[dict[str, Any]] | None, add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:  # fmt: skip
        """Return the text of a checked conversation, with tools and calls as text where the template needs that."""
        knows = self._knowledge
        if not knows.of_calls:
            conversation = with_calls_as_text(conversation)
        if not tools:
            return self._run(conversation, None, add_generation_prompt, variables)
        if knows.of_tools:
            return self._run_with_tools(conversation, tools, add_generation_prompt, variables)
        text = tools_text(tools, tells_format=not knows.of_calls)
        failure: InvalidRequestError | None = None
        for role in ("system", "user"):
            try:
                told = with_text_in_front(conversation, text, role)
                rendered = self._run(told, None, add_generation_prompt, variables)
            except InvalidRequestError as error:  # some templates refuse messages of the system
                failure = failure or error
                continue
            if text in rendered:
                return rendered
        if failure is not None:
            raise failure
        raise InvalidRequestError("the model's chat template does not show tools", param="tools")

    def _run_with_tools(
        self, conversation: Conversation, tools: list[dict[str, Any]], add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:  # fmt: skip
        """Return the text with the tools as given, as in transformers; with defaults where it fails on these."""
        given, filled = without_nulls(tools), with_defaults(tools)
        try:
            return self._run(conversation, given, add_generation_prompt, variables)
        except InvalidRequestError:
            if given == filled:
                raise
            return self._run(conversation, filled, add_generation_prompt, variables)

    def _run(
        self, conversation: Conversation, tools: list[dict[str, Any]] | None, add_generation_prompt: bool,
        variables: dict[str, Any],
    ) -> str:  # fmt: skip
        context = {"documents": None} | variables | {"messages": conversation, "tools": tools}
        try:
            plain = _plain(context)
            pieces = self._compiled.generate(plain, add_generation_prompt=add_generation_prompt)
            return _join_bounded(pieces)
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            _refuse_template(error)

    @property
    def is_given_format(self) -> bool:
        """Whether tools are described to the model with the format of calls, since the template knows neither."""
        return not any(self._knowledge)

    @cached_property
    def _knowledge(self) -> _Knowledge:
        try:
            tree = self._environment.parse(self.source)
        except Exception as error:  # a syntax error, or any other that parsing raises
            _refuse_template(error)
        names = {node.name for node in tree.find_all(nodes.Name) if node.ctx == "load"}
        attributes = {node.attr for node in tree.find_all(nodes.Getattr)}
        constants = {node.value for node in tree.find_all(nodes.Const) if isinstance(node.value, str)}
        return _Knowledge("tools" in names, "tool_calls" in attributes | constants)

    @cached_property
    def _compiled(self) -> Template:
        return self._environment.from_string(self.source)

    @cached_property
    def _environment(self) -> ImmutableSandboxedEnvironment:
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
        return environment


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
            refuse(f"the rendered chat template is longer than {MAX_RENDERED_CHARS} characters")
        written.append(piece)
    return "".join(written)


def _cut_after(content: str, text: str) -> str:
    """Return a rendered text up to the end of the last message, which was marked."""
    mark = CONTINUE_MARK.strip()  # templates may strip contents
    place = text.rfind(mark)
    if place < 0 or content.strip() not in text:
        refuse("continue_final_message: the model's chat template does not write the last message as it is")
    kept = text[:place]
    return kept if text.startswith(CONTINUE_MARK, place) else kept.rstrip()


def _plain(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a copy made of JSON's types alone: an object with methods could be called by the template."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, dict):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if not isinstance(value, list | tuple):
        refuse(f"a chat template takes plain JSON values, got {type(value).__name__}")
    return [_plain(item) for item in value]


def _refuse_template(error: Exception) -> NoReturn:
    reason = (str(error) or type(error).__name__)[:MAX_ERROR_CHARS]
    refuse(f"the model's chat template cannot render the messages: {reason}", error)
