"""Text settings of a model folder in Hugging Face format: special tokens and chat template.

Three generations of files are read: `special_tokens_map.json`, `tokenizer_config.json`, and the template files
`chat_template.jinja` and `chat_template.json`; where two disagree, the newer one wins, as in transformers.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.model_files import read_json_object, read_text

CONFIG_FILE = "tokenizer_config.json"
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_PLACES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path", "_name_or_path")  # of another machine
_LISTS_OF_TOKENS = ("additional_special_tokens", "extra_special_tokens")


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Special tokens by name (`bos_token` and so on), all special tokens, and the chat template, if there is one.

    `others`: what the files say besides, tokens as their texts, for clients that ask for it.
    """

    named_tokens: dict[str, str]
    special_tokens: tuple[str, ...]
    chat_template: str | None
    others: dict[str, Any] = field(default_factory=dict)


def read_text_settings(folder: Path) -> TextSettings:
    """Read the settings of `folder`. Files that are not there count as empty; ModelError names a broken one."""
    config = object_if_any(folder, "special_tokens_map.json") | object_if_any(folder, CONFIG_FILE)
    named = {name: text for name in NAMED_TOKENS if (text := token_text(config.get(name))) is not None}
    special = list(named.values())
    for key in _LISTS_OF_TOKENS:
        tokens = config.get(key)
        texts = map(token_text, tokens.values() if isinstance(tokens, dict) else _list(tokens))
        special.extend(text for text in texts if text is not None)
    others = {key: _with_texts(value) for key, value in config.items() if key not in _PLACES}
    return TextSettings(named, tuple(dict.fromkeys(special)), _chat_template(folder, config), others)


def object_if_any(folder: Path, name: str) -> dict[str, Any]:
    """Return the object in a JSON file, or {} when it is not there."""
    return read_json_object(folder, name) if (folder / name).exists() else {}


def token_text(token: object) -> str | None:
    """Return the text of a token that is given as a string or as an object with a `content`."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) and text else None


def _with_texts(value: Any) -> Any:  # noqa: ANN401 (JSON)
    """Return a value with the texts of tokens in place of their objects."""
    if isinstance(value, dict):
        return value["content"] if "content" in value else {key: _with_texts(each) for key, each in value.items()}
    return [_with_texts(each) for each in value] if isinstance(value, list) else value


def _list(value: object) -> list[Any]:
    """Return `value` if it is a list, else an empty one: settings of a wrong type count as not given."""
    return value if isinstance(value, list) else []


def _chat_template(folder: Path, config: dict[str, Any]) -> str | None:
    """Return the template of the newest kind of file that has one; of several named ones, the default."""
    if (folder / "chat_template.jinja").exists():
        return read_text(folder, "chat_template.jinja")
    template: Any = object_if_any(folder, "chat_template.json").get("chat_template", config.get("chat_template"))
    named = {str(each.get("name")): each.get("template") for each in _list(template) if isinstance(each, dict)}
    template = (template if isinstance(template, dict) else named).get("default", template)
    return template if isinstance(template, str) else None
