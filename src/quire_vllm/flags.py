"""Flags of vLLM on the command line, in the environment and in files, rewritten to those of a command of Quire.

What a flag means is in `translation`. Forms of vLLM's command line are read as well: `--no-flag` of
every switch, several values behind one flag (`--served-model-name a b`), keys of JSON one by one
(`--some-config.key value`), `-O3`, and `--model M`.
"""

import json
import re
import sys
from collections import deque
from collections.abc import Callable, Mapping, MutableMapping
from difflib import get_close_matches
from typing import Any, NoReturn

from quire.cli.flag_groups import SEVERAL, variable_of
from quire.core.errors import ConfigError
from quire_vllm.translation import ROWS, meaning
from quire_vllm.values import Row, parsed_json

VLLM_KEY = "VLLM_API_KEY"       # environment variable; for servers, after keys from everywhere else
_LEVEL = re.compile(r"-O=?(\d)")
_KEY = re.compile(r"(--?[a-zA-Z][\w-]*)\.(.+)")
# Flags of llama.cpp, Ollama and SGLang, and what does the same here.
_MEANT = {
    "-c": "--max-model-len", "--ctx-size": "--max-model-len", "--num-ctx": "--max-model-len",
    "--context-length": "--max-model-len", "-np": "--max-num-seqs", "--parallel": "--max-num-seqs",
    "--max-running-requests": "--max-num-seqs", "--mem-fraction-static": "--gpu-memory-utilization",
    "-a": "--served-model-name", "--alias": "--served-model-name", "--cors": "--allowed-origins",
    "--cors-origins": "--allowed-origins", "--keep-alive": "--idle-unload", "--lora": "--lora-modules",
    "-v": "--log-level debug", "--verbose": "--log-level debug", "-md": "--speculative-config",
    "--model-draft": "--speculative-config", "--tp-size": "--tensor-parallel-size",
    "--dp-size": "--data-parallel-size",
}  # fmt: skip
_MEANT |= dict.fromkeys(("-t", "--threads"), "OMP_NUM_THREADS in the environment")
_MEANT |= dict.fromkeys(("-m", "--model-path", "-hf", "--hf-repo"), "the model's folder, file or name, without a flag")


