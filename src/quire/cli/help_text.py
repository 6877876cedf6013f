"""Help of a command: its own flags and the most used ones on one screen; the others by group, name or word.

    --help                short: flags of FOLDED groups are left out unless they are in COMMON
    --help=all            every flag, under the headings of their groups
    --help=GROUP          one group: cache; also as vLLM names it, CacheConfig
    --help=FLAG           one flag at length: max-model-len
    --help=WORD           flags that have a word in their names or texts

A name is never cut: where it is longer than its column, the text begins on the next line.
"""

import re
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

import typer

from quire.core.checks import nearest
from quire.core.options import declared_options

FOLDED = (
    "Model", "Cache", "Device", "Scheduling", "Parallel", "Speculation", "LoRA",    # an engine's
    "Server", "Access", "Outputs", "Recovery", "Limits",                            # a server's
)  # fmt: skip
COMMON = (
    "host", "port", "api_key", "served_model_name", "max_model_len", "dtype", "quantization", "kv_cache_memory",
    "max_num_seqs", "tensor_parallel_size",
)  # fmt: skip
OWN = "Flags"           # heading of flags without a group
_COLUMN = 30            # where texts begin
_WIDEST, _NARROWEST = 100, 40
_KINDS = {"int": "INT", "float": "NUMBER"}


def help_text(ctx: Any, topic: str) -> str:  # noqa: ANN401 (the context of the click that typer brings)
    """Return the help of `ctx`'s command on a topic; empty is the short help. An unknown topic is wrong usage."""
    groups = _groups(ctx.command.params)
    wanted = _plain(topic)
    if not wanted:
        return _short(ctx, groups)
    if wanted == "all":
        return _head(ctx) + _sections(groups)
    if wanted in ("groups", "listgroup"):
        return _group_names(groups)
    for name, flags in groups.items():
        if wanted in (name.lower(), f"{name.lower()}config"):
            return _sections({name: flags})
    params = [param for flags in groups.values() for param in flags]
    for param in params:
        if wanted in map(_plain, (*param.opts, *param.secondary_opts)):
            return _at_length(param)
    found = {name: [param for param in flags if _speaks_of(param, wanted)] for name, flags in groups.items()}
    if any(found.values()):
        return _sections({name: flags for name, flags in found.items() if flags})
    names = [*map(str.lower, groups), *(_plain(param.opts[0]) for param in params)]
    ctx.fail(f"no flag, group or text of this command has {topic!r}{nearest(wanted, names)}")
    raise AssertionError("fail raises")


def _plain(name: str) -> str:
    return name.lower().lstrip("-").replace("_", "-")


