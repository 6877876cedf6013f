"""The page on related work names places that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "related-work.md"


def named_paths() -> list[str]:
    """Return what the page writes as code and looks like a path: it has a slash or ends in .py."""
    return [name for name in re.findall(r"`([\w./-]+)`", PAGE.read_text()) if "/" in name or name.endswith(".py")]


def test_every_path_that_the_page_names_exists() -> None:
    paths = named_paths()
    bases = ROOT / "src/quire", ROOT / "src", ROOT
    missing = [path for path in paths if not any((base / path).exists() for base in bases)]
    assert len(paths) > 20
    assert missing == []


def test_every_link_of_the_page_leads_somewhere() -> None:
    links = re.findall(r"\]\(([^)#]+)\)", PAGE.read_text())
    assert [link for link in links if not (PAGE.parent / link).exists()] == []
