"""The module `tools/structure.py`, whose figures tests assert."""

import importlib.util
import sys
from pathlib import Path

_PATH = Path(__file__).parents[2] / "tools/structure.py"
_spec = importlib.util.spec_from_file_location("structure", _PATH)
assert _spec is not None
assert _spec.loader is not None
structure = importlib.util.module_from_spec(_spec)
sys.modules["structure"] = structure
_spec.loader.exec_module(structure)
