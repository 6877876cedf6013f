"""Tables of vLLM's flags and arguments in docs/coming-from-vllm.md, made from their rows.

    python tools/vllm_tables.py    # writes them into the page

A table is between `<!-- vllm: NAME -->` and `<!-- end of vllm -->`; TABLES has the names.
"""

from collections import defaultdict
from collections.abc import Callable

from page_tables import Page, table
from quire.core.options import declared_options
from quire.engine.options import EngineOptions
from quire.server.options import ServerOptions
from quire_vllm.translation import ROWS
from quire_vllm.values import Does, Row

DECLARED = (each for group in (EngineOptions, ServerOptions) for each in declared_options(group))
OPTIONS = {"config", *(each.name for each in DECLARED if each.option.kind != "none")}


def code(row: Row) -> str:
    """Return the flags of a row, with the values that a refused one may have."""
    flags = ", ".join(f"`{flag}`" for flag in (row.flag, *row.flags))
    values = [f"`{value}`" for value in row.allowed]
    return f"{flags} (but {', '.join(values)})" if row.does == "refused" and row.takes != "switch" and values else flags


def own_option(row: Row) -> str | None:
    """Return the option of Quire that takes a row's values, or None."""
    return next((name for name in (row.name, row.own) if name in OPTIONS), None)


def supported() -> str:
    """Return the table of the flags that do here what they do there."""
    cells = []
    for row in ROWS.values():
        own = own_option(row)
        if own is not None:
            same = "the same" if own == row.name else f"`--{own.replace('_', '-')}`"
            cells.append((code(row), same, row.sentence if row.does in {"same", "renamed"} else ""))
    return table(("vLLM", "Quire", "default, differences"), *cells)


def without_option(does: Does) -> str:
    """Return the table of the flags that are only accepted, or refused: a line for each reason."""
    groups: defaultdict[tuple[str, bool], list[str]] = defaultdict(list)
    for row in ROWS.values():
        if own_option(row) is None and row.does == does:
            groups[row.sentence, row.is_engine].append(code(row))
    cells = (
        (", ".join(names), reason, "`serve`, `LLM`" if is_engine else "`serve`")
        for (reason, is_engine), names in groups.items()
    )
    return table(("vLLM", "reason", "of"), *cells)


TABLES: dict[str, Callable[[], str]] = {
    "supported": supported,
    "accepted": lambda: without_option("accepted"),
    "refused": lambda: without_option("refused"),
}


PAGE = Page("coming-from-vllm.md", "vllm", TABLES)

if __name__ == "__main__":
    PAGE.write()
