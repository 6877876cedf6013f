"""Structured outputs over HTTP, by a real server: every field constrains, and what cannot is refused by name."""

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import httpx
import pytest
from openai import OpenAI
from pydantic import BaseModel, Field

from support.server import ServerProcess, running_server, wait_until

LIMIT_S = 120.0
SCHEMA = {
    "type": "object",
    "properties": {"count": {"type": "integer", "minimum": 0, "maximum": 99}, "kind": {"enum": ["x", "yy"]}},
    "required": ["count", "kind"],
    "additionalProperties": False,
}
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "item", "schema": SCHEMA, "strict": True}}
BEAMS = {"use_beam_search": True, "n": 3, "temperature": 0}


class Item(BaseModel):
    """What the model writes."""

    count: Annotated[int, Field(ge=0, le=99)]
    kind: Literal["x", "yy"]


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    with running_server("--max-model-len", "512", "--max-choice-texts", "8") as running:
        yield running


def completion(server: ServerProcess, **fields: object) -> dict[str, Any]:
    body = {"prompt": "def ", "max_tokens": 80, "seed": 1} | fields
    answer = server.post("/v1/completions", body)
    assert answer.status_code == 200, answer.text
    result: dict[str, Any] = answer.json()
    return result


def error(server: ServerProcess, **fields: object) -> dict[str, Any]:
    answer = server.post("/v1/completions", {"prompt": "def ", "max_tokens": 4} | fields)
    assert answer.status_code == 400, answer.text
    told: dict[str, Any] = answer.json()["error"]
    assert len(told["message"]) < 1000
    return told


def is_item(text: str) -> bool:
    value = json.loads(text)
    return list(value) == ["count", "kind"] and value["count"] in range(100) and value["kind"] in ("x", "yy")


def is_match(pattern: str) -> Callable[[str], bool]:
    return lambda text: re.fullmatch(pattern, text) is not None


TAGGED = {
    "format": {"type": "tag", "begin": "<f>", "content": {"type": "json_schema", "json_schema": SCHEMA}, "end": "</f>"}
}


def is_tagged(text: str) -> bool:
    return text.startswith("<f>") and text.endswith("</f>") and is_item(text[3:-4])


COMPACT = is_match(r'\{"count":\d+,"kind":"\w+"\}')
FIELDS: list[tuple[dict[str, Any], Callable[[str], bool]]] = [
    ({"response_format": JSON_SCHEMA}, is_item),
    ({"response_format": {"type": "json_object", "schema": SCHEMA}}, is_item),
    ({"structured_outputs": {"json": SCHEMA}}, is_item),
    ({"structured_outputs": {"json": json.dumps(SCHEMA)}}, is_item),
    ({"structured_outputs": {"json": SCHEMA, "disable_any_whitespace": True}}, COMPACT),
    ({"structured_outputs": {"regex": r"^\d{3}-\d{4}$"}}, is_match(r"\d{3}-\d{4}")),
    ({"structured_outputs": {"choice": ["yes", "no"]}}, is_match("yes|no")),
    ({"structured_outputs": {"grammar": 'start: "a" /[0-9]{2}/'}}, is_match(r"a\d\d")),
    ({"structured_outputs": {"structural_tag": TAGGED}}, is_tagged),
    ({"response_format": TAGGED | {"type": "structural_tag"}}, is_tagged),
    ({"guided_json": SCHEMA}, is_item),
    ({"guided_json": SCHEMA, "guided_whitespace_pattern": "[_]?"}, lambda text: is_item(text.replace("_", " "))),
    ({"guided_regex": "a{3}"}, is_match("aaa")),
    ({"guided_choice": ["q", "r"]}, is_match("q|r")),
    ({"guided_grammar": 'root ::= "a" [0-9]'}, is_match("a[0-9]")),
]


@pytest.mark.parametrize(("fields", "fits"), FIELDS, ids=[json.dumps(fields)[:48] for fields, _ in FIELDS])
def test_output_has_the_form_that_the_field_asks_for(
    server: ServerProcess, fields: dict[str, Any], fits: Callable[[str], bool]
) -> None:
    [choice] = completion(server, **fields)["choices"]
    assert choice["finish_reason"] == "stop"
    assert fits(choice["text"]), choice["text"]


WIDE = " | ".join(f'"w{number}"' for number in range(2500))  # more than the parser's 2,000 items at a time
LATE = f'start: /[a-z]{{12}}/ "-" word\nword: {WIDE}\n'


@pytest.mark.parametrize("field", ["structured_outputs", "guided_grammar"])
def test_limit_that_is_exceeded_in_the_output_is_the_clients_error(server: ServerProcess, field: str) -> None:
    given = {field: {"grammar": LATE} if field == "structured_outputs" else LATE}
    told = error(server, **given, max_tokens=20)
    assert (told["type"], told["param"]) == ("invalid_request_error", field)
    assert told["message"].startswith(f"{field} cannot be used: ")
    assert "max is 2000" in told["message"]
    body = {"prompt": "def ", "max_tokens": 20, "stream": True, **given}
    frames = server.post("/v1/completions", body).text.split("\n\n")
    last = json.loads([frame for frame in frames if frame.startswith("data: {")][-1].removeprefix("data: "))
    assert last == {"error": told}
    assert completion(server, max_tokens=3)["usage"]["completion_tokens"] == 3


