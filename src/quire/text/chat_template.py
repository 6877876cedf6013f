"""Chat templates: render a conversation as the text that the model was trained to continue, in a sandbox.

A model has one template, or two: one for conversations with tools, and one for all others. The forms that a template
reads are found once, by a probe (`quire.text.template_forms`), and each conversation is fitted to them
(`quire.text.fitted_messages`). The text is that of transformers for messages in the forms that the template reads.

A template is a program of the model's authors, so it runs in Jinja's immutable sandbox, on plain data. Names and
settings are those of transformers, for which templates are written: trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that leaves characters as they are, and `generation` blocks, which mark the assistant's words
for training and mean nothing here.
"""

import json
import logging
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
from quire.text.conversation import Message, checked_conversation, plain_part, refuse
from quire.text.fitted_messages import WriteCalls, check_arguments, fitted_messages, hermes_calls, told_of_tools
from quire.text.image_marks import ImageMarks, refuse_unshown
from quire.text.template_forms import TemplateForms, probe
from quire.text.text_settings import DEFAULT_TEMPLATE, TOOL_TEMPLATE
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
MAX_ERROR_CHARS = 1000                 # characters kept of an error that a template raises


class TemplateProgram:
    """A template, compiled when it is first run. `clock` returns the time for `strftime_now`."""

    def __init__(self, source: str, clock: Callable[[], datetime]) -> None:
        self.source = source
        self._clock = clock

    def run(self, variables: Mapping[str, Any]) -> str:
        """Return the text for JSON values. InvalidRequestError for `messages` if the template fails."""
        try:
            return _join_bounded(self._compiled.generate(_plain(variables)))
        except InvalidRequestError:
            raise
        except Exception as error:  # a template is a program and may raise anything
            _refuse_template(error)

    @cached_property
    def _compiled(self) -> Template:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise_exception,
            strftime_now=lambda layout: self._clock().strftime(layout),
            dict=PlainDict(),
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


