"""Helm charts without Helm: the part of Go's templates, and of Helm's functions, that our chart uses.

Whatever it does not know is an error, never text: pkg.go.dev/text/template, helm.sh/docs/chart_template_guide.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

Scope = Any  # the value of the dot
_ACTION = re.compile(r"\{\{(-?)\s*(.*?)\s*(-?)\}\}", re.DOTALL)
_WORD = re.compile(r'\(|\)|\||"(?:[^"\\]|\\.)*"|[^\s()|]+')


class HelmError(Exception):
    """A chart that asks for what Helm would refuse, or for what is not known here."""


def render_chart(folder: Path, release: str, **values: object) -> dict[str, dict[str, Any]]:
    """Return the manifests of a chart by kind, with `values` over those of values.yaml. HelmError if it fails."""
    chart = yaml.safe_load((folder / "Chart.yaml").read_text())
    given = yaml.safe_load((folder / "values.yaml").read_text())
    if unknown := values.keys() - given.keys():
        raise HelmError(f"values.yaml has no {sorted(unknown)}")
    for name, value in values.items():
        given[name] = {**given[name], **value} if isinstance(value, Mapping) else value
    names = {"Name": chart["name"], "Version": chart["version"], "AppVersion": chart["appVersion"]}
    scope = {"Values": given, "Chart": names, "Release": {"Name": release, "Service": "Helm"}}
    templates = _Templates()
    sources = {path.name: path.read_text() for path in sorted((folder / "templates").iterdir())}
    parsed = {name: templates.parse(source) for name, source in sources.items()}
    texts = {name: templates.render(nodes, scope) for name, nodes in parsed.items()}
    found = [yaml.safe_load(text) for name, text in texts.items() if name.endswith(".yaml") and text.strip()]
    return {manifest["kind"]: manifest for manifest in found}


class _Templates:
    """Parsed templates by name."""

    def __init__(self) -> None:
        self._defined = dict[str, list[Any]]()
        self._functions: dict[str, Callable[..., Any]] = {
            "include": lambda name, scope: self.render(self._defined[name], scope),
            "toYaml": lambda value: yaml.safe_dump(value, default_flow_style=False).rstrip("\n"),
            "nindent": lambda width, text: "\n" + "\n".join(" " * width + line for line in text.split("\n")),
            "quote": lambda value: '"' + _text(value).replace("\\", "\\\\").replace('"', '\\"') + '"',
            "default": lambda other, value: value or other,
            "printf": lambda form, *values: form.replace("%s", "{}").format(*values),
            "trunc": lambda length, text: text[:length],
            "trimSuffix": lambda suffix, text: text.removesuffix(suffix),
            "add": lambda *numbers: sum(numbers),
            "and": lambda *values: next((value for value in values if not value), values[-1]),
            "or": lambda *values: next((value for value in values if value), values[-1]),
            "not": lambda value: not value,
            "fail": _fail,
        }

    def parse(self, source: str) -> list[Any]:
        """Return the nodes of a source: texts, and tuples of an action's word, its pipeline and its branches."""
        pieces, at, is_trimmed = list[tuple[str, str]](), 0, ""
        for found in _ACTION.finditer(source):
            trims_left, action, trims_right = found.groups()
            text = source[at : found.start()]
            text = text.lstrip() if is_trimmed else text
            pieces += [("text", text.rstrip() if trims_left else text), ("action", action)]
            at, is_trimmed = found.end(), trims_right
        pieces.append(("text", source[at:].lstrip() if is_trimmed else source[at:]))
        rest = iter(pieces)
        nodes, end = self._block(rest)
        if end is not None:
            raise HelmError(f"{end} has no beginning")
        return nodes

    def _block(self, pieces: Iterator[tuple[str, str]]) -> tuple[list[Any], str | None]:
        nodes = list[Any]()
        for kind, text in pieces:
            word, _, pipeline = text.partition(" ")
            if kind == "text":
                nodes.append(text)
            elif word in ("end", "else"):
                return nodes, text
            elif word in ("if", "with", "range", "define"):
                body, end = self._block(pieces)
                other: list[Any] = []
                if end == "else":
                    other, end = self._block(pieces)
                if end != "end":
                    raise HelmError(f"{text} ends with {end}")
                if word == "define":
                    self._defined[pipeline.strip('"')] = body
                else:
                    nodes.append((word, pipeline, body, other))
            else:
                nodes.append(("show", text, [], []))
        return nodes, None

    def render(self, nodes: list[Any], scope: Scope, root: Scope = None) -> str:
        """Return the text of nodes."""
        root = scope if root is None else root
        written = list[str]()
        for node in nodes:
            if isinstance(node, str):
                written.append(node)
                continue
            word, pipeline, body, other = node
            value = self._evaluate(pipeline, scope, root)
            if word == "show":
                written.append(_text(value))
            elif word == "range":
                written += [self.render(body, each, root) for each in value] or [self.render(other, scope, root)]
            elif value:
                written.append(self.render(body, value if word == "with" else scope, root))
            else:
                written.append(self.render(other, scope, root))
        return "".join(written)

    def _evaluate(self, pipeline: str, scope: Scope, root: Scope) -> Any:  # noqa: ANN401 (a value of YAML)
        words = _WORD.findall(pipeline)
        value = self._pipeline(words, scope, root)
        if words:
            raise HelmError(f"{pipeline}: {words} is left")
        return value

    def _pipeline(self, words: list[str], scope: Scope, root: Scope) -> Any:  # noqa: ANN401 (a value of YAML)
        value: Any = None
        is_first = True
        while is_first or (words and words[0] == "|"):
            if not is_first:
                words.pop(0)
            operands = list[Any]()
            function: Callable[..., Any] | None = None
            while words and words[0] not in ("|", ")"):
                word = words.pop(0)
                if word in self._functions and not operands and function is None:
                    function = self._functions[word]
                elif word == "(":
                    operands.append(self._pipeline(words, scope, root))
                    words.pop(0)
                else:
                    operands.append(_operand(word, scope, root))
            if not is_first:
                operands.append(value)
            if function is None and len(operands) != 1:
                raise HelmError(f"no function in {operands}")
            value = function(*operands) if function is not None else operands[0]
            is_first = False
        return value


def _operand(word: str, scope: Scope, root: Scope) -> Any:  # noqa: ANN401 (a value of YAML)
    if word.startswith('"'):
        return yaml.safe_load(word)
    if word.isdecimal():
        return int(word)
    value = root if word.startswith("$") else scope
    if not word.lstrip("$").startswith(".") and word != "$":
        raise HelmError(f"what is {word}?")
    for name in filter(None, word.lstrip("$").split(".")):
        if name not in value:
            raise HelmError(f"{word}: there is no {name}")
        value = value[name]
    return value


def _text(value: object) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "" if value is None else str(value)


def _fail(message: str) -> None:
    raise HelmError(message)