def test_limit_that_is_exceeded_at_once_is_found_by_the_check(server: ServerProcess) -> None:
    told = error(server, structured_outputs={"grammar": f"start: word\nword: {WIDE}\n"})
    assert told["param"] == "structured_outputs.grammar"
    assert "max is 2000" in told["message"]


def test_constraint_holds_with_all_that_a_request_may_have(server: ServerProcess) -> None:
    body = {"n": 3, "logprobs": 2, "frequency_penalty": 1.0, "min_p": 0.01, "response_format": JSON_SCHEMA}
    choices = completion(server, **body)["choices"]
    assert [is_item(choice["text"]) for choice in choices] == [True] * 3
    assert all("".join(choice["logprobs"]["tokens"]).startswith(choice["text"]) for choice in choices)
    [stopped] = completion(server, stop=["kind"], response_format=JSON_SCHEMA)["choices"]
    assert "kind" not in stopped["text"]


def test_object_is_json_and_text_is_free(server: ServerProcess) -> None:
    [choice] = completion(server, response_format={"type": "json_object"}, temperature=0)["choices"]
    assert choice["text"].startswith("{")
    free = completion(server, response_format={"type": "text"}, temperature=0)["choices"]
    assert free == completion(server, temperature=0)["choices"]


@pytest.fixture
def client(server: ServerProcess) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def test_stream_has_the_text_of_the_whole_answer(client: OpenAI) -> None:
    body: dict[str, Any] = {"model": "quire-demo", "messages": [{"role": "user", "content": "hi"}], "seed": 3}
    body |= {"response_format": JSON_SCHEMA}
    whole = client.chat.completions.create(**body).choices[0].message.content
    pieces = [chunk.choices[0].delta.content or "" for chunk in client.chat.completions.create(**body, stream=True)]
    assert "".join(pieces) == whole
    assert is_item(whole)


def test_openai_parses_into_a_pydantic_model(client: OpenAI) -> None:
    parsed = client.chat.completions.parse(
        model="quire-demo", messages=[{"role": "user", "content": "an item"}], response_format=Item, seed=1,
        max_tokens=200,
    )  # fmt: skip
    assert parsed.choices[0].finish_reason == "stop"
    assert isinstance(parsed.choices[0].message.parsed, Item)


DEEP: dict[str, Any] = {}
for _ in range(40):
    DEEP = {"items": DEEP}
