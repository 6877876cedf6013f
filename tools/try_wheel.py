"""Wheels as users get them: installed into an empty environment, and run where there is no compiler.

    python tools/try_wheel.py dist/quire-*.whl     # the one for this Python

The environment is one of a temporary folder. Programs are found in it alone: whatever would compile, or call another
program of the system, fails. Prints what was installed and its size, then runs the tests of `make test-without-torch`;
the exit status is 0 when each step did its work.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
START_LIMIT_S, ANSWER_LIMIT_S = 120.0, 60.0
MB = 1e6
TORCH = "torch"  # only `quire[torch]` brings it
ISAS = "from quire.extension import _kernels; print(*_kernels.usable_isas())"
ORDINARY = "not fuzz and not matrix and not ray and not real and not docs and not agents"
ALSO_INSTALLED = ("pip", "setuptools", "wheel")  # with the environment


def main() -> None:
    """Try the wheel that fits this Python."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("wheels", nargs="*", type=Path)
    parser.add_argument("--installed", action="store_true", help="try what this Python has, instead of a wheel")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quire-wheel-") as folder:
        python = Path(sys.executable) if given.installed else install(fitting(given.wheels), Path(folder) / "env")
        environment = {"PATH": str(python.parent), "HOME": folder, "LANG": "C.UTF-8"}
        report_size(python, environment)
        run_commands(python, environment)
        if not given.installed:
            run_tests(python, environment)


def run_commands(python: Path, environment: dict[str, str]) -> None:
    """Run what users run first, and each instruction set of this machine."""
    say("quire --version", run([python.parent / "quire", "--version"], environment))
    prompt = ["--prompt", "def f(", "--max-tokens", "8", "--temperature", "0"]
    say("quire generate", run([python.parent / "quire", "generate", *prompt], environment))
    say("quire serve", ask_server([python.parent / "quire"], environment))
    for isa in run([python, "-c", ISAS], environment).split():
        run([python.parent / "quire", "generate", "--cpu-isa", isa, *prompt], environment)
        say("instruction set", isa)


def fitting(wheels: Sequence[Path]) -> Path:
    """Return the wheel that pip would take for this Python; SystemExit if there is none, or several."""
    own = f"cp{sys.version_info.major}{sys.version_info.minor}-"
    is_newer = sys.version_info >= (3, 12)
    found = [path for path in wheels if own in path.name or (is_newer and "-abi3-" in path.name)]
    if len(found) != 1:
        raise SystemExit(f"want one wheel for {own[:-1]}, found {[path.name for path in found]}")
    return found[0]


def install(wheel: Path, folder: Path) -> Path:
    """Install a wheel, and what it needs as a wheel, into an empty environment; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin/python"
    pip_install(python, wheel)
    return python


def pip_install(python: Path, *wanted: Path | str) -> None:
    """Install packages as wheels, with the versions of the checkout."""
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--quiet", "install"]
    subprocess.run([*pip, "-c", ROOT / "constraints.txt", "--only-binary", ":all:", *wanted], check=True)


def report_size(python: Path, environment: dict[str, str]) -> None:
    """Print the distributions and megabytes installed, without what came with the environment."""
    listed = json.loads(run([python, "-m", "pip", "list", "--format", "json"], environment))
    names = [row["name"] for row in listed if row["name"] not in ALSO_INSTALLED]
    site = Path(run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], environment))
    others = re.compile(rf"({'|'.join(ALSO_INSTALLED)}|_distutils_hack|pkg_resources)\b")
    num_bytes = sum(
        path.stat().st_size
        for path in site.rglob("*")
        if path.is_file() and not others.match(str(path.relative_to(site))) and path.suffix != ".pyc"
    )
    say("installed", f"{num_bytes / MB:.0f} MB (without bytecode), {len(names)} distributions")
    if TORCH in names:
        raise SystemExit("torch was installed, and nothing here needs it")


def run_tests(python: Path, environment: dict[str, str]) -> None:
    """Run tests of the checkout against what is installed."""
    pip_install(python, "quire[test]")
    options = ["-m", ORDINARY, "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"]
    command = [python, "-m", "pytest", "@tests/without_torch.txt", *options]
    done = subprocess.run(command, check=False, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(f"tests ended with status {done.returncode}:\n{done.stdout}")
    say("tests", done.stdout.strip().splitlines()[-1].strip("= "))


def ask_server(command: Sequence[Path | str], environment: dict[str, str]) -> str:
    """Start a server, ask it for a completion, stop it; return what it wrote."""
    server = subprocess.Popen([*command, "serve", "--port", "0"], env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert server.stdout is not None
        found = next((at for line in server.stdout if (at := re.search(r"on (http://\S+)", line))), None)
        if found is None:
            raise SystemExit(f"the server ended with status {server.wait()} before it was ready")
        body = json.dumps({"prompt": "def f(", "max_tokens": 8, "temperature": 0}).encode()
        request = urllib.request.Request(f"{found[1]}/v1/completions", body, {"content-type": "application/json"})
        with urllib.request.urlopen(request, timeout=ANSWER_LIMIT_S) as answer:
            text: str = json.load(answer)["choices"][0]["text"]
    finally:
        server.terminate()
        status = server.wait(ANSWER_LIMIT_S)
    if status != 0:
        raise SystemExit(f"the server ended with status {status}")
    return text


def run(command: Sequence[Path | str], environment: dict[str, str]) -> str:
    """Return what a command printed; SystemExit with what it said if it failed."""
    done = subprocess.run(
        command, check=False, env=environment, capture_output=True, text=True, timeout=START_LIMIT_S
    )
    if done.returncode:
        raise SystemExit(f"{command} ended with status {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout.strip()


def say(what: str, text: str) -> None:
    """Print a step that did its work."""
    print(f"{what}: {text!r}" if "\n" in text or what.startswith("quire ") else f"{what}: {text}", flush=True)


if __name__ == "__main__":
    main()
