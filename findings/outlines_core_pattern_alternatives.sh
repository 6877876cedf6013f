#!/usr/bin/env bash
# Package: outlines-core 0.2.14
# Expected: build_regex_from_schema of {"type": "string", "pattern": "^yes$|^no$"} matches "yes" and "no" as JSON, with their quotes.
# Seen: the quotes are put beside the pattern without a group, and the first "^" and the last "$" are cut off: the regex is ("yes$|^no"). All
# that it can match in full is half a string. "yes|no" is ("yes|no"), which matches "yes without its end and no" without its
# beginning; neither is JSON, and neither quoted word matches. A group of one's own, ^(yes|no)$, is right.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check outlines-core==0.2.14
cat > pattern.py <<'PY'
import json
import re

from outlines_core.json_schema import build_regex_from_schema

TEXTS = ('"yes"', '"no"', '"yes', 'no"')
seen = {}
for pattern in ("^(yes|no)$", "yes|no", "^yes|no$"):
    regex = build_regex_from_schema(json.dumps({"type": "string", "pattern": pattern}))
    seen[pattern] = [text for text in TEXTS if re.fullmatch(regex, text)]
    print(f"{pattern}: {regex} matches {seen[pattern]}")
assert build_regex_from_schema('{"type": "string", "pattern": "^yes$|^no$"}') == '("yes$|^no")', "it is no longer so"
assert seen == {"^(yes|no)$": ['"yes"', '"no"'], "yes|no": ['"yes', 'no"'], "^yes|no$": ['"yes', 'no"']}, "it is no longer so"
PY
venv/bin/python pattern.py
