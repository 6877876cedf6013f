#!/usr/bin/env bash
# Packages: xgrammar 0.2.9 (torch 2.13.0, transformers 5.23.0)
# Expected: {"type": "string", "maxLength": 20} allows the texts of {"type": "string"} that have up to 20 characters.
# Seen: a bound on the length makes another string. It has no escapes: no quote, no backslash and no line break can be written in it, so
# that a model which is to quote, or to write a path or two lines, writes something else. And it has control characters as they are: a
# tab between the quotes is allowed, which JSON forbids and json.loads refuses. Without a bound both are right. pydantic's
# Field(min_length=1) is enough.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check xgrammar==0.2.9 torch==2.13.0 transformers==5.23.0
cat > bounds.py <<'PY'
import json

import xgrammar

VOCABULARY = ["\t", *(chr(code) for code in range(32, 127)), "</s>"]
END = len(VOCABULARY) - 1
COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END]))
TEXTS = {"plain": '"ab"', "quote": '"a\\"b"', "line break": '"a\\nb"', "backslash": '"a\\\\b"', "tab as it is": '"a\tb"'}


def is_json(text):
    try:
        return isinstance(json.loads(text), str)
    except ValueError:
        return False


def allowed(schema):
    found = {}
    for name, text in TEXTS.items():
        matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema)))
        found[name] = matcher.accept_string(text) and matcher.accept_token(END)
    return found


print("is JSON:", {name: is_json(text) for name, text in TEXTS.items()})
for bounds in ({}, {"maxLength": 20}, {"minLength": 1}):
    found = allowed({"type": "string"} | bounds)
    print(f"allowed with {bounds or 'no bound'}:", found)
    assert [*found.values()] == ([True, True, True, True, False] if not bounds else [True, False, False, False, True]), "no longer so"
PY
venv/bin/python bounds.py
