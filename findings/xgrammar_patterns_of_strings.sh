#!/usr/bin/env bash
# Packages: xgrammar 0.2.9 (torch 2.13.0, transformers 5.23.0)
# Expected: a grammar of {"type": "string", "pattern": P} allows JSON of the strings in which P matches somewhere, which is what JSON
# Schema says, and quotes and backslashes of a string are escaped in it; patternProperties likewise.
# Seen: without a word, P is the whole text between the quotes, as it is written. "^x-" as a pattern of names allows the name "x-" alone,
# so that an object of x-... headers is empty; a pattern "b" allows "b" alone. A quote or a backslash that P spells out is not escaped:
# the only output that the grammar of '^5"$' allows is "5"", which is no JSON, and that of a pattern for C:\ is no JSON either.
# llguidance 1.9.1 allows the strings that are expected.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check xgrammar==0.2.9 torch==2.13.0 transformers==5.23.0 llguidance==1.9.1
cat > patterns.py <<'PY'
import json
import re

import xgrammar
from llguidance import LLMatcher, LLTokenizer

VOCABULARY = [chr(code) for code in range(32, 127)] + ["</s>"]
END = len(VOCABULARY) - 1
COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END]))
BYTES = LLTokenizer("byte")


def by_xgrammar(schema, text):
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_json_schema(json.dumps(schema)))
    return matcher.accept_string(text) and matcher.accept_token(END)


def by_llguidance(schema, text):
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_json_schema(json.dumps(schema)))
    ids = BYTES.tokenize_str(text)
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


def fits(pattern, text):
    """Return whether a text is JSON of a string in which the pattern matches."""
    try:
        return re.search(pattern, json.loads(text)) is not None
    except ValueError:
        return False


seen = {}
for pattern, texts in {"b": ['"abc"', '"b"'], '^5"$': ['"5\\""', '"5""'], r"^C:\\$": ['"C:\\\\"', '"C:\\"']}.items():
    for text in texts:
        schema = {"type": "string", "pattern": pattern}
        assert by_llguidance(schema, text) == fits(pattern, text)
        seen[pattern, text] = by_xgrammar(schema, text)
        print(f"pattern {pattern}: {text} fits: {fits(pattern, text)}, allowed: {seen[pattern, text]}")
schema = {"type": "object", "patternProperties": {"^x-": {"type": "integer"}}, "additionalProperties": False}
for text in ('{"x-a": 1}', '{"x-": 1}', "{}"):
    assert by_llguidance(schema, text)
    seen["^x-", text] = by_xgrammar(schema, text)
    print(f"names that begin with x-: {text} fits: True, allowed: {seen['^x-', text]}")
assert list(seen.values()) == [False, True, False, True, False, True, False, True, True], "it is no longer so"
PY
venv/bin/python patterns.py
