#!/usr/bin/env bash
# transformers 5.23.0, with the template of DeepSeek's R1 distills as trl 1.16.0 has it: a call beside a null content.
#
# Expected: messages in OpenAI's form, an assistant's with tool_calls and "content": null, are rendered: the template shows
#   a call where `message['content'] is none`, and renders these messages by itself.
# Seen: apply_chat_template drops fields that are null before it renders. The content is undefined and not none: the branch
#   without calls is rendered, which fails with "UndefinedError: 'dict object' has no attribute 'content'". An empty
#   content hides the call without an error.
# Date: 2026-11-28
set -euo pipefail

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip --quiet --disable-pip-version-check install transformers==5.23.0 jinja2==3.1.6
venv/bin/pip --quiet --disable-pip-version-check download --no-deps trl==1.16.0
python3 -m zipfile -e trl-1.16.0-py3-none-any.whl trl

cat > render.py <<'EOF'
import pathlib

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

template = pathlib.Path("trl/trl/chat_templates/deepseek_r1_distill.jinja").read_text()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a")), bos_token="a")
call = {"id": "c", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Ulm"}'}}


def messages(content):
    return [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": content, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "18"},
    ]


def rendered(content):
    try:
        return tokenizer.apply_chat_template(messages(content), chat_template=template, tokenize=False)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
alone = environment.from_string(template).render(messages=messages(None), bos_token="a")
with_null, with_empty = rendered(None), rendered("")
print("the template by itself, null content:", alone)
print("apply_chat_template, null content:", with_null)
print("apply_chat_template, empty content:", with_empty)
assert "get_weather" in alone
assert "has no attribute 'content'" in with_null
assert "get_weather" not in with_empty and "18" in with_empty
EOF
venv/bin/python render.py
