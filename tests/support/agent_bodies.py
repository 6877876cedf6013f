"""Request bodies as coding agents send them: a long system prompt, many tools, calls, their results, and reasoning.

`tests/data` has the conversations; the prompt and the tools, which are long, are made here. And a model for them: tiny,
with random weights, a template that renders tools and calls, and positions for all of it.
"""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from support.random_folder import write_random_folder
from support.small_tokenizers import byte_level, save

DATA = Path(__file__).parents[1] / "data"
NUM_POSITIONS = 49_152
NUM_RULES = 330     # characters of the system prompt: 20,000 tokens and more
NUM_TOOLS = 30
_TEMPLATE = (
    "{{ bos_token }}{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content or '' }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
_CONFIG: dict[str, object] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 410, "hidden_size": 32,
    "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "max_position_embeddings": NUM_POSITIONS, "rms_norm_eps": 1e-6, "hidden_act": "silu",
    "tie_word_embeddings": True, "attention_bias": False,
}  # fmt: skip
_VERBS = ("read", "write", "list", "search", "move", "copy", "patch", "test", "build", "format")
_NOUNS = ("file", "folder", "symbol")


def write_agents_model(folder: Path) -> Path:
    """Write the model; return its folder."""
    write_random_folder(folder, _CONFIG)
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken(text) for text in ("<tool_call>", "</tool_call>", "<think>", "</think>")])
    return save(tokenizer, folder, chat_template=_TEMPLATE)


def system_prompt(num_rules: int) -> str:
    """Return rules for an agent, each of some 60 tokens."""
    return "\n".join(
        f"{number}. Before you change module {number * 37 % 101}, read its tests and run them; name each fault."
        for number in range(num_rules)
    )


def functions(num_tools: int) -> list[dict[str, Any]]:
    """Return tools, as name, description and schema."""
    arguments = {
        "path": {"type": "string", "description": "from the root of the repository"},
        "lines": {"type": "array", "items": {"type": "integer", "minimum": 1}, "maxItems": 2},
        "mode": {"enum": ["plain", "recursive", None]},
    }
    schema = {"type": "object", "properties": arguments, "required": ["path"], "additionalProperties": False}
    names = [f"{verb}_{noun}" for verb in _VERBS for noun in _NOUNS]
    return [{"name": name, "description": name.replace("_", " a "), "schema": schema} for name in names[:num_tools]]


def responses_body(num_rules: int = NUM_RULES, num_tools: int = NUM_TOOLS) -> dict[str, Any]:
    """Return a body for /v1/responses, as an agent with a shell sends it."""
    body: dict[str, Any] = json.loads((DATA / "agent_responses.json").read_text())
    tools = [
        {"type": "function", "name": each["name"], "description": each["description"], "strict": False,
         "parameters": each["schema"]}
        for each in functions(num_tools)
    ]  # fmt: skip
    return body | {"instructions": system_prompt(num_rules), "tools": [*tools, *body["tools"]]}


def messages_body(num_rules: int = NUM_RULES, num_tools: int = NUM_TOOLS) -> dict[str, Any]:
    """Return a body for /v1/messages, as an agent with an editor sends it."""
    body: dict[str, Any] = json.loads((DATA / "agent_messages.json").read_text())
    tools = [
        {"name": each["name"], "description": each["description"], "input_schema": each["schema"]}
        for each in functions(num_tools)
    ]
    tools[-1]["cache_control"] = {"type": "ephemeral"}
    rules = {"type": "text", "text": system_prompt(num_rules), "cache_control": {"type": "ephemeral", "ttl": "5m"}}
    return body | {"system": [*body["system"], rules], "tools": tools}
