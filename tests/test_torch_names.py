"""Names of torch.cuda and torch.accelerator in use: all are there in torch 2.11, the oldest that is supported."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = frozenset((ROOT / "tests/data/names_of_torch_2_11.txt").read_text(encoding="utf-8").split())
MODULES = ("torch.cuda", "torch.accelerator")
# Later than 2.11, and used where it is there; and one that 2.11 has but does not list.
GUARDED = frozenset({"torch.accelerator.empty_host_cache", "torch.cuda._sleep"})


def names_in_use(text: str) -> Iterator[str]:
    """Yield the names of these modules that a source reads or imports."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) in MODULES:
            yield ast.unparse(node)
        if isinstance(node, ast.ImportFrom) and node.module in MODULES:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("package", ["src", "bench"])
def test_names_in_use_are_those_of_the_oldest_torch(package: str) -> None:
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / package).rglob("*.py"))]
    found = {name for text in sources for name in names_in_use(text)}
    assert found >= {"torch.cuda.synchronize"}
    assert found - PUBLIC <= GUARDED


def test_name_of_a_later_version_is_found() -> None:
    text = "import torch\nfrom torch.cuda import later\ntorch.cuda.memory_of_tomorrow()\ntorch.cuda.Event()"
    assert set(names_in_use(text)) - PUBLIC == {"torch.cuda.later", "torch.cuda.memory_of_tomorrow"}
