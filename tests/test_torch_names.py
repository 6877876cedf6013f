"""Names of torch.cuda, torch.accelerator and torch.distributed in use: all are there in torch 2.11, the oldest."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PUBLIC = frozenset((ROOT / "tests/data/names_of_torch_2_11.txt").read_text(encoding="utf-8").split())
C10D = "torch._C._distributed_c10d"
MODULES = ("torch.cuda", "torch.accelerator", "torch.distributed", C10D)
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


# What the exchange of GPUs calls of objects whose classes only a torch with CUDA has.
CLASSES = {
    "group": ("ProcessGroup",),
    "ProcessGroup": ("ProcessGroup",),
    "nccl": ("ProcessGroupNCCL", "Backend"),
    "options": ("ProcessGroupNCCL.Options", "Backend.Options"),
    "_options": ("AllreduceOptions",),
    "ProcessGroupNCCL": ("ProcessGroupNCCL",),
}


def test_members_of_process_groups_in_use_are_those_of_the_oldest_torch() -> None:
    source = (ROOT / "src/quire/engine/parallel/nccl.py").read_text(encoding="utf-8")
    found = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in CLASSES:
            found.add(f"{node.value.id}.{node.attr}")
            classes = CLASSES[node.value.id]
            assert {f"{C10D}.{each}.{node.attr}" for each in classes} & PUBLIC, f"{classes} has no {node.attr}"
    assert found >= {"group.allreduce", "nccl.eager_connect_single_device", "options._timeout", "_options.asyncOp"}
