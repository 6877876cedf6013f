#!/usr/bin/env bash
# llguidance 1.9.1: a number with 16 or 17 digits in a JSON schema may be read as its neighbour, so that constants and bounds
# of a schema are others than written.
#
# Expected: {"const": 99.00000000000001} allows 99.00000000000001 and not 99, since both are different float64 values; likewise
# a minimum of 99.00000000000001 does not allow 99.
# Seen: the constant is 99, and the minimum allows 99. Of 1,000 random float64 values in [0, 1) some 13 % are read as a
# neighbour; values of up to 15 digits are read right.
# 2026-11-28
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q --disable-pip-version-check install llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
import random

from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def allows(schema: dict, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


number = 99.00000000000001
print("the constant allows", {text: allows({"const": number}, text) for text in ("99", "99.00000000000001")})
print("the minimum allows 99:", allows({"type": "number", "minimum": number}, "99"))
assert allows({"const": number}, "99") and not allows({"const": number}, "99.00000000000001")
assert allows({"type": "number", "minimum": number}, "99")
draw = random.Random(0)
values = [value for value in (draw.random() for _ in range(1000)) if "e" not in repr(value)]
wrong = sum(not allows({"const": value}, repr(value)) for value in values)
print(f"{wrong} of {len(values)} random constants are others")
assert 20 < wrong < 200
assert all(allows({"const": value}, repr(value)) for value in (round(value, 15) for value in values) if len(repr(value)) <= 17)
PYTHON
