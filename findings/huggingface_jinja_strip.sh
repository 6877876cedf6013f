#!/usr/bin/env bash
# Packages: @huggingface/jinja 0.5.11 of npm, beside jinja2 3.1.6
# Expected: the library renders chat templates, as its purpose says, to the prompts that transformers' jinja2 renders.
# Seen: lstrip, rstrip and strip leave out their argument: lstrip('\n') of an answer removes the blanks of its first line, too, so that
# indented code of an earlier turn is indented no longer. '1' == 1 is true, [1] == [1] is false, -7 % 3 is -1, {{ true }} is "true" and
# a float 2.0 is "2". No error comes from any.
# Date: 2026-11-30
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet --disable-pip-version-check jinja2==3.1.6
npm install --silent --no-audit --no-fund --ignore-scripts @huggingface/jinja@0.5.11 > log
cat > templates.json <<'JSON'
["{{ '\n    return x\n'.lstrip('\n') }}", "{{ 'x  \n'.rstrip('\n') }}|", "{{ '\n x \n'.strip('\n') }}|", "{{ '1' == 1 }}", "{{ [1] == [1] }}",
 "{{ -7 % 3 }}", "{{ true }}", "{{ n | tojson }}", "{{ '\n x \n' | trim }}"]
JSON
cat > render.py <<'PY'
import json

import jinja2

templates = json.load(open("templates.json"), strict=False)
print(json.dumps([jinja2.Template(text).render(n=2.0) for text in templates]))
PY
sed -i 's/\\n/\\\\n/g' templates.json
cat > render.mjs <<'JS'
import fs from "fs";
import { Template } from "@huggingface/jinja";

const templates = JSON.parse(fs.readFileSync("templates.json"));
console.log(JSON.stringify(templates.map((text) => new Template(text).render({ n: 2.0 }))));
JS
venv/bin/python render.py > python.json
node render.mjs > node.json
cat > compare.py <<'PY'
import json

templates, python, node = (json.load(open(f"{name}.json")) for name in ("templates", "python", "node"))
for row in zip(templates, python, node):
    print("{}: jinja2 {!r}, @huggingface/jinja {!r}".format(*row))
assert python == ["    return x\n", "x  |", " x |", "False", "True", "2", "True", "2.0", "x"], "it is no longer so"
assert node == ["return x\n", "x|", "x|", "true", "false", "-1", "true", "2", "x"], "it is no longer so"
PY
venv/bin/python compare.py