class PlainDict:
    """Python's `dict` without its attributes as a type, which reach Python's internals."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:  # noqa: ANN401
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:  # noqa: ANN401
        """Return a new dict with the given keys."""
        return dict.fromkeys(*args)


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


log = logging.getLogger(__name__)

CONTINUE_MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # the one of transformers, so that templates treat it the same
_PROBE_TOKENS = {"bos_token": "", "eos_token": "", "pad_token": "", "unk_token": ""}   # where the tokenizer names none

Conversation = list[dict[str, Any]]


class ChatTemplate:
    """A model's template, or its templates by name, compiled when they are first used.

    `tokens` are variables of the probe: special tokens by their names. `forms` are those that an earlier probe of the
    same templates found. `clock` returns the time for `strftime_now`.
    """

    def __init__(
        self, source: str | Mapping[str, str], clock: Callable[[], datetime] = datetime.now, *,
        tokens: Mapping[str, str] | None = None, forms: Mapping[str, TemplateForms] | None = None,
    ) -> None:  # fmt: skip
        self.sources = {DEFAULT_TEMPLATE: source} if isinstance(source, str) else dict(source)
        self._programs = {name: TemplateProgram(text, clock) for name, text in self.sources.items()}
        self._tokens = _PROBE_TOKENS | dict(tokens or {})
        self._given_forms = forms

    @property
    def source(self) -> str:
        """The template of conversations without tools."""
        return self.sources[DEFAULT_TEMPLATE]

    @cached_property
    def _write_calls(self) -> WriteCalls:
        from quire.text.tool_formats.writing import recognized_writer  # noqa: PLC0415 (10 ms, for such calls alone)

        return recognized_writer(self.sources.values()) or hermes_calls

    @cached_property
    def forms(self) -> Mapping[str, TemplateForms]:
        """Forms that each template reads. Probed when they are first needed, unless they are given."""
        if self._given_forms is not None:
            return self._given_forms
        forms = {name: probe(self._run_or_none(program)) for name, program in self._programs.items()}
        log_forms(forms)
        return forms

    def render(
        self,
        messages: Sequence[Message],
        /,
        *,
        tools: Sequence[Tool] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        limits: ToolLimits = DEFAULT_TOOL_LIMITS,
        write_calls: WriteCalls | None = None,
        marks: ImageMarks | None = None,
        **variables: Any,  # noqa: ANN401 (variables of the template)
    ) -> str:
        """Return the text of a conversation.

        A message has a `role` and a `content`: a string, a list of text parts, or null. Raises InvalidRequestError for
        the field `messages` if the messages are invalid or the template fails, for `tools` if those are invalid. With
        `continue_final_message`, instead of a generation prompt, the text ends where the last message's content does.
        `write_calls` writes calls where the template shows none, by default in the format for which the templates are
        recognized, else as Hermes' models do. With `marks` a part may be an image, which has its mark in the text.
        """
        conversation = checked_conversation(messages, limits, marks)
        functions = None if tools is None else check_tools(tools)
        if functions is not None:
            check_schemas(functions, limits)
        variables["add_generation_prompt"] = add_generation_prompt
        write = write_calls or self._write_calls
        if marks is not None:
            conversation, functions = marks.typed_masked(conversation), marks.typed_masked(functions)
            variables |= {"documents": marks.typed_masked(variables.get("documents"))}
        if not continue_final_message:
            return self._render(conversation, functions, variables, write, marks)
        if add_generation_prompt:
            raise InvalidRequestError(
                "continue_final_message cannot be used together with add_generation_prompt: "
                "a message is either continued or begun",
                param="continue_final_message",
            )
        if messages[-1].get("content") is None:
            refuse("continue_final_message needs a last message with a content")
        text = _mark_end(conversation[-1])
        text = text if marks is None else marks.typed_unmasked(text)
        return _cut_after(text, self._render(conversation, functions, variables, write, marks))

    def _render(
        self, conversation: Conversation, tools: list[dict[str, Any]] | None, variables: dict[str, Any],
        write_calls: WriteCalls, marks: ImageMarks | None,
    ) -> str:  # fmt: skip
        """Return the text of a checked conversation, fitted to the template that renders it."""
        name = TOOL_TEMPLATE if tools and TOOL_TEMPLATE in self._programs else DEFAULT_TEMPLATE
        forms = self.forms[name]
        fitted = fitted_messages(conversation, forms, write_calls)
        shown, text = None, ""
        if tools and forms.shows_tools:
            shown = with_defaults(without_nulls(tools), forms.tool_defaults)
        elif tools:
            text = tools_text(tools, write_calls if forms.tells_format else None)
            fitted = told_of_tools(fitted, text, forms)
        try:
            rendered = self._run(name, fitted, {"documents": None, **variables, "tools": shown}, marks)
        except InvalidRequestError as error:
            if forms.shows_calls:
                check_arguments(conversation, error)
            raise
        if (text if marks is None else marks.typed_unmasked(text)) not in rendered:
            raise InvalidRequestError("the model's chat template does not show tools", param="tools")
        return rendered

    def _run(
        self, name: str, messages: Conversation, variables: Mapping[str, Any], marks: ImageMarks | None
    ) -> str:
        """Return the text that a template renders, with the marks of images at their places."""
        program = self._programs[name]
        rendered = program.run({**variables, "messages": messages})
        if marks is None:
            return rendered
        text = marks.placed(rendered, messages)
        if text is None:
            messages = marks.as_texts(messages)
            text = marks.placed(program.run({**variables, "messages": messages}), messages)
        if text is None:
            refuse_unshown(marks.placeholder)
        return text

    def _run_or_none(self, program: TemplateProgram) -> Callable[..., str | None]:
        """Return a function that renders messages and tools for the probe; None for what the template refuses."""

        def run(messages: Sequence[Message], tools: Sequence[Tool] | None) -> str | None:
            variables = {"documents": None, "messages": messages, "tools": tools, "add_generation_prompt": True}
            try:
                return program.run(self._tokens | variables)
            except InvalidRequestError as error:
                if isinstance(error.__cause__, MemoryError):
                    raise error.__cause__ from error
                return None

        return run


def log_forms(forms: Mapping[str, TemplateForms]) -> None:
    """Log what the probe of a model's templates found."""
    each = "; ".join(f"{name} {own.describe()}" if len(forms) > 1 else own.describe() for name, own in forms.items())
    log.info("chat template: %s", each)


def _mark_end(message: dict[str, Any]) -> str:
    """Add the mark to the content of a message; return its last text without the mark."""
    content = message["content"]
    if isinstance(content, str):
        message["content"] = content + CONTINUE_MARK
        return content
    *_, last = content or [{"text": ""}]
    message["content"] = [*content[:-1], plain_part(last["text"] + CONTINUE_MARK)]
    text: str = last["text"]
    return text


def _cut_after(content: str, text: str) -> str:
    """Return a rendered text up to the end of the last message, which was marked."""
    mark = CONTINUE_MARK.strip()  # templates may strip contents
    place = text.rfind(mark)
    if place < 0 or content.strip() not in text:
        refuse("continue_final_message: the model's chat template does not write the last message as it is")
    kept = text[:place]
    return kept if text.startswith(CONTINUE_MARK, place) else kept.rstrip()
