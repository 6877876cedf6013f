"""Tables of documentation pages, made from the code that they describe.

A table is between `<!-- KIND: NAME -->` and `<!-- end of KIND -->`; a tool has a function for each NAME.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

DOCS = Path(__file__).parents[1] / "docs"


def table(*rows: Iterable[str]) -> str:
    """Return a Markdown table; the first of `rows` is its heading."""
    heading, *others = ([*row] for row in rows)
    return "".join(f"| {' | '.join(row)} |\n" for row in (heading, ["---"] * len(heading), *others))


class Page:
    """A page of docs/ with tables of one kind; `tables` makes the text of each by its name."""

    def __init__(self, name: str, kind: str, tables: Mapping[str, Callable[[], str]]) -> None:
        self.path, self.tables = DOCS / name, tables
        self._place = re.compile(rf"(<!-- {kind}: (?P<name>\w+) -->\n).*?(<!-- end of {kind} -->)", re.DOTALL)

    def filled(self, text: str) -> str:
        """Return the text of the page with its tables as the code has them."""
        return self._place.sub(lambda place: f"{place[1]}\n{self.tables[place['name']]()}\n{place[3]}", text)

    def write(self) -> None:
        """Write the tables into the page."""
        self.path.write_text(self.filled(self.path.read_text(encoding="utf-8")), encoding="utf-8")
