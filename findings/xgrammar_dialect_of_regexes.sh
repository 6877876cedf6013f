#!/usr/bin/env bash
# Packages: xgrammar 0.2.9 (torch 2.13.0, transformers 5.23.0), beside llguidance 1.9.1
# Expected: a regex that compile_regex takes means what it means in Python, in ECMAScript and in Rust, or is refused: one text for
# one pattern in vLLM and SGLang whichever back end their `regex` field reaches.
# Seen: "." is a line break, too, so that "answer: .*" does not end with its line. \A and \Z are the letters A and Z: the only output of
# \Aab\Z is "AabZ". "^" and "$" within a pattern are left out: a$b allows "ab". [[:alpha:]] is a set of seven characters and a bracket.
# Standard error has a warning for the anchors, and nothing is refused. llguidance has "." without a line break, refuses the anchors by
# name, and reads the class.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check xgrammar==0.2.9 torch==2.13.0 transformers==5.23.0 llguidance==1.9.1
cat > match.py <<'PY'
import xgrammar
from llguidance import LLMatcher, LLTokenizer

VOCABULARY = ["\n", *(chr(code) for code in range(32, 127)), "</s>"]
END = len(VOCABULARY) - 1
COMPILER = xgrammar.GrammarCompiler(xgrammar.TokenizerInfo(VOCABULARY, vocab_type=xgrammar.VocabType.RAW, stop_token_ids=[END]))
BYTES = LLTokenizer("byte")


def by_xgrammar(pattern, text):
    matcher = xgrammar.GrammarMatcher(COMPILER.compile_regex(pattern))
    return matcher.accept_string(text) and matcher.accept_token(END)


def by_llguidance(pattern, text):
    matcher = LLMatcher(BYTES, LLMatcher.grammar_from_regex(pattern))
    if matcher.is_error():
        return None  # refused
    ids = list(text.encode())
    return matcher.validate_tokens(ids) == len(ids) and matcher.consume_tokens(ids) and matcher.is_accepting()


seen = {}
for pattern, text in ((r"a.c", "abc"), (r"a.c", "a\nc"), (r"\Aab\Z", "ab"), (r"\Aab\Z", "AabZ"), (r"a$b", "ab"),
                      (r"[[:alpha:]]", "q"), (r"[[:alpha:]]", ":]")):
    seen[pattern, text] = by_xgrammar(pattern, text), by_llguidance(pattern, text)
    print(f"{pattern} on {text!r}: xgrammar {seen[pattern, text][0]}, llguidance {seen[pattern, text][1]}")
assert [x for x, _ in seen.values()] == [True, True, False, True, True, False, True], "it is no longer so"
assert [y for _, y in seen.values()] == [True, False, None, None, None, True, False], "it is no longer so"
PY
venv/bin/python match.py
