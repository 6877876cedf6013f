#!/usr/bin/env bash
# llguidance 1.9.1: a grammar of a JSON schema allows a name with an escaped letter beside the property of that name.
#
# Expected: JSON that a grammar of {"properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
# allows fits the schema; names other than "a" are those that are not "a" when they are read.
# Seen: {"a":1,"\u0061":true} is allowed; read, it is {"a": true}, which does not fit. {"a":1,"a":true} is not allowed, nor is
# "\u0061" as a value of {"type": "string"}. With "x-guidance": {"json_allowed_escapes": "nrbtf\\\""} it is not allowed.
# 2026-11-28
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q --disable-pip-version-check install llguidance==1.9.1 jsonschema==4.26.0
"$folder/venv/bin/python" - <<'PYTHON'
import json

import jsonschema
from llguidance import LLMatcher, LLTokenizer

schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "additionalProperties": {"type": "boolean"}}
tokenizer = LLTokenizer("byte")


def allows(schema: dict, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


escaped = r'{"a":1,"\u0061":true}'
plain = '{"a":1,"a":true}'
value = json.loads(escaped)
print("escaped", allows(schema, escaped), "| plain", allows(schema, plain), "| read as", value)
assert allows(schema, escaped) and not allows(schema, plain)
assert not allows({"type": "string"}, r'"\u0061"')
assert not jsonschema.Draft202012Validator(schema).is_valid(value)
assert not allows(schema | {"x-guidance": {"json_allowed_escapes": 'nrbtf\\"'}}, escaped)
PYTHON
