"""Prose counts, attribute counts and import circles of the source tree, as `make lint` prints them.

    python tools/structure.py

What must be zero is tested, in `tests/test_structure.py`.
"""

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
SOURCES = ROOT / "src"
ENGINE = SOURCES / "quire"
READING_GUIDE = ROOT / "docs/reading-guide.md"

MAX_ATTRIBUTES = 15
MAX_PERSONS = 20  # words of the prose that make a person of a request or a block

STATEMENTS = ast.stmt, ast.excepthandler, ast.match_case
CLASSES = re.compile(r"^[ \t]*class (\w+)[(:\[]", re.MULTILINE)
PERSONS = re.compile(r"\b(?:who|whom|whose|somebody|nobody)\b", re.IGNORECASE)
QUESTIONS = re.compile(r"(?:Who|Whom|Whose|What|Whether|How|Why|Where|When|From|Which)\b")


def modules(sources: Path = SOURCES) -> dict[str, Path]:
    """Return the path of each module of the packages in the folder `sources`, by its full name."""
    return {module_name(path, sources): path for path in sorted(sources.rglob("*.py"))}


def module_name(path: Path, sources: Path) -> str:
    """Return the dotted name of a source file."""
    parts = path.relative_to(sources).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


class Facts(NamedTuple):
    """What a module's source says."""

    docstrings: list[str]
    num_attributes: list[tuple[str, int]]  # of each class
    imports: set[str]                      # modules of the same folder


@cache
def facts(sources: Path) -> dict[str, Facts]:
    """Return what each module says, by its name; parsing all takes a second and a half, and is done once."""
    found, known = dict[str, Facts](), modules(sources)
    for name, path in known.items():
        tree = ast.parse(path.read_text())
        classes = [node for node in statements(tree) if isinstance(node, ast.ClassDef)]
        counts = [(node.name, len(attributes(node))) for node in classes]
        found[name] = Facts(list(docstrings(tree)), counts, imports(name, path, tree, known))
    return found


def named_files(text: str) -> list[Path]:
    """Return the Python files that a text names, each once, in order; a bare name is in the last one's folder."""
    files: dict[Path, None] = {}
    folder = ENGINE
    for name in re.findall(r"`([\w/]+(?:\.py|/))`", text):
        base = SOURCES if name.startswith("quire_") else ENGINE
        path = base / name if "/" in name or (base / name).exists() else folder / name
        folder = path if name.endswith("/") else path.parent
        if path.suffix == ".py":
            files[path] = None
    return list(files)


def statements(node: ast.AST, *, at_run_time: bool = False) -> Iterator[ast.AST]:
    """Yield the statements below `node`, handlers and cases among them; without `if TYPE_CHECKING:` `at_run_time`.

    Expressions, nine nodes of ten, hold no statement.
    """
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, STATEMENTS):
            continue
        if at_run_time and isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        yield child
        yield from statements(child, at_run_time=at_run_time)


def docstrings(tree: ast.Module) -> Iterator[str]:
    """Yield every docstring of a module, its own first."""
    for node in (tree, *statements(tree)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text


def comments(source: str) -> Iterator[str]:
    """Yield every comment of a Python source."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def prose(pattern: re.Pattern[str]) -> Iterator[tuple[Path, str]]:
    """Yield docstrings and comments of the package, comments of csrc, and pages of documentation, with their files.

    Without the sources that `pattern` is not in: it takes seconds to find the prose of all.
    """
    for path in modules().values():
        source = path.read_text()
        if not pattern.search(source):
            continue
        for text in (*docstrings(ast.parse(source)), *comments(source)):
            yield path, text
    for path in sorted((ROOT / "csrc").glob("*.[ch]pp")):
        for text in re.findall(r"//[^\n]*|/\*.*?\*/", path.read_text(), re.DOTALL):
            yield path, text
    for path in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))):
        yield path, path.read_text()


def persons() -> list[tuple[Path, str]]:
    """Return each word of the prose that makes a request or a block a person, with its file."""
    return [(path, word) for path, text in prose(PERSONS) for word in PERSONS.findall(text)]


def question_openings(sources: Path = SOURCES) -> list[Path]:
    """Return the modules with a docstring that opens with a question word: their own, a class's or a function's."""
    paths = modules(sources)
    return [paths[name] for name, own in facts(sources).items() if any(map(QUESTIONS.match, own.docstrings))]


def attributes(node: ast.ClassDef) -> set[str]:
    """Return the names that the methods of a class assign to `self`."""
    return {
        target.attr
        for target in ast.walk(node)
        if isinstance(target, ast.Attribute)
        and isinstance(target.ctx, ast.Store)
        and isinstance(target.value, ast.Name)
        and target.value.id == "self"
    }


def crowded_classes(sources: Path = SOURCES) -> dict[str, int]:
    """Return the classes with more than `MAX_ATTRIBUTES` attributes, by full name; fields of records do not count."""
    return {
        f"{name}.{class_name}": count
        for name, own in facts(sources).items() for class_name, count in own.num_attributes if count > MAX_ATTRIBUTES
    }  # fmt: skip


def repeated_classes(sources: Path = SOURCES) -> dict[str, list[str]]:
    """Return the class names that several modules define, with these modules: a search finds more than one class."""
    found: dict[str, list[str]] = {}
    for name, path in modules(sources).items():
        for class_name in CLASSES.findall(path.read_text()):
            found.setdefault(class_name, []).append(name)
    return {class_name: where for class_name, where in found.items() if len(where) > 1}


def imports(name: str, path: Path, tree: ast.Module, known: Mapping[str, Path]) -> set[str]:
    """Return the modules of the package that a module imports, inside functions too, but not those for types alone."""
    found = set()
    parents = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    for node in statements(tree, at_run_time=True):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*parents[: len(parents) - node.level + 1], *filter(None, [base])])
            found |= {target if (target := f"{base}.{alias.name}") in known else base for alias in node.names}
    return {module for module in found if module in known and module != name}


def import_graph(sources: Path = SOURCES) -> dict[str, set[str]]:
    """Return the modules of the package that each of them imports."""
    return {name: own.imports for name, own in facts(sources).items()}


def import_circles(sources: Path = SOURCES) -> list[list[str]]:
    """Return the groups of modules that import each other, directly or through others (Tarjan 1972)."""
    graph = import_graph(sources)
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    circles = []

    def visit(name: str) -> None:
        order[name] = low[name] = len(order)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in order:
                visit(other)
            if other in stack:
                low[name] = min(low[name], low[other])
        if low[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                circles.append(sorted(group))

    for name in graph:
        if name not in order:
            visit(name)
    return circles


def main() -> None:
    """Print every figure."""
    counts = {
        "who, whom, whose, somebody, nobody": len(persons()),
        "modules with docstrings that open with a question word": len(question_openings()),
        f"classes with over {MAX_ATTRIBUTES} attributes": len(crowded_classes()),
        "class names defined twice": len(repeated_classes()),
        "import circles": len(import_circles()),
    }
    for name, count in counts.items():
        sys.stdout.write(f"{name:40} {count:6,}\n")


if __name__ == "__main__":
    main()