MANY = {f"p{number}": {"type": "string"} for number in range(1025)}
LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
ONE_OF = {"oneOf": [{"type": "integer"}, {"type": "number"}]}
REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"response_format": "json"}, "response_format", "an object"),
    ({"response_format": {"type": "xml"}}, "response_format.type", "one of text, json_object, json_schema"),
    ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "an object with a schema"),
    ({"guided_json": {}, "guided_regex": "a"}, "guided_regex", "exclude each other"),
    ({"guided_json": {}, "structured_outputs": {"choice": ["a"]}}, "guided_json", "exclude each other"),
    ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
    ({"structured_outputs": {"Json": {}}}, "structured_outputs", "no field 'Json'"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "from 1 to"),
    ({"guided_choice": ["a"] * 9}, "guided_choice", "at most 8 texts (max_choice_texts), got 9"),
    ({"guided_json": "{"}, "guided_json", "must be JSON"),
    ({"guided_json": "\ud800"}, "guided_json", ""),
    ({"guided_json": {"title": "a" * 1_000_000}}, "guided_json", "at most 131072 bytes (max_schema_bytes)"),
    ({"guided_json": DEEP}, "guided_json", "at most 32 levels deep (max_schema_depth)"),
    ({"guided_json": {"properties": MANY}}, "guided_json", "at most 1024 properties (max_schema_properties), got 1025"),
    ({"guided_json": LOOP}, "guided_json", "guided_json cannot be a grammar at /: $ref '#/$defs/a' leads to more than"),
    ({"guided_json": {"properties": {"a": {"not": {}}}}}, "guided_json", 'at /properties/a: unsupported keywords: ["n'),
    ({"guided_json": {"properties": {"a": ONE_OF}}}, "guided_json", "at /properties/a: unsupported keyword: oneOf"),
    ({"guided_json": {"items": {"not": {}}}}, "guided_json", 'at /items: unsupported keywords: ["not"]'),
    ({"guided_json": {"items": {"minProperties": 2}}}, "guided_json", "at /items: unsupported keyword: minProperties"),
    ({"guided_regex": r"[^\s\S]"}, "guided_regex", "it allows no text"),
    ({"guided_json": {"pattern": "^(a{999}){999}$"}}, "guided_json", "(max_regex_length), got "),
    ({"response_format": {"type": "structural_tag"}}, "response_format", "structural_tag.format must be an object"),
    ({"structural_tag": {"format": {"type": "sequence", "elements": [DEEP]}}}, "structural_tag", "(max_schema_depth)"),
    ({"structural_tag": {"format": {"type": "x"}}}, "structural_tag", "structural_tag.format.type must be one of"),
    ({"guided_regex": "(?=a)"}, "guided_regex", "look-ahead"),
    ({"guided_regex": "a{1000000}"}, "guided_regex", "at most 10000 characters with repetitions written out"),
    ({"guided_regex": "a" * 9000}, "guided_regex", "at most 8192 bytes (max_regex_bytes), got 9000"),
    ({"guided_grammar": "start: x"}, "guided_grammar", 'unknown name: "x"'),
    ({"guided_grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000}, "guided_grammar", "too deeply nested"),
    ({"guided_grammar": '%llguidance {"no_forcing": false}\nstart: "a"'}, "guided_grammar", "without no_forcing"),
    ({"guided_grammar": "root ::= ("}, "guided_grammar", "cannot be converted from GBNF"),
    ({"guided_grammar": "a" * 200_000}, "guided_grammar", "at most 131072 bytes (max_grammar_bytes)"),
    ({"guided_choice": ["a"], "allowed_token_ids": [0]}, "allowed_token_ids", "leave no token"),
    ({"guided_choice": ["a"], "bad_words": ["a"]}, "bad_words", "leave no token"),
    ({"guided_choice": ["a"], **BEAMS, "n": 5}, "guided_choice", "fewer than the 5 beams"),
    ({"guided_choice": ["a"], **BEAMS, "ignore_eos": True}, "ignore_eos", "in a beam search with guided_choice"),
]


def test_beams_are_constrained(server: ServerProcess) -> None:
    asked = BEAMS | {"max_tokens": 80, "response_format": JSON_SCHEMA}
    answers = completion(server, **asked)["choices"]
    assert [is_item(each["text"]) and each["finish_reason"] for each in answers] == ["stop"] * 3
    assert len({each["text"] for each in answers}) > 1


@pytest.mark.parametrize(("fields", "param", "reason"), REFUSED, ids=[json.dumps(row[0])[:48] for row in REFUSED])
def test_what_cannot_constrain_is_refused_by_name(
    server: ServerProcess, fields: dict[str, Any], param: str, reason: str
) -> None:
    if fields == {"guided_json": "\ud800"}:
        body = b'{"prompt": "a", "guided_json": "\\ud800"}'
        headers = {"Content-Type": "application/json"}
        answer = httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=LIMIT_S)
        assert answer.status_code == 400
        return
    told = error(server, **fields)
    assert (told["type"], told["param"], told["code"]) == ("invalid_request_error", param, None)
    assert reason in told["message"]


HOSTILE = {
    "a product of alternatives": {"guided_json": {
        "allOf": [{"anyOf": [{"properties": {f"k{i}": {"const": j}}, "required": [f"k{i}"]} for j in range(4)]}
                  for i in range(9)]}},
    "many rules": {"guided_grammar": "start: " + " | ".join(f'"{number:x}"' for number in range(1500))},
    "doubling rules": {
        "guided_grammar": 'start: a30\na0: "x"\n' + "".join(f"a{i}: a{i - 1} a{i - 1}\n" for i in range(1, 31))},
    "nested minima": {"guided_json": {"type": "array", "minItems": 10**6, "items": {"const": "a" * 1000}}},
    "nested repetitions": {"guided_regex": "((a?){90}){90}"},
}  # fmt: skip


def test_hostile_grammars_end_and_neighbours_are_served(server: ServerProcess) -> None:
    """Each is answered, by tokens or by a 400; what runs beside them has its usual tokens."""
    expected = completion(server, max_tokens=40, temperature=0)["choices"][0]["text"]

    async def ask() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=LIMIT_S) as http:
            bodies = [{"prompt": "a", "max_tokens": 4} | fields for fields in HOSTILE.values()]
            bodies += [{"prompt": "def ", "max_tokens": 40, "temperature": 0}] * 4
            return await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))

    answers = asyncio.run(ask())
    assert {answer.status_code for answer in answers[: len(HOSTILE)]} <= {200, 400}
    assert [answer.json()["choices"][0]["text"] for answer in answers[len(HOSTILE) :]] == [expected] * 4


def test_configuration_is_vllms_json() -> None:
    config = '{"backend": "xgrammar", "disable_any_whitespace": true}'
    with running_server("--structured-outputs-config", config) as server:
        [choice] = completion(server, response_format=JSON_SCHEMA)["choices"]
        assert re.fullmatch(r'\{"count":\d+,"kind":"\w+"\}', choice["text"])
        wait_until(lambda: "backend 'xgrammar' was asked for" in server.log)