def _groups(params: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the flags by their headings: a command's own first, then FOLDED ones."""
    groups: dict[str, list[Any]] = {}
    for param in params:
        if param.param_type_name == "option" and param.name != "help" and not param.hidden:
            groups.setdefault(param.rich_help_panel or OWN, []).append(param)
    return dict(sorted(groups.items(), key=lambda group: FOLDED.index(group[0]) if group[0] in FOLDED else -1))


def _head(ctx: Any) -> str:  # noqa: ANN401
    """Return usage, purpose and arguments of the command."""
    arguments = {
        param.metavar or param.name.upper(): _described(param)
        for param in ctx.command.params
        if param.param_type_name == "argument"
    }
    usage = " ".join([ctx.command_path, *(f"[{name}]" for name in arguments), "[FLAGS]"])
    entries = "".join(_entry(name, text) for name, text in arguments.items())
    return f"{_bold('Usage:')} {usage}\n\n{_wrapped(ctx.command.help or '')}\n\n{entries}{entries and chr(10)}"


def _short(ctx: Any, groups: dict[str, list[Any]]) -> str:  # noqa: ANN401
    """Return the help of one screen. A command without folded groups shows all that it has."""
    folded = {name: flags for name, flags in groups.items() if name in FOLDED}
    shown = {name: flags for name, flags in groups.items() if name not in FOLDED}
    common = [param for name in COMMON for flags in folded.values() for param in flags if param.name == name]
    if common:
        shown["Often used"] = common
    config = [param for param in shown.get(OWN, ()) if param.name == "config"]
    if config == shown.get(OWN):                # its one flag is in the last sentence
        del shown[OWN]
    more = [_group_names(folded) + _wrapped(
        f"--help=all shows all {sum(map(len, groups.values()))} flags, --help=max-num-seqs one at length, "
        "--help=context those with a word in their texts."
    )]  # fmt: skip
    elsewhere = " or a line of --config FILE.yaml" if config else ""
    more = [*(more if folded else ()), _wrapped(f"A flag may also be QUIRE_NAME in the environment{elsewhere}.")]
    return _head(ctx) + "\n".join([_sections(shown), *more])


def _group_names(groups: dict[str, list[Any]]) -> str:
    """Return the names of groups with their numbers of flags, each on one line with its number."""
    names = _wrapped(", ".join(f"{name.lower()}\N{NO-BREAK SPACE}{len(flags)}" for name, flags in groups.items()))
    return f"{_bold('More flags, by --help=GROUP')}:\n{names.replace(chr(160), ' ')}\n"


def _sections(groups: dict[str, list[Any]]) -> str:
    sections = [
        f"{_bold(name)}:\n" + "".join(_entry(_names(param), _described(param)) for param in flags)
        for name, flags in groups.items()
    ]
    return "\n".join(sections)


def _entry(names: str, text: str) -> str:
    """Return names with their text beside them, or below where they need its room."""
    lines = textwrap.wrap(text, _width() - _COLUMN, break_on_hyphens=False, break_long_words=False)
    first = f"  {names}"
    if len(first) + 2 > _COLUMN or not lines:
        body = [first, *(" " * _COLUMN + line for line in lines)]
    else:
        body = [first.ljust(_COLUMN) + lines[0], *(" " * _COLUMN + line for line in lines[1:])]
    return "\n".join(body).replace(names, _coloured(names), 1) + "\n"


def _at_length(param: Any) -> str:  # noqa: ANN401
    """Return all that is known of one flag."""
    name = _plain(param.opts[0])
    facts = [
        f"default: {_default(param) or 'none'}",
        f"in the environment: QUIRE_{name.replace('-', '_').upper()}; in a file of --config: {name}: VALUE",
        f"group: {(param.rich_help_panel or OWN).lower()}",
    ]
    paragraphs = [_long_text(param), *facts]
    indent = " " * 4
    wrapped = [
        textwrap.fill(each, _width(), initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)
        for each in paragraphs
    ]
    return "\n".join([_coloured(_names(param)), *wrapped])


def _long_text(param: Any) -> str:  # noqa: ANN401
    """Return the text of docs/reference.md where the flag is an engine's or a server's, else that of the help."""
    from quire.engine.options import EngineOptions  # noqa: PLC0415 (the list of commands loads no engine)
    from quire.server.options import ServerOptions  # noqa: PLC0415

    for each in (*declared_options(EngineOptions), *declared_options(ServerOptions)):
        if each.name == param.name and each.option.help == param.help:
            text = each.option.row or each.option.help
            plain = re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text)
            return plain.replace("`None`", "without it").replace("`True`", "with it").replace("`", "")
    return str(param.help or "")


def _speaks_of(param: Any, word: str) -> bool:  # noqa: ANN401
    return word in _plain(" ".join([*param.opts, param.help or "", _long_text(param)]))


def _names(param: Any) -> str:  # noqa: ANN401
    """Return a flag with its short and negative forms and the kind of its value."""
    names = ", ".join(param.opts) + "".join(f" / {name}" for name in param.secondary_opts)
    if param.is_flag:
        return names
    choices = "|".join(map(str, param.type_descriptor.choices or ()))
    return f"{names} {param.metavar or choices or _KINDS.get(param.bare_type(), 'TEXT')}"


def _described(param: Any) -> str:  # noqa: ANN401
    """Return a parameter's text and its default."""
    default = _default(param)
    return f"{param.help or ''}{f' [default: {default}]' if default else ''}".strip()


def _default(param: Any) -> str:  # noqa: ANN401
    """Return the default of a parameter as a reader wants it; empty if there is none."""
    if isinstance(param.show_default, str):
        return param.show_default
    if param.default in (None, False, "", [], ()) or callable(param.default):
        return ""
    if param.default is True:
        return "on"
    is_list = isinstance(param.default, list | tuple)
    return " ".join(map(str, param.default)) if is_list else str(param.default)


def _width() -> int:
    """Return the columns of the terminal, or of COLUMNS; 80 in a pipe."""
    return max(_NARROWEST, min(_WIDEST, shutil.get_terminal_size((80, 24)).columns))


def _wrapped(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _width(), break_on_hyphens=False)


def _bold(text: str) -> str:
    return typer.style(text, bold=True)


def _coloured(text: str) -> str:
    return typer.style(text, fg="cyan")
