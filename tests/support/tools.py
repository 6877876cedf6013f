"""Modules of the folder `tools/`, which is no package."""

import importlib.util
from pathlib import Path
from types import ModuleType

_FOLDER = Path(__file__).parents[2] / "tools"


def load_tool(name: str) -> ModuleType:
    """Return the module `tools/NAME.py`, loaded anew."""
    spec = importlib.util.spec_from_file_location(name, _FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
