"""Page of the API: every route, with the fields of its body and a line to copy. It has no scripts."""

import json
import math
from collections.abc import Iterator
from html import escape
from typing import Any, NamedTuple

from fastapi import APIRouter, Request, Response

from quire.server.pages.field_descriptions import nested_fields
from quire.server.pages.page_routes import HEADERS

router = APIRouter(tags=["system"])

_UNTAGGED = "openai"
_TITLES = {
    "openai": "OpenAI's API", "messages": "Anthropic's API", "embeddings": "Embeddings and scores",
    "prefixes": "Pinned prefixes", "requests": "Requests", "adapters": "Adapters", "system": "Server", "debug": "Debug",
}  # fmt: skip
_BOUNDS = {
    "minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "maxLength": "at most",
    "maxItems": "at most", "maxProperties": "at most", "enum": "one of",
}  # fmt: skip
_UNITS = {"maxLength": " characters", "maxItems": " items", "maxProperties": " entries"}
_FARTHEST = 2.0**53     # a bound beyond it is one of a type, not of a meaning
_HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>API \N{MIDDLE DOT} Quire</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="pages/pages.css">
<link rel="stylesheet" href="pages/docs.css">
</head>
<body>
<header>
  <p class="brand">Quire</p>
  <nav aria-label="Pages"><a href="./">Start</a><a href="chat">Chat</a>
  <a href="docs" aria-current="page">API</a>{map}</nav>
</header>
<main class="docs">
<nav class="contents" aria-label="Routes">{contents}</nav>
<div>
<h1>API</h1>
<p class="lead">The routes of this server, and the fields of their bodies; for programs
<a href="openapi.json">openapi.json</a>.</p>
"""
_COLUMNS = "<thead><tr><th>field<th>meaning<th>type<th>example</thead>"
_MAP = '<a href="debug/blocks">Live map</a>'


class Route(NamedTuple):
    """One operation of a path, and its place on the page."""

    method: str
    path: str
    operation: dict[str, Any]

    @property
    def anchor(self) -> str:
        """Id of the route's section."""
        return f"{self.method}{self.path}".replace("/", "-").replace("{", "").replace("}", "").rstrip("-")

    @property
    def name(self) -> str:
        """Method and path, as HTML."""
        return f"{self.method.upper()} {escape(self.path)}"


@router.get("/docs", include_in_schema=False)
async def docs(request: Request) -> Response:
    """Return the page of all routes and the fields of their bodies."""
    app = request.app
    has_map = app.state.service.options.enable_debug
    return Response("".join(_page(app.openapi(), has_map=has_map)), media_type="text/html", headers=HEADERS)


def _page(schema: dict[str, Any], *, has_map: bool) -> Iterator[str]:
    groups: dict[str, list[Route]] = {}
    for path, methods in schema["paths"].items():
        for method, operation in methods.items():
            tag = operation.get("tags", [_UNTAGGED])[0]
            groups.setdefault(tag, []).append(Route(method, path, operation))
    ordered = {tag: groups[tag] for tag in (*_TITLES, *sorted(groups.keys() - _TITLES.keys())) if tag in groups}
    contents = "".join(
        f"<h2>{_TITLES.get(tag, tag)}</h2><ul class=plain>"
        + "".join(f'<li><a href="#{route.anchor}">{route.name}</a></li>' for route in routes)
        + "</ul>"
        for tag, routes in ordered.items()
    )
    yield _HEAD.replace("{map}", _MAP if has_map else "").replace("{contents}", contents)
    for tag, routes in ordered.items():
        yield f"<h2>{_TITLES.get(tag, tag)}</h2>"
        for route in routes:
            yield from _section(route)
    yield "</div></main></body></html>"


def _section(route: Route) -> Iterator[str]:
    """Yield the section of one route."""
    yield f'<section class="card" id="{route.anchor}"><h3><code>{route.name}</code></h3>'
    yield f"<p>{escape(route.operation.get('description', ''))}</p>"
    for content in route.operation.get("requestBody", {}).get("content", {}).values():
        schema = content["schema"]
        properties, required = schema.get("properties", {}), schema.get("required", [])
        body = {name: properties[name]["examples"][0] for name in required if "examples" in properties[name]}
        line = f"curl $URL{route.path} -H 'Content-Type: application/json' \\\n  -d '{json.dumps(body)}'"
        if body:
            yield f"<pre tabindex=0><code>{escape(line)}</code></pre>"
        yield f"<div class=wide-table tabindex=0><table>{_COLUMNS}<tbody>"
        for name in [*required, *(each for each in properties if each not in required)]:
            yield _row(name, properties[name], is_required=name in required)
        yield "</tbody></table></div>"
    yield "</section>"


def _row(name: str, field: dict[str, Any], *, is_required: bool) -> str:
    example = json.dumps(field["examples"][0]) if "examples" in field else ""
    mark = " <b>required</b>" if is_required else ""
    meaning = escape(field.get("description", "")) + _nested(name, field)
    return (
        f"<tr><th scope=row><code>{escape(name)}</code>{mark}<td>{meaning}"
        f"<td>{escape(_kinds(field))}<td><code>{escape(example)}</code></tr>"
    )


def _nested(name: str, field: dict[str, Any]) -> str:
    """Return the fields of the objects in a field, folded; one that several objects have, once."""
    meanings = {own: nested["description"] for _, own, nested in nested_fields(name, field) if "description" in nested}
    if not meanings:
        return ""
    rows = "".join(f"<dt><code>{escape(own)}</code><dd>{escape(meaning)}" for own, meaning in meanings.items())
    return f"<details><summary>its fields</summary><dl>{rows}</dl></details>"


def _kinds(field: dict[str, Any]) -> str:
    """Return the types of a field with its bounds; a number that may be text as well is a number."""
    kinds = [kind for kind in field.get("anyOf", [field]) if kind.get("type") != "null"]
    names = {str(kind.get("type")) for kind in kinds}
    if names & {"integer", "number"} and names <= {"integer", "number", "boolean", "string"}:
        kinds = [kind for kind in kinds if kind.get("type") in {"integer", "number"}]
    return "; ".join(dict.fromkeys(map(_kind, kinds)))


def _kind(kind: dict[str, Any]) -> str:
    """Return one type in words."""
    types = kind.get("type", "any")
    name = types if isinstance(types, str) else " or ".join(each for each in types if each != "null")
    bounds = [
        f"{words} {_number(kind[bound])}{_UNITS.get(bound, '')}"
        for bound, words in _BOUNDS.items()
        if bound in kind and not (isinstance(kind[bound], int | float) and math.fabs(kind[bound]) >= _FARTHEST)
    ]
    return ", ".join(bounds if name == "any" and bounds else [name, *bounds])


def _number(bound: Any) -> str:  # noqa: ANN401 (a number, or a list of values)
    if isinstance(bound, list):
        return ", ".join(str(value) for value in bound if value is not None)
    return f"{bound:,}" if isinstance(bound, int) else f"{bound:,.15g}"
