"""What an import costs, and what the sources never call."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[1] / "src"

# Whatever comes from outside must never be able to run code in here.
FORBIDDEN_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "runpy"}
FORBIDDEN_NAMES = {
    *("eval", "exec", "compile", "__import__", "importlib.import_module", "builtins.eval", "builtins.exec"),
    *("torch.load", "torch.jit.load", "torch.package", "torch.hub.load", "torch.utils.cpp_extension"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.full_load", "yaml.Loader", "yaml.UnsafeLoader"),
    *("os.system", "os.popen", "subprocess.getoutput", "subprocess.getstatusoutput", "asyncio.create_subprocess_shell"),
    *("jinja2.Environment", "jinja2.sandbox.SandboxedEnvironment"),  # a template could change what it is given
}
SWITCHES = {"shell": "False", "allow_pickle": "False", "weights_only": "True", "trust_remote_code": "False"}


def modules_after(statement: str) -> set[str]:
    """Return the modules that a fresh interpreter holds after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


COMMAND_LINE = "from quire.cli.main import make_app\nmake_app()"
TORCHLESS_LAYERS = [
    *("quire", "quire.core", "quire.text", "quire.cache", "quire.scheduling"),
    *("quire.server", "quire_lab.sim", "quire.cli"),
]
SERVER_SIDE = [
    "quire.engine.processes.client", "quire.engine.launcher",
    "quire.engine.processes.engine_process",  # until it has to load
]


@pytest.mark.parametrize("name", TORCHLESS_LAYERS)
def test_whole_layer_loads_no_torch(name: str) -> None:
    walk = (
        "import importlib, pkgutil\n"
        f"layer = importlib.import_module({name!r})\n"
        "for module in pkgutil.walk_packages(layer.__path__, layer.__name__ + '.'):\n"
        "    importlib.import_module(module.name)"
    )
    statement = "import quire" if name == "quire" else COMMAND_LINE if name == "quire.cli" else walk
    loaded = modules_after(statement)
    assert name in loaded
    assert "torch" not in loaded


@pytest.mark.parametrize("name", SERVER_SIDE)
def test_what_the_server_needs_of_the_engine_loads_no_torch(name: str) -> None:
    loaded = modules_after(f"import {name}")
    assert name in loaded
    assert "torch" not in loaded


def test_a_local_model_starts_without_the_hub_client() -> None:
    assert "huggingface_hub" not in modules_after("import quire.engine.processes.engine_process")


def test_a_command_starts_without_the_modules_of_others() -> None:
    loaded = modules_after("from quire.cli.main import make_app\nmake_app(['generate', '--prompt', 'serve'])")
    assert "quire.cli.generate" in loaded
    assert not [name for name in loaded if name.startswith(("quire_lab.bench", "quire.cli.serve", "quire_lab.sim"))]


def test_the_list_of_commands_loads_none_of_them() -> None:
    loaded = modules_after("from quire.cli.main import make_app\nmake_app(['--help'])")
    assert not [name for name in loaded if name.startswith(("numpy", "quire_lab", "quire.engine", "quire.server"))]


def test_engines_of_a_server_start_before_numpy_and_the_http_server_are_loaded() -> None:
    loaded = modules_after("from quire.cli.main import make_app\nmake_app(['serve'])")
    assert "quire.engine.launcher" in loaded
    assert not {"numpy", "uvicorn", "tokenizers"} & loaded


def test_llm_is_found_on_the_package_and_loads_no_torch() -> None:
    loaded = modules_after("import quire\nquire.LLM")
    assert "quire.llm" in loaded
    assert "torch" not in loaded


def test_unknown_name_of_the_package_is_an_attribute_error() -> None:
    import quire

    with pytest.raises(AttributeError, match="no_such_name"):
        _ = quire.no_such_name


def imported_names(tree: ast.AST) -> dict[str, str]:
    """Return what each name that an import binds stands for."""
    bound = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            bound |= {alias.asname or alias.name.partition(".")[0]: alias.asname and alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            bound |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return {name: full for name, full in bound.items() if full}


def forbidden_in(source: str) -> Iterator[str]:
    """Yield each import, name and switch in `source` that could run what it is given, under whatever alias."""
    tree = ast.parse(source)
    bound = imported_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [str(node.module)] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            yield from (name for name in modules if name.partition(".")[0] in FORBIDDEN_MODULES)
        elif isinstance(node, ast.Name | ast.Attribute):
            first, *rest = [node.id] if isinstance(node, ast.Name) else ast.unparse(node).split(".")
            name = ".".join([bound.get(first, first), *rest])
            if name in FORBIDDEN_NAMES:
                yield name
        elif isinstance(node, ast.keyword) and node.arg in SWITCHES and ast.unparse(node.value) != SWITCHES[node.arg]:
            yield f"{node.arg}={ast.unparse(node.value)}"


def test_no_source_runs_what_it_reads() -> None:
    paths = sorted(SOURCES.rglob("*.py"))
    assert len(paths) > 400
    found = {str(path): list(forbidden_in(path.read_text(encoding="utf-8"))) for path in paths}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "import pickle as p",
        "from pickle import loads",
        "eval('1')",
        "exec(text)",
        "import torch\ntorch.load('x')",
        "import torch as t\nload = t.load",
        "from torch import load\nload('x')",
        "from torch import load as read\nread('x')",
        "subprocess.run(text, shell=True)",
        "subprocess.run(text, shell=is_text)",
        "numpy.load(path, allow_pickle=True)",
        "from jinja2 import Environment\nEnvironment()",
        "import importlib\nimportlib.import_module(name)",
        "yaml.load(text)",
        "os.system('ls')",
    ],
)
def test_search_finds_forbidden_code(source: str) -> None:
    assert list(forbidden_in(source))


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "re.compile('x')", "yaml.safe_load(text)", "module.load('x')", "run(argv, shell=False)"],
)
def test_search_leaves_harmless_code_alone(source: str) -> None:
    assert not list(forbidden_in(source))
