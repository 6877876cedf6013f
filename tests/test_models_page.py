"""The tables of docs/models.md are those that the code makes."""

from quire.model.families import FAMILIES
from support.tools import load_tool

tables = load_tool("model_tables")


def test_page_has_the_tables_of_the_code() -> None:
    page = tables.PAGE.read_text(encoding="utf-8")
    assert tables.filled(page) == page, "run python tools/model_tables.py"


def test_every_family_has_a_case_plain_and_with_options() -> None:
    cases = tables.Cases().by_architecture
    assert cases.keys() == FAMILIES.keys()
    assert {name: len(found) for name, found in cases.items() if len(found) < 2} == {}
