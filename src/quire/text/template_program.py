"""Jinja program of a chat template, compiled in a sandbox with bounded output.

A template is a program of the model's authors, so it runs in Jinja's immutable sandbox, on plain data. Names and
settings are those of transformers, for which templates are written: trimmed blocks, loop controls, `raise_exception`,
`strftime_now`, a `tojson` that leaves characters as they are, and `generation` blocks, which mark the assistant's words
for training and mean nothing here.
"""

import json
from collections.abc import Callable, Mapping
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
from quire.text.conversation import refuse

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
