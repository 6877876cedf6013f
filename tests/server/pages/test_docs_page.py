"""/docs and /openapi.json: every route, every field with a description and an example that its schema allows."""

import re
from collections.abc import Iterator
from typing import Any

import jsonschema_rs

from quire.server.pages.field_descriptions import nested_fields
from support.http_app import ask, make_app

AUTH = ("any", "mine")
KEYED: dict[str, Any] = {"api_key": ("mine",), "allow_runtime_lora": True, "lora_root": "/", "enable_debug": True}


def schema() -> dict[str, Any]:
    found: dict[str, Any] = ask(make_app(**KEYED), "GET", "/openapi.json", auth=AUTH).json()
    return found


def fields() -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield path, name and schema of each field of a body."""
    for path, methods in schema()["paths"].items():
        for operation in methods.values():
            for content in operation.get("requestBody", {}).get("content", {}).values():
                for name, field in content["schema"].get("properties", {}).items():
                    yield path, name, field
                    for parent, own, nested in nested_fields(name, field):
                        yield path, f"{name} {parent}.{own}", nested


def test_page_needs_a_key_which_may_be_a_password() -> None:
    refused = ask(make_app(**KEYED), "GET", "/docs")
    assert (refused.status_code, refused.headers["WWW-Authenticate"].partition(",")[0]) == (401, "Bearer")


def test_page_shows_every_route_without_scripts_and_other_hosts() -> None:
    page = ask(make_app(**KEYED), "GET", "/docs", auth=AUTH)
    assert (page.status_code, page.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    assert all(path in page.text for path in schema()["paths"])
    assert "max_completion_tokens" in page.text
    assert "<script" not in page.text
    assert "//" not in page.text
    assert "unsafe" not in page.headers["Content-Security-Policy"]


def test_contents_lead_to_the_sections() -> None:
    page = ask(make_app(**KEYED), "GET", "/docs", auth=AUTH).text
    anchors, links = re.findall(r' id="([^"]+)"', page), re.findall(r'href="#([^"]+)"', page)
    assert len(set(anchors)) == len(anchors)
    assert sorted(anchors) == sorted(links)
    assert len(links) == sum(map(len, schema()["paths"].values()))


def test_nested_fields_are_beside_the_field_that_has_them() -> None:
    page = ask(make_app(**KEYED), "GET", "/docs", auth=AUTH).text
    row = next(each for each in re.findall("<tr>.*?</tr>", page) if "<code>tools</code>" in each)
    names = re.findall("<dt><code>([a-z_]+)</code>", row)
    assert {"type", "function", "name", "description", "parameters", "strict"} == set(names)


def test_every_field_has_a_description_and_an_example_that_is_allowed() -> None:
    bare = [(path, name) for path, name, field in fields() if not field.get("description") or "examples" not in field]
    assert bare == []
    wrong = [
        (path, name)
        for path, name, field in fields()
        if not all(jsonschema_rs.is_valid(field, example) for example in field["examples"])
    ]
    assert wrong == []
