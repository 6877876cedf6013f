"""The tables of docs/models.md are those that the code makes."""

from model_tables import PAGE, Cases
from quire.model.families import ENCODERS, FAMILIES


def test_page_has_the_tables_of_the_code() -> None:
    page = PAGE.path.read_text(encoding="utf-8")
    assert PAGE.filled(page) == page, "run python tools/model_tables.py"


def test_every_family_has_a_case_plain_and_with_options() -> None:
    cases = Cases().by_architecture
    assert cases.keys() == FAMILIES.keys()
    assert {name: len(found) for name, found in cases.items() if len(found) < 2} == {}
    encoders = Cases("test_encoders.py", "").by_architecture
    assert encoders.keys() == ENCODERS.keys()
    assert all(len(found) >= 2 for found in encoders.values())
