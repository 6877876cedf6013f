"""A reciting model whose texts have tool calls and reasoning, each after a prompt of its own, and each with an end."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Tokenizer

from support import small_tokenizers
from support.reciting_model import write_reciter
from support.small_tokenizers import BOS, CHAT_TEMPLATE, EOS

# Knows tools and calls of Hermes' format, and writes none that tests have: those with a city. Prompts have the same
# length with tools and without.
KNOWING_TEMPLATE = (
    CHAT_TEMPLATE + "{% for t in tools or [] if 'city' not in t | string %}{{ t.function.name }}{% endfor %}"
    "{% for m in messages %}{% for c in m.tool_calls or [] if 'city' not in c.function.arguments %}"
    "<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{% endfor %}{% if false %}<think></think>{% endif %}"
    "{% if thinks %}<think>{% endif %}"
)
SPECIAL = ("<tool_call>", "</tool_call>", "<|other|>")
CITY = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": CITY}}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": CITY}}


def call_text(name: str, arguments: object) -> str:
    """Return a call in Hermes' format."""
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments, ensure_ascii=False)}}}\n</tool_call>'


class CallingModel(NamedTuple):
    """A model's folder, and a conversation after which each text is recited, by its name."""

    folder: Path
    tokenizer: Tokenizer
    messages: Mapping[str, list[dict[str, str]]]
    num_tokens: Mapping[str, int]   # tokens of each text, with the end of the sequence

    def result_before(self, name: str, called_after: str, content: str = "") -> str:
        """Return the result of a call, after which a text is recited.

        `called_after`: the text with the call. `content`: the content of that message.
        """
        total = sum(self.num_tokens.values())
        before = list(self.num_tokens).index(name)
        length = 2 * total + sum(list(self.num_tokens.values())[:before])
        called = f"{self.messages[called_after][0]['content']}\nassistant: {content}\ntool: "
        return _filled(self.tokenizer, length, f"{BOS}user: {called}", "\nassistant:")


def write_calling_model(folder: Path, texts: Mapping[str, str], added: Sequence[str] = ()) -> CallingModel:
    """Write the model. Greedily it recites a text after its conversation, and then ends.

    `added`: texts that are one token each, and not special, as the markers of Qwen3's tokenizer.
    """
    tokenizer = small_tokenizers.byte_level()
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in added])
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    write_reciter(folder, tokenizer, "".join(text + EOS for text in texts.values()))
    config_path = folder / "tokenizer_config.json"
    config = json.loads(config_path.read_text()) | {"chat_template": KNOWING_TEMPLATE}
    config_path.write_text(json.dumps(config))
    num_tokens = {name: _length(tokenizer, text + EOS) for name, text in texts.items()}
    messages, start = {}, sum(num_tokens.values())
    for name, length in num_tokens.items():
        messages[name] = _conversation(tokenizer, start)
        start += length
    return CallingModel(folder, tokenizer, messages, num_tokens)


def _conversation(tokenizer: Tokenizer, length: int) -> list[dict[str, str]]:
    """Return a conversation of that many tokens."""
    return [{"role": "user", "content": _filled(tokenizer, length, f"{BOS}user: ", "\nassistant:")}]


def _filled(tokenizer: Tokenizer, length: int, before: str, after: str) -> str:
    """Return the text between two others that makes that many tokens of all three."""
    content = "x" * length
    while (excess := _length(tokenizer, before + content + after) - length) > 0:
        content = content[:-excess]
    assert excess == 0, "no text has this length"
    return content


def _length(tokenizer: Tokenizer, text: str) -> int:
    return len(tokenizer.encode(text, add_special_tokens=False).ids)
