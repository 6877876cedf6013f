#!/usr/bin/env bash
# llguidance 1.9.1: an exclusive bound of a number is allowed where the other bound is less than 1 away.
#
# Expected: no number that {"exclusiveMinimum": 0, "maximum": 0.5} excludes is allowed, as with a maximum of 1; and a grammar
# of a constant integer beyond 2**53 allows that integer alone, or is refused.
# Seen: 0 is allowed with a maximum of 0.5, not with one of 1 or of 1.5; likewise 10 with {"exclusiveMinimum": 10, "maximum":
# 10.5}. {"type": "integer", "minimum": n, "maximum": n} for n = 2**53 + 1 allows 2**53 and not n.
# 2026-11-28
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" -q --disable-pip-version-check install llguidance==1.9.1
"$folder/venv/bin/python" - <<'PYTHON'
from llguidance import LLMatcher, LLTokenizer

tokenizer = LLTokenizer("byte")


def allows(schema: dict, text: str) -> bool:
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_json_schema(schema))
    tokens = list(text.encode())
    return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()


def above(least: int, most: float) -> dict:
    return {"type": "number", "exclusiveMinimum": least, "maximum": most}


found = {(least, most): allows(above(least, most), str(least)) for least, most in [(0, 0.5), (0, 1), (0, 1.5), (10, 10.5)]}
print("the exclusive bound is allowed, by both bounds:", found)
assert found == {(0, 0.5): True, (0, 1): False, (0, 1.5): False, (10, 10.5): True}
number = 2**53 + 1
only = {"type": "integer", "minimum": number, "maximum": number}
print("only", number, "allows", number - 1, allows(only, str(number - 1)), "and itself", allows(only, str(number)))
assert allows(only, str(number - 1)) and not allows(only, str(number))
PYTHON
