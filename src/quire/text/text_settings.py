"""Text settings of a model folder in Hugging Face format: special tokens and chat template.

Three generations of files are read: `special_tokens_map.json`, `tokenizer_config.json`, and the template files
`chat_template.jinja` and `additional_chat_templates/tool_use.jinja`; where two disagree, the newer one wins, as in
transformers' tokenizers.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from quire.core.errors import ConfigError
from quire.core.model_files import read_json_object, read_text

CONFIG_FILE = "tokenizer_config.json"
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"  # names of templates
NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_NAMES = (DEFAULT_TEMPLATE, TOOL_TEMPLATE)
_TEMPLATE_FILE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"    # a folder
_PLACES = ("vocab_file", "merges_file", "tokenizer_file", "name_or_path", "_name_or_path")  # paths of another machine
_LISTS_OF_TOKENS = (  # or objects, with tokens by their names
    "additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TextSettings:
    """Special tokens by name (`bos_token` and so on), all special tokens, and the chat template, if there is one.

    `chat_template`: with a template for tools beside the default, both by their names. `others`: what the files say
    besides, tokens as their texts, for clients that ask for it.
    """

    named_tokens: dict[str, str]
    special_tokens: tuple[str, ...]
    chat_template: str | dict[str, str] | None
    others: dict[str, Any] = field(default_factory=dict)


def read_text_settings(folder: Path) -> TextSettings:
    """Read the settings of `folder`. Files that are not there count as empty; ModelError names a broken one."""
    config = object_if_any(folder, "special_tokens_map.json") | object_if_any(folder, CONFIG_FILE)
    named = _named_tokens(config)
    special = list(named.values())
    for key in _LISTS_OF_TOKENS:
        tokens = config.get(key)
        texts = map(token_text, tokens.values() if isinstance(tokens, dict) else _list(tokens))
        special.extend(text for text in texts if text is not None)
    others = {key: _with_texts(value) for key, value in config.items() if key not in _PLACES}
    return TextSettings(named, tuple(dict.fromkeys(special)), _chat_template(folder, config), others)


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    """Return the texts of special tokens by their names, which are variables of chat templates.

    As in transformers, each name of a token that ends in `_token` is one, and each of `extra_special_tokens` and of
    `model_specific_special_tokens` if that is an object.
    """
    named = {name: config.get(name) for name in NAMED_TOKENS}
    named |= {name: value for name, value in config.items() if name.endswith("_token")}
    for key in _LISTS_OF_TOKENS:
        named |= config[key] if isinstance(config.get(key), dict) else {}
    return {name: text for name, token in named.items() if (text := token_text(token)) is not None}


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


def _chat_template(folder: Path, config: dict[str, Any]) -> str | dict[str, str] | None:
    """Return the template of transformers' tokenizers, or with one for tools both, by their names.

    Template files replace the templates of `config`. `chat_template.json`, which only transformers' processors read,
    counts where there is no other template.
    """
    files = {}
    if (folder / _TEMPLATE_FILE).exists():
        files[DEFAULT_TEMPLATE] = read_text(folder, _TEMPLATE_FILE)
    for name in _NAMES:
        if (folder / _MORE_TEMPLATES / f"{name}.jinja").exists():
            files[name] = read_text(folder, f"{name}.jinja", _MORE_TEMPLATES)
    configured = _by_name(config.get("chat_template"))
    if files:
        return default_and_tool_template({DEFAULT_TEMPLATE: configured.get(DEFAULT_TEMPLATE)} | files)
    template = default_and_tool_template(configured)
    if template is not None:
        return template
    return default_and_tool_template(_by_name(object_if_any(folder, "chat_template.json").get("chat_template")))


def _by_name(template: object) -> dict[str, Any]:
    """Return templates by their names, given as one text, a list of objects with a name, or an object."""
    if isinstance(template, dict):
        return template
    listed = {str(each.get("name")): each.get("template") for each in _list(template) if isinstance(each, dict)}
    return listed or {DEFAULT_TEMPLATE: template}


def default_and_tool_template(named: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the default of named templates, or with one for tools both, by their names.

    A template for tools without a default is both; transformers refuses conversations without tools then. None if
    neither is given.
    """
    default, tool = (text if isinstance(text := named.get(name), str) else None for name in _NAMES)
    if default is None:
        return tool
    return default if tool is None else {DEFAULT_TEMPLATE: default, TOOL_TEMPLATE: tool}


_MARKS = "{}\n"         # a path has none of them, and a template has one


def given_chat_template(given: str | None) -> str | None:
    """Return the template; in one that is given itself `\\n` is a line break. ConfigError for neither of both."""
    if given is None:
        return None
    if any(mark in given for mark in _MARKS):
        return given.replace("\\n", "\n")
    try:
        return Path(given).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"chat_template must be a template or the path of one, got {given!r}: {error}") from error


log = logging.getLogger(__name__)

TOKENIZER_FILE = "tokenizer.json"
SENTENCEPIECE_FILE = "tokenizer.model"
VOCAB_FILE, MERGES_FILE = "vocab.json", "merges.txt"
TEKKEN_FILE = "tekken.json"
_FORMATS = ((TOKENIZER_FILE,), (SENTENCEPIECE_FILE,), (VOCAB_FILE, MERGES_FILE), (TEKKEN_FILE,))
_OTHER_FILES = ("*.model", "*.tiktoken", VOCAB_FILE, MERGES_FILE)  # what a folder may have instead


def tokenizer_file(folder: Path) -> str | None:
    """Return the name of the first file that the tokenizer of `folder` is read from, or None if it has none."""
    return next((names[0] for names in _FORMATS if all((folder / name).exists() for name in names)), None)


def missing_tokenizer(folder: Path) -> str:
    """Return, in words, what a folder without a tokenizer has instead, and what would help."""
    found = sorted({path.name for pattern in _OTHER_FILES for path in folder.glob(pattern)})
    instead = f"found only {', '.join(found)}" if found else "none of them is there"
    return (
        f"{folder} has no tokenizer, and --tokenizer names none. Needed is tokenizer.json, tokenizer.model, "
        f"vocab.json with merges.txt, or tekken.json; {instead}. "
        "transformers' AutoTokenizer.from_pretrained(...).save_pretrained(...) writes tokenizer.json"
    )


def warn_missing_tokenizer(folder: Path) -> None:
    """Log that prompts can only be token ids, and what would help."""
    log.warning("prompts must be token ids, chats and texts are refused: %s", missing_tokenizer(folder))
