"""Figures of the source tree that are zero or within a budget, by `tools/structure.py`."""

from pathlib import Path

import pytest

import structure


def test_no_modules_import_each_other() -> None:
    assert structure.import_circles() == []


def test_no_docstring_opens_with_a_question_word() -> None:
    assert structure.question_openings() == []


def test_no_class_has_too_many_attributes() -> None:
    assert structure.crowded_classes() == {}


def test_no_name_is_that_of_two_classes() -> None:
    assert structure.repeated_classes() == {}


def test_hardly_any_words_of_the_prose_are_for_persons() -> None:
    found = structure.persons()
    assert len(found) <= structure.MAX_PERSONS, found


def test_files_of_the_reading_guide_exist() -> None:
    files = structure.named_files(structure.READING_GUIDE.read_text())
    assert len(files) > 40
    assert [path for path in files if not path.exists()] == []


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Return a folder with a package of two modules that break every rule; `other` imports inside a function."""
    package = tmp_path / "small"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "one.py").write_text('"""What one does."""\nfrom small import other\n')
    many = "\n".join(f"        self.field_{number} = 0" for number in range(structure.MAX_ATTRIBUTES + 1))
    inside = f"class Crowd:\n    def __init__(self):\n{many}\n\ndef late():\n    from small.one import x\n"
    (package / "other.py").write_text(f'"""The other one."""\n{inside}')
    (package / "third.py").write_text('"""A third one."""\nclass Crowd:\n    pass\n')
    return tmp_path


def test_each_rule_is_seen_to_be_broken(tree: Path) -> None:
    assert structure.import_circles(tree) == [["small.one", "small.other"]]
    assert structure.question_openings(tree) == [tree / "small/one.py"]
    assert structure.repeated_classes(tree) == {"Crowd": ["small.other", "small.third"]}
    assert structure.crowded_classes(tree) == {"small.other.Crowd": structure.MAX_ATTRIBUTES + 1}


def test_imports_for_types_alone_make_no_circle(tree: Path) -> None:
    guarded = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from small import one\n"
    (tree / "small/other.py").write_text(guarded)
    assert structure.import_circles(tree) == []
