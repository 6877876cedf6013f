"""`quire report`: a file for the report of a bug, with the machine, the versions, and what a server says of itself."""

import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any

from quire.cli.flag_groups import VARIABLE_PREFIX, flag
from quire.cli.top.reading import UnreadableServerError, get_page, server_root
from quire.core.host_limits import find_cpus, find_memory
from quire.core.version import __version__
from quire.extension.isas import usable_isas

OPTIONAL_PACKAGES = ("torch", "triton", "transformers", "ray", "flashinfer-python")
OTHER_VARIABLES = ("CUDA_VISIBLE_DEVICES", "HF_HOME", "HF_HUB_OFFLINE", "OMP_NUM_THREADS")
_SECRET = re.compile("KEY|SECRET|TOKEN|PASSWORD")
_PAGES: dict[str, Callable[[str], Any]] = {"status": json.loads, "debug/top": json.loads, "metrics": str.splitlines}


def report(
    url: Annotated[str, flag("a server whose state is added, as http://HOST:PORT")] = "http://127.0.0.1:8000",
    output: Annotated[Path | None, flag("file; default: quire-report-TIME.json", "--output", "-o")] = None,
    api_key: Annotated[str | None, flag("for the server; QUIRE_API_KEY in the environment")] = None,
) -> None:
    """Write a file for the report of a bug: the machine, versions, settings, and a server's state.

    It has no keys, prompts or answers. Where no server answers, that is noted.
    """
    root = server_root(url, api_key)
    path = output or Path(time.strftime("quire-report-%Y%m%d-%H%M%S.json"))
    found = machine() | {"server": {page: _page(f"{root}/{page}", api_key, read) for page, read in _PAGES.items()}}
    path.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{path}: read it before you send it")  # noqa: T201


def machine() -> dict[str, Any]:
    """Return what is known of this machine and of the installation."""
    needed = [re.split(r"[^\w.-]", each)[0] for each in metadata.requires("quire") or () if "extra ==" not in each]
    memory = find_memory()
    return {
        "quire": __version__,
        "python": sys.version,
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cpus": str(find_cpus()),
        "instruction_sets": usable_isas(),
        "memory": {"free_bytes": memory.free_bytes, "limit_bytes": memory.limit_bytes},
        "packages": {name: _version(name) for name in sorted({*needed, *OPTIONAL_PACKAGES})},
        "environment": {
            name: "(not shown)" if _SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if name.startswith(f"{VARIABLE_PREFIX}_") or name in OTHER_VARIABLES
        },
    }


def _cpu_model() -> str:
    """Return the name of the CPU's model, as Linux has it."""
    try:
        found = re.search(r"^model name\s*:\s*(.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor()


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _page(url: str, api_key: str | None, read: Callable[[str], Any]) -> Any:  # noqa: ANN401 (JSON)
    """Return a page, or why there is none."""
    try:
        return read(get_page(url, api_key))
    except (UnreadableServerError, ValueError) as error:
        return {"missing": str(error)}
