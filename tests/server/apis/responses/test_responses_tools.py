"""Tools of /v1/responses as functions: those of namespaces have its name in front, and others are left out."""

import logging
from typing import Any

import pytest

from quire.core.errors import InvalidRequestError
from quire.server.apis.responses.responses_bodies import choice_of, functions_of

Json = dict[str, Any]


def function(name: str, **fields: Any) -> Json:  # noqa: ANN401 (JSON)
    return {"type": "function", "name": name, "parameters": {"type": "object"}} | fields


TEAM = {"type": "namespace", "name": "team", "description": "Others.", "tools": [
    function("close", description="d"), {"type": "custom", "name": "note"},
]}  # fmt: skip


def test_tools_of_a_namespace_are_functions(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tools = functions_of([function("f"), TEAM, {"type": "web_search"}], [function("added")], 4)
    names = [tool["function"]["name"] for tool in tools.functions]
    assert names == ["f", "team__close", "team__note", "added"]
    assert tools.functions[1]["function"]["description"] == "d"
    assert tools.custom == {"team__note"}
    assert tools.namespaces == {"team__close": ("team", "close"), "team__note": ("team", "note")}
    assert "1 tools of a request are ignored" in caplog.text


@pytest.mark.parametrize(
    ("given", "added", "problem"),
    [
        ({"a": 1}, [], "tools must be a list"),
        ([TEAM | {"tools": [TEAM]}], [], r"tools\[0\]\.tools\[0\] must be a namespace with a name, in none"),
        ([TEAM | {"name": 5}], [], r"tools\[0\] must be a namespace"),
        ([TEAM | {"tools": "x"}], [], r"tools\[0\]\.tools must be a list"),
        ([TEAM | {"tools": [function("!")]}], [], r"tools\[0\]\.tools\[0\]\.name must be 1 to 128 letters"),
        ([function("a"), TEAM], [function("b"), function("c")], "at most 4 of them"),
        ([], [5], r"tools of items\[0\] must be an object"),
    ],
)
def test_invalid_tools_are_named(given: object, added: list[object], problem: str) -> None:
    with pytest.raises(InvalidRequestError, match=problem):
        functions_of(given, added, 4)


def test_choice_may_name_a_tool_of_a_namespace() -> None:
    choice = {"type": "function", "name": "close", "namespace": "team"}
    assert choice_of(choice)["name"] == "team__close"
    allowed = choice_of({"type": "allowed_tools", "mode": "auto", "tools": [choice, function("f")]})
    assert [tool["name"] for tool in allowed["tools"]] == ["team__close", "f"]
