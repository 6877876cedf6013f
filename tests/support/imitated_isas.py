"""Pytest plugin: the C++ extension of `make imitated`, with AVX-512 and AMX imitated, in place of the installed one.

Given to pytest with -p, for it must come before the first import of the extension. Processes that tests start have the
installed one.
"""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import quire.extension

NAME = "quire.extension._kernels"
(path,) = (Path(__file__).parents[2] / "build/imitated").glob("_kernels*.so")
assert NAME not in sys.modules, f"{NAME} has been imported"
spec = spec_from_file_location(NAME, path)
assert spec is not None
assert spec.loader is not None
extension = module_from_spec(spec)
sys.modules[NAME] = quire.extension._kernels = extension
spec.loader.exec_module(extension)
