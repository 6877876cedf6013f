"""Tables of options in docs/reference.md, made from their declarations.

    python tools/reference_tables.py    # writes them into the page

A table is between `<!-- options: NAME -->` and `<!-- end of options -->`; TABLES has the names.
"""

from collections.abc import Callable, Iterable
from inspect import get_annotations

from page_tables import Page, table
from quire.cli.deploy import ClusterFlags
from quire.cli.run_batch.run_batch_command import BatchFlags
from quire.core.options import SIZE, Declared, declared_options
from quire.engine.options import EngineOptions
from quire.server.options import Limits, ServerOptions
from quire_lab.paper.paper_command import PaperFlags
from quire_lab.plan_command import DeviceFlags
from quire_lab.simulate import LoadFlags

WIDTH = 120                      # characters of a line that is not a table's


def flag_names(declared: Declared) -> str:
    """Return the flag as the page writes it, with its negative where it has one."""
    name = declared.name.replace("_", "-")
    is_switched_off = declared.default is True or declared.hint == bool | None
    other = f"--no-{name}" if is_switched_off else declared.option.short
    return f"`--{name}`" if other is None else f"`--{name}`, `{other}`"


def shown_default(declared: Declared) -> str:
    """Return the default as a reader of the command line's table looks for it."""
    option, value = declared.option, declared.default
    if option.shown_default is not None or value in (None, ()):
        return option.shown_default or "none"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, int) and option.metavar == SIZE:
        return f"{value >> 20}MiB" if value % 2**20 == 0 else f"{value >> 10}KiB"
    if isinstance(value, int | float):
        return f"{value:,}" if isinstance(value, int) and value >= 10_000 else f"{value:g}"
    return f"`{value}`"


def wrapped(words: Iterable[str], first: str, indent: str) -> str:
    """Return the words in lines of at most WIDTH characters."""
    lines = [first]
    for word in words:
        if len(lines[-1]) + 1 + len(word) > WIDTH:
            lines.append(indent)
        lines[-1] += ("" if lines[-1].endswith(("(", " ")) or not lines[-1] else " ") + word
    return "\n".join(lines) + "\n"


def llm_signature() -> str:
    """Return the call of `LLM` with all defaults."""
    model, *others = declared_options(EngineOptions)
    words = [f"{model.name}={model.default},", "*,"]
    words += [f"{each.name}={_literal(each.default)}," for each in others]
    words[-1] = words[-1].removesuffix(",") + ")"
    return wrapped(words, "    LLM(", "        ")


def _literal(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


def llm_arguments() -> str:
    """Return the table of the arguments of `LLM`."""
    declared = declared_options(EngineOptions)
    return table(("argument", "meaning"), *((f"`{each.name}`", each.option.row) for each in declared))


def engine_flags() -> str:
    """Return the sentence that lists the flags of an engine."""
    names = [flag_names(each) for each in declared_options(EngineOptions) if each.option.kind == "flag"]
    words = [*", ".join(names).split(), "(see `LLM`)."]
    return wrapped(words, "Flags of all commands that load a model:", "")


def limits() -> str:
    """Return the table of the server's limits, with the answer past each."""
    cells = ((*_flag_cells(each), each.option.past) for each in declared_options(Limits))
    return table(("flag", "default", "bounds", "past it"), *cells)


def flags(group: type) -> str:
    """Return the table of a group's own flags."""
    own = get_annotations(group)
    declared = (each for each in declared_options(group) if each.name in own and each.option.kind == "flag")
    return table(("flag", "default", "meaning"), *map(_flag_cells, declared))


def _flag_cells(declared: Declared) -> tuple[str, str, str]:
    return flag_names(declared), shown_default(declared), declared.option.row or declared.option.help


TABLES: dict[str, Callable[[], str]] = {
    "llm_signature": llm_signature,
    "llm_arguments": llm_arguments,
    "engine_flags": engine_flags,
    "limits": limits,
    "serve": lambda: flags(ServerOptions),
    "run_batch": lambda: flags(BatchFlags),
    "deploy": lambda: flags(ClusterFlags),
    "plan": lambda: flags(DeviceFlags),
    "simulate": lambda: flags(LoadFlags),
    "paper": lambda: flags(PaperFlags),
}


PAGE = Page("reference.md", "options", TABLES)

if __name__ == "__main__":
    PAGE.write()
