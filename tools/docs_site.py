"""Hooks of MkDocs: README is the first page, its table of pages the contents, and links out of docs/ become text."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
INDEX = "index.md"
_PAGE = re.compile(r"^\| \[([^\]]+)\]\(docs/([\w-]+\.md)\) \|", re.MULTILINE)   # a row of README's table of pages
_LINK = re.compile(r"\[([^\]]+)\]\(([^)#]*)(#[^)]*)?\)")


def on_config(config: dict[str, Any]) -> dict[str, Any]:
    """Make the contents: README, the pages in its order, and the decisions."""
    listed = [{name[:1].upper() + name[1:]: page} for name, page in _PAGE.findall(README.read_text())]
    decisions = sorted(f"decisions/{path.name}" for path in (ROOT / "docs/decisions").glob("*.md"))
    others = {path.name for path in (ROOT / "docs").glob("*.md")} - {page for each in listed for page in each.values()}
    config["nav"] = [{"Quire": INDEX}, *listed, *sorted(others), {"Decisions": decisions}]
    return config


def on_files(files: Files, config: dict[str, Any]) -> Files:
    """Add README as the first page."""
    files.append(File.generated(config, INDEX, content=README.read_text().replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: dict[str, Any], files: Files) -> str:  # noqa: ANN401
    """Lead links to README to the first page, and leave the text alone of links to what the site has not."""
    folder = Path("docs", page.file.src_uri).parent

    def replaced(found: re.Match[str]) -> str:
        text, target, anchor = found[1], found[2], found[3] or ""
        if not target or ":" in target:
            return found[0]
        path = (ROOT / folder / target).resolve()
        if path == README:
            return f"[{text}]({'../' * (len(folder.parts) - 1)}{INDEX}{anchor})"
        is_there = path.is_file() and path.is_relative_to(ROOT / "docs")
        return found[0] if is_there and not path.is_relative_to(ROOT / "docs/grafana") else text

    return _LINK.sub(replaced, markdown)
