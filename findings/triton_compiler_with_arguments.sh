#!/usr/bin/env bash
# Package: triton 3.7.1
# Expected: CC="ccache gcc", a compiler with arguments as make, CMake, setuptools and autoconf take it, compiles the C
# part of a launcher, as CC=gcc does.
# Seen: triton.runtime.build runs the whole value as the name of one program, so the first kernel of a process with
# an empty cache raises FileNotFoundError: [Errno 2] No such file or directory, which names "ccache gcc" alone.
# Date: 2026-11-29
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"
python3 -m venv venv
venv/bin/pip install --quiet triton==3.7.1
cat > build.py <<'PY'
import os

from triton.runtime.build import compile_module_from_src

SOURCE = """
#include <Python.h>
static struct PyModuleDef NAME = {PyModuleDef_HEAD_INIT, "NAME", 0, -1, 0};
PyMODINIT_FUNC PyInit_NAME(void) { return PyModule_Create(&NAME); }
"""


def outcome(name, compiler):
    os.environ["CC"] = compiler
    try:
        compile_module_from_src(SOURCE.replace("NAME", name), name)
    except FileNotFoundError as error:
        return str(error)
    return "compiled"


os.environ["TRITON_CACHE_DIR"] = os.path.join(os.getcwd(), "cache")
plain, with_arguments = outcome("plain", "gcc"), outcome("wrapped", "env gcc")
print(f"CC=gcc: {plain}; CC='env gcc': {with_arguments}")
assert plain == "compiled", plain
assert "No such file or directory: 'env gcc'" in with_arguments, with_arguments
PY
venv/bin/python build.py
