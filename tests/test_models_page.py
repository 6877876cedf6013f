"""The tables of docs/models.md are those that the code makes."""

from typing import Any

import pytest

from model_tables import (
    COMBINATIONS,
    PAGE,
    Cases,
    gguf_name,
    has_latents,
    has_states,
    has_value_norms,
    is_refused,
)
from quire.formats.gguf.gguf_config import ARCHITECTURES
from quire.model.architectures import ENCODERS, FAMILIES
from support.gguf_files import ARCHITECTURES as GGUF_ARCHITECTURES


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


@pytest.mark.parametrize("settings", COMBINATIONS.values(), ids=COMBINATIONS)
def test_families_combine_alike(settings: dict[str, Any]) -> None:
    """The table of combinations has a column for those with latents, delta nets, Mamba-2, and value norms each."""
    is_on_gpu = "device" in settings
    expected = {
        name: is_on_gpu and (has_latents(name) or has_states(name) or has_value_norms(name)) for name in FAMILIES
    }
    assert {name: is_refused(name, settings) for name in FAMILIES} == expected


def test_files_of_each_gguf_architecture_are_those_of_a_family() -> None:
    found = {name: gguf_name(name) for name in FAMILIES}
    with_experts = {"nemotron_h_moe"}  # another name for files of a family that has another without experts
    assert {name for name in found.values() if name} | with_experts == ARCHITECTURES.keys()
    assert {name: found[name] for name in GGUF_ARCHITECTURES} == GGUF_ARCHITECTURES, "the tests write them otherwise"
