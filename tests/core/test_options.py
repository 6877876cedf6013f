"""Options are checked by their declarations."""

from dataclasses import asdict, dataclass
from typing import Any, Literal

import pytest

from quire.core.errors import ConfigError
from quire.core.options import SIZE, check_options, declared_options, option, same_option


@dataclass(frozen=True)
class Kitchen:
    """Settings of each type."""

    cooks: int = option(1, "cooks", low=1, high=9)
    tables: int = option(4, "tables", low=1)
    number: int = option(0, "any integer")
    heat: float = option(0.5, "share of the heat", low=0, is_low_excluded=True, high=1)
    pause: float = option(10.0, "pause", low=0, high=60, unit="seconds")
    patience: float = option(1.0, "patience", low=0)
    pot: int | str | None = option(None, "size of the pot", metavar=SIZE, low=1)
    is_open: bool = option(True, "whether it is open")
    style: Literal["plain", "rich"] = option("plain", "how it tastes")
    name: str | None = option(None, "name", is_secret=True)
    seats: int | None = option(None, "seats", low=0)
    guests: tuple[str, ...] = option((), "guests")
    free: int = 3  # not an option

    def __post_init__(self) -> None:
        check_options(self)


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("cooks", 0, "an integer from 1 to 9, got 0"),
        ("cooks", 10, "an integer from 1 to 9, got 10"),
        ("cooks", True, "an integer from 1 to 9, got True"),
        ("cooks", 2.0, "an integer from 1 to 9, got 2.0"),
        ("cooks", None, "an integer from 1 to 9, got None"),
        ("tables", 0, "an integer of at least 1, got 0"),
        ("number", "1", "an integer, got '1'"),
        ("heat", 0, "a number above 0, at most 1, got 0"),
        ("heat", float("nan"), "a number above 0, at most 1, got nan"),
        ("heat", "hot", "a number above 0, at most 1, got 'hot'"),
        ("pause", 61, "a number from 0 to 60 seconds, got 61"),
        ("patience", float("inf"), "a number of at least 0, got inf"),
        ("pot", "big", "bytes such as 512MiB or 4GiB, got 'big'"),
        ("pot", 0, "at least 1 bytes, got 0"),
        ("is_open", 1, "True or False, got 1"),
        ("style", "sour", "one of plain, rich, got 'sour'"),
        ("name", 7, "text, got 7"),
        ("seats", -1, "an integer of at least 0, got -1"),
    ],
)
def test_value_that_an_option_does_not_allow_is_refused_with_its_bounds(name: str, value: object, text: str) -> None:
    settings: dict[str, Any] = {name: value}
    with pytest.raises(ConfigError) as refused:
        Kitchen(**settings)
    assert str(refused.value) == f"{name} must be {text}"


def test_bounds_themselves_none_where_it_has_a_type_and_integers_of_any_size_are_allowed() -> None:
    settings: dict[str, Any] = {
        "cooks": 9, "tables": 10**400, "number": -(10**400), "heat": 1, "pause": 0, "patience": 10**6, "pot": "1KiB",
        "is_open": False, "style": "rich", "name": "", "seats": None, "guests": ("a",), "free": -1,
    }  # fmt: skip
    assert asdict(Kitchen(**settings)) == settings


def test_secret_is_not_shown() -> None:
    @dataclass(frozen=True)
    class Bar:
        name: str | None = same_option(Kitchen, "name")

    assert "crème" not in repr(Kitchen(name="crème"))
    assert "crème" not in repr(Bar(name="crème"))


def test_option_of_another_class_keeps_its_default_and_its_bounds() -> None:
    @dataclass(frozen=True)
    class Bar:
        tables: int = same_option(Kitchen, "tables", panel="Bar")

    ((bar,), theirs) = declared_options(Bar), next(each for each in declared_options(Kitchen) if each.name == "tables")
    assert (bar.default, bar.option.low, bar.option.panel) == (theirs.default, theirs.option.low, "Bar")
    assert theirs.option.panel is None