class VllmFlags:
    """Translation of vLLM's flags for one call of a command; a flag without effect is told once, on standard error.

    `fail` raises the error of wrong usage with a message.
    """

    def __init__(self, params: list[Any], fail: Callable[[str], NoReturn]) -> None:
        self._fail = fail
        self._own = {param.name: param for param in params if param.name}
        self._own_flags = {flag: param for param in params for flag in (*param.opts, *param.secondary_opts)}
        has_engine, has_server = "max_num_seqs" in self._own, "served_model_name" in self._own
        self._rows = {name: row for name, row in ROWS.items() if (has_engine if row.is_engine else has_server)}
        self._row_flags = {flag: row for row in self._rows.values() for flag in (row.flag, *row.flags)}
        self._given: set[str] = set()           # rows that a source of higher precedence has set
        self._off: set[str] = set()             # own switches that are off by a `--no-` flag of vLLM
        self._keys: dict[str, Any] = {}         # JSON that was given key by key, by flag

    def arguments(self, arguments: list[str], environment: MutableMapping[str, str]) -> list[str]:
        """Return the arguments of the command, with those that `environment` has in vLLM's names or forms before."""
        if not self._rows and not any(map(_has_several, self._own.values())):
            return arguments
        typed = self._typed(deque(arguments))
        for name in self._off:
            environment.pop(variable_of(name), None)
        from_environment = self._from_environment(environment)
        return [*from_environment, *self._keyed(typed), *typed]

    def defaults(self, environment: Mapping[str, str]) -> dict[str, Any]:
        """Return options that vLLM's own variables of the environment give, unless they are given in other ways."""
        key = environment.get(VLLM_KEY, "")
        return {"api_key": [key]} if key and "api_key" in self._rows else {}

    def options_of(self, name: str, value: object) -> dict[str, Any]:
        """Return the options that a name of a file sets, with their values. Names that are no flags are returned."""
        row = self._rows.get(name)
        if name in self._off:
            return {}
        if row is None or (self._is_own_as_it_is(row) and not isinstance(value, dict)):
            return {name: value}
        if name in self._given:
            return {}
        if self._is_own_as_it_is(row):
            return {name: json.dumps(value) if row.takes == "json" else value}
        options = self._options_of(row, value, name.replace("_", "-"))
        for own, given in options.items():
            if isinstance(given, dict):
                options[own] = json.dumps(given)
            elif isinstance(given, tuple):
                options[own] = [*given]
        return options

    def _is_own_as_it_is(self, row: "Row") -> bool:
        """Return whether the command has the flag itself, and reads all values of it."""
        return row.name in self._own and row.convert is None

    def _options_of(self, row: "Row", value: object, shown: str) -> dict[str, Any]:
        try:
            told = meaning(row, value, shown, self._own)
        except ConfigError as error:
            self._fail(str(error))
        if told.remark and row.name not in self._given:
            print(f"quire: {told.remark}", file=sys.stderr)  # noqa: T201
        self._given.add(row.name)
        return dict(told.options)

    def _from_environment(self, environment: Mapping[str, str]) -> list[str]:
        found: list[str] = []
        for row in self._rows.values():
            name = variable_of(row.name)
            if name in environment and row.name not in self._given and not self._is_own_as_it_is(row):
                found += self._words(self._options_of(row, environment[name], name))
        return found

    # --- the command line ---------------------------------------------------------------------------------------------

    def _typed(self, words: deque[str]) -> list[str]:
        """Return the words of a command line in the command's own flags."""
        typed: list[str] = []
        further = None              # place of the last value that follows another one of its flag
        has_argument = False
        while words:
            word = words.popleft()
            if word == "--":
                typed += [word, *words]
                break
            if not word.startswith("-") or word == "-":
                typed.append(word)
                has_argument = True
                continue
            flag = self._flag(word, words)
            typed += flag
            has_argument |= bool(flag) and (flag[0] == "--config" or not flag[0].startswith("-"))
            is_list_of_own = _has_several(self._own_flags.get(flag[0])) if flag else False
            if len(flag) > 2 and not flag[-1].isdigit() and not is_list_of_own:    # else it is no model
                further = len(typed) - 2
        if further is not None and not has_argument:    # `--served-model-name NAME MODEL`
            del typed[further]
        return typed

    def _keyed(self, typed: list[str]) -> list[str]:
        """Return the words of JSON that was given key by key. Fails if the JSON was typed as well."""
        words: list[str] = []
        for flag, value in self._keys.items():
            if flag in typed:
                self._fail(f"{flag} is given as JSON and by its keys {', '.join(value)}; give all keys in one way")
            words += self._flag(flag, deque([json.dumps(value)]))
        return words

    def _flag(self, word: str, words: deque[str]) -> list[str]:
        """Return the words of one flag in the command's own terms; its values are taken off `words`."""
        flag, is_attached, attached = word.partition("=")
        if level := _LEVEL.fullmatch(word):
            flag, is_attached, attached = "-O", "=", level[1]
        key = _KEY.fullmatch(flag)
        flag = key[1] if key else flag
        flag = flag.replace("_", "-") if flag.startswith("--") else flag
        if is_attached:
            words.appendleft(attached)
        param, row = self._own_flags.get(flag), self._row_flags.get(flag)
        row = row or (self._rows.get(param.name) if param is not None else None)
        if key is not None and row is not None and row.takes == "json":
            self._set_key(flag, key[2], self._value(flag, words))
            return []
        if param is not None and (row is None or self._is_own_as_it_is(row)):
            return self._own_words(flag, param, row, words)
        if row is not None:
            return self._words(self._options_of(row, self._value_of(row, flag, words, bool(is_attached)), flag))
        if word[:2] in self._own_flags:     # `-qint8`
            return [word]
        return self._negative(flag)

    def _own_words(self, flag: str, param: Any, row: "Row | None", words: deque[str]) -> list[str]:  # noqa: ANN401
        """Return a flag that the command has, each of its values behind a flag of its own."""
        if getattr(param, "is_flag", False) or not words:
            return [flag]
        if param.param_type_name == "argument":
            return [words.popleft()]
        taken, is_list = [flag, words.popleft()], _has_several(param) or (row is not None and row.takes == "list")
        while is_list and words and not words[0].startswith("-"):
            taken += [flag, words.popleft()]
        return taken

    def _value_of(self, row: "Row", flag: str, words: deque[str], is_attached: bool) -> Any:  # noqa: ANN401
        """Take the value of a flag in vLLM's form."""
        if row.takes == "switch":
            return words.popleft() if is_attached else True
        if row.takes == "optional text" and not is_attached and (not words or words[0].startswith("-")):
            return True
        taken = [self._value(flag, words)]
        while row.takes == "list" and words and not words[0].startswith("-"):
            taken.append(words.popleft())
        return taken if row.takes == "list" else taken[0]

    def _value(self, flag: str, words: deque[str]) -> str:
        if not words:
            self._fail(f"Option {flag!r} requires an argument.")
        return words.popleft()

    def _set_key(self, flag: str, path: str, value: str) -> None:
        """Set one key of JSON, as `a.b`; with a `+` at its end, the list of the texts between commas."""
        *outer, name = path.removesuffix("+").split(".")
        keys = self._keys.setdefault(flag, {})
        for each in outer:
            keys = keys.setdefault(each, {})
            if not isinstance(keys, dict):
                self._fail(f"{flag}.{path}: {each} has a value already")
        try:
            keys[name] = value.split(",") if path.endswith("+") else parsed_json(value, f"{flag}.{path}")
        except ConfigError as error:
            self._fail(str(error))

    def _negative(self, flag: str) -> list[str]:
        """Return the words of a switch that is off by `--no-`; fail for a flag that there is none of."""
        positive = "--" + flag.removeprefix("--no-")
        param, row = self._own_flags.get(positive), self._row_flags.get(positive)
        if flag.startswith("--no-") and param is not None and getattr(param, "is_flag", False):
            self._off.add(param.name)
            return []
        if flag.startswith("--no-") and row is not None and row.takes == "switch":
            return self._words(self._options_of(row, False, flag))
        meant = _MEANT.get(flag)
        if meant is None or (meant.startswith("-") and meant.split()[0] not in self._own_flags):
            near = get_close_matches(flag, self._own_flags | self._row_flags) if flag.startswith("--") else ()
            meant = near[0] if near else None           # a letter or two are near to any others
        return self._fail(f"No such option: {flag}" + (f" Did you mean {meant}?" if meant else ""))

    def _words(self, options: dict[str, Any]) -> list[str]:
        """Return options as words of the command line. Keys of an object are kept until all of them are known."""
        words: list[str] = []
        for name, value in options.items():
            param = self._own[name]
            if isinstance(value, dict):
                self._keys.setdefault(param.opts[0], {}).update(value)
            elif param.param_type_name == "argument":
                words.append(str(value))
            elif isinstance(value, tuple):
                words += [word for each in value for word in (param.opts[0], str(each))]
            elif getattr(param, "is_flag", False):
                words += [*(param.opts if value else param.secondary_opts)][:1]
            else:
                words += [param.opts[0], str(value)]
        return words


def _has_several(param: Any) -> bool:  # noqa: ANN401 (of the click that typer brings; None: no flag of the command)
    """Return whether a flag of the command may have several values behind it, as those of vLLM's lists."""
    return (getattr(param, "metavar", None) or "").endswith(SEVERAL)
