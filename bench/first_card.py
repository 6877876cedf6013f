"""First run on a GPU, at most 13 minutes: what shows most comes first, and docs/gpu.md gets the results.

    python bench/first_card.py prepare     where the C++ kernels are, on any machine: what the CPU engine answers
    python bench/first_card.py run         on the card: every step, and the page; --output FILE for another page
    python bench/first_card.py tokens      one step alone: the engine's tokens beside those of `prepare`
    python bench/first_card.py machine     one step alone: whether the machine has what the kernels need

`make first-card` prepares and runs. With --imitated `run` and `tokens` try themselves on a machine without a GPU:
an imitated one (tests/support/imitated_gpu.py), Triton's interpreter, tiny shapes. All that steps print is in
.cache/first-card.
"""

import argparse
import json
import os
import platform
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT / "tests")]  # a checkout that is not installed

PAGE, FOLDER = ROOT / "docs/gpu.md", ROOT / ".cache/first-card"
BEGIN, END = "<!-- steps of bench/first_card.py -->", "<!-- end of steps -->"
REFERENCE = FOLDER / "reference.json"
BUDGET_S = 780.0
LEAST_S = 20.0  # a step that has less left is not begun
PATIENCE = 10   # times as long an imitation may take
NOTHING_YET = "no card yet"

MODEL = ROOT / "src/quire/model/demo"
NUM_TOKENS, NUM_LOGPROBS = 48, 8
MARGINS = {"float32": 1e-3, "bfloat16": 0.1}  # errors of a logit, as in tests/support/margin.py
QUANTIZED_MARGIN = 0.5                        # for keys and values in 8 bits: the reference has 16
DTYPES, GREEDY = tuple(MARGINS), {"temperature": 0.0}
DRAWN = {"temperature": 0.8, "top_p": 0.95, "top_k": 50, "seed": 7}
BEGINNINGS = (
    "def f(", "import os\n", "class A:\n    def __init__(self", "for i in range(", "x = [", "return", "if a == b",
    "# test",
)  # fmt: skip
PROMPTS = [text * (1 + i % 4) for i, text in enumerate(BEGINNINGS * 4)] + [BEGINNINGS[0] * 90, BEGINNINGS[2] * 60]
COMPANIES = (len(PROMPTS), 1, 3, 17)  # requests at once
# What an imitated GPU, some hundred times slower, is asked: prompts, tokens of each, requests at once, settings.
FEW_PROMPTS, FEW_TOKENS, FEW_COMPANIES = PROMPTS[:3], 4, (3, 1)
SMALL = {"num_kv_blocks": 200, "max_num_seqs": 3, "max_num_batched_tokens": 128, "cudagraph_capture_sizes": [3, 16]}

ORDINARY = "-m", "not fuzz and not matrix"
PYTEST = "-m", "pytest", "-p", "no:cacheprovider", "-o", "filterwarnings=default", *ORDINARY


class Step(NamedTuple):
    """A command of Python, the seconds that it may take, and its arguments in place of those where nothing is a GPU."""

    name: str
    shows: str
    limit_s: int
    command: tuple[str, ...]
    imitated: tuple[str, ...]


STEPS = (
    Step(
        "machine", "card, driver, versions; Triton can build its launcher", 20, (__file__, "machine"),
        (__file__, "machine", "--imitated"),
    ),
    Step(
        "kernels", "every kernel compiles, loads, and equals its reference", 160,
        (*PYTEST, "--device", "cuda", *(("-n", "8") if find_spec("xdist") else ()), "tests/kernels/triton"),
        (*PYTEST, "tests/kernels/triton/test_small_ops.py"),
    ),
    Step(
        "engine", "preemption, sharing, two engines on a card; a failed capture costs its own graph", 60,
        (*PYTEST, "--device", "cuda", "tests/engine/test_cuda.py"),
        (*PYTEST, "--device", "imitated", "tests/engine/test_cuda.py", "-k", "captured"),
    ),
    Step(
        "tokens", "answers of each path beside the CPU's: without graphs, with them, chunks, swaps, exact, 8 bits", 200,
        (__file__, "tokens"), (__file__, "tokens", "--imitated"),
    ),
    Step(
        "figures", "models' share of the memory's floor, products' and attention's share of the bandwidth", 240,
        ("bench/gpu.py", "--budget", "200"), ("bench/gpu.py", "--dry-run", "--budget", "1"),
    ),
    Step(
        "accesses", "no access outside a tensor (compute-sanitizer)", 100,
        ("-c", "import os, sys; os.execvp('compute-sanitizer', ['compute-sanitizer', '--tool', 'memcheck', "
         "'--error-exitcode', '1', sys.executable, *sys.argv[1:]])", *PYTEST, "--device", "cuda", "-x",
         "tests/kernels/triton/test_small_ops.py"),
        ("-c", "print('left out')"),
    ),
)  # fmt: skip


class Result(NamedTuple):
    """End of a step: 0, another status, or None where its time was up, and the last line that it printed."""

    status: int | None
    seconds: float
    line: str

    def __str__(self) -> str:
        how = {0: "passed", None: "**not done in time**"}.get(self.status, "**failed**")
        return f"{how}, {self.seconds:.0f} s: {self.line}"


# --- the run ----------------------------------------------------------------------------------------------------------


def run(page: Path, *, is_imitated: bool) -> bool:
    """Run the steps within the budget, and write the page after each; return whether all have passed."""
    patience = PATIENCE if is_imitated else 1
    deadline_s, found = time.monotonic() + patience * BUDGET_S, dict[str, Result]()
    FOLDER.mkdir(parents=True, exist_ok=True)
    for step in STEPS:
        left_s = deadline_s - time.monotonic()
        result = Result(None, 0.0, "no time was left")
        if left_s >= LEAST_S:
            result = run_step(step, min(patience * step.limit_s, left_s), page, is_imitated=is_imitated)
        found[step.name] = result
        print(f"{step.name}: {result}", flush=True)
        write(page, found)
    return all(result.status == 0 for result in found.values())


def run_step(step: Step, limit_s: float, page: Path, *, is_imitated: bool) -> Result:
    """Run one step, its output in a file."""
    command = [sys.executable, *(step.imitated if is_imitated else step.command)]
    if step.name == "figures" and not is_imitated:
        command += ["--output", str(page)]
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    if is_imitated and step.name == "kernels":
        environment["TRITON_INTERPRET"] = "1"
    output, started_s = FOLDER / f"{step.name}.txt", time.monotonic()
    status: int | None = None
    with output.open("w") as file:
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, cwd=ROOT, env=environment, start_new_session=True
        )
        with suppress(subprocess.TimeoutExpired):
            status = process.wait(limit_s)
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what it has started, too, or the next step finds the card in use
        process.wait()
    lines = [line.strip(" =") for line in output.read_text(errors="replace").splitlines() if line.strip(" =.")]
    counts = [line for line in lines if re.search(r"\d (passed|failed|error)", line)]  # pytest's, before other reports
    line = (counts or lines or ["nothing was printed"])[-1]
    return Result(status, time.monotonic() - started_s, line[:200].replace("|", "/"))


def write(page: Path, found: dict[str, Result]) -> None:
    """Write the page with the table of steps in place of the last one."""
    text = (page if page.exists() else PAGE).read_text()  # the figures' step has written it, too
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    page.write_text("\n".join([before + BEGIN, "", *table(found), "", END]) + after)


def table(found: dict[str, Result]) -> Iterator[str]:
    """Yield the table of steps, with what each has shown, and where."""
    machine = found.get("machine")
    yield f"{machine.line}, {date.today()}." if machine else "Nothing of it has run on a card yet."
    yield ""
    yield "| step | what it shows | at most | shown on |"
    yield "| --- | --- | --- | --- |"
    for step in STEPS:
        yield f"| {step.name} | {step.shows} | {step.limit_s} s | {found.get(step.name, NOTHING_YET)} |"


# --- steps ------------------------------------------------------------------------------------------------------------


def machine(*, is_imitated: bool) -> None:
    """Print what the card and the software are. Raises ConfigError for what is missing."""
    import torch  # noqa: PLC0415 (a machine that prepares needs none)
    import triton  # noqa: PLC0415

    from quire.engine.devices import open_device  # noqa: PLC0415
    from quire.engine.options import EngineOptions  # noqa: PLC0415

    open_device(EngineOptions(device="cuda"))
    names = ("CUDA", "CUBLAS", "TORCH", "PYTORCH", "NCCL", "TRITON")
    print({name: value for name, value in os.environ.items() if name.startswith(names)})
    versions = f"torch {torch.__version__}, Triton {triton.__version__}, Python {platform.python_version()}"
    if is_imitated:
        print(f"No card, an imitation: {versions}")
        return
    subprocess.run(["nvidia-smi"], check=False)
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader", "--id=0"]
    card = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    print(f"{card or torch.cuda.get_device_name()}, CUDA {torch.version.cuda}, {versions}")


def engine(**settings: Any) -> Any:  # noqa: ANN401 (an LLM, which is imported late)
    """Return an engine of the bundled model."""
    from quire import LLM  # noqa: PLC0415 (an imitated GPU is turned on before)

    return LLM(MODEL, **{"max_model_len": 1024} | settings)


def answers(llm: Any, prompts: Sequence[str], **sampling: Any) -> list[Any]:  # noqa: ANN401
    """Return the completions of prompts that are asked at once."""
    from quire import SamplingParams  # noqa: PLC0415

    params = SamplingParams(**{"max_tokens": NUM_TOKENS, "ignore_eos": True} | sampling)
    return [output.outputs[0] for output in llm.generate(list(prompts), params, use_tqdm=False)]


def prepare() -> None:
    """Keep what the CPU engine answers: of each dtype the greedy tokens, with logprobs, and drawn tokens."""
    kept = dict[str, Any]()
    for dtype in DTYPES:
        with engine(device="cpu", dtype=dtype) as llm:
            greedy = answers(llm, PROMPTS, **GREEDY, logprobs=NUM_LOGPROBS)
            drawn = answers(llm, PROMPTS, **DRAWN)
        places = ([{token: each.logprob for token, each in place.items()} for place in out.logprobs] for out in greedy)
        own, others = ([out.token_ids for out in each] for each in (greedy, drawn))
        kept[dtype] = {"tokens": own, "logprobs": list(places), "drawn": others}
    FOLDER.mkdir(parents=True, exist_ok=True)
    REFERENCE.write_text(json.dumps(kept))
    print(f"{len(PROMPTS)} prompts, {NUM_TOKENS} tokens each, in {REFERENCE.relative_to(ROOT)}")


MEANWHILE = {"capture_graphs": False}  # steps capture what they need: all graphs take longer than the answers
PATHS: dict[str, dict[str, Any]] = {
    "float32, without graphs": {"dtype": "float32", "enforce_eager": True},
    "float32, with graphs": {"dtype": "float32", "capture_graphs": True},
    "without graphs": {"enforce_eager": True},
    "with graphs": {"capture_graphs": True},
    "with graphs, kernels not launched early": {"capture_graphs": True, "early_launch": False},
    "chunks of 64, graphs captured meanwhile": {"max_num_batched_tokens": 64, "max_num_seqs": 20} | MEANWHILE,
    "preemption and swaps": {"num_kv_blocks": 96} | MEANWHILE,
    "exact": {"exact": True} | MEANWHILE,
    "8 bits": {"kv_cache_dtype": "int8_per_token_head"} | MEANWHILE,
    "attention in CUDA C++": {"attention_backend": "cuda"} | MEANWHILE,
}
NOT_IMITATED = (
    "float32, without graphs", "with graphs, kernels not launched early", "exact", "8 bits", "attention in CUDA C++",
)  # fmt: skip


def tokens(*, is_imitated: bool) -> bool:
    """Compare every path of the engine with the reference; return whether no token is wrong and no graph is missing."""
    if is_imitated:
        from support import imitated_gpu  # noqa: PLC0415 (only then)

        imitated_gpu.turn_on()
    known, num_faults = json.loads(REFERENCE.read_text()), 0
    for name, settings in PATHS.items():
        if is_imitated and name in NOT_IMITATED:
            continue
        own = {"dtype": "bfloat16"} | (SMALL if is_imitated else {}) | settings
        try:
            num_faults += compare_path(name, own, known[own["dtype"]], is_imitated=is_imitated)
        except Exception as error:  # the other paths are worth knowing
            print(f"{name}: FAILED: {error!r}"[:500], flush=True)
            num_faults += 1
    print(f"{num_faults} faults: wrong tokens, graphs that could not be captured, paths that failed")
    return not num_faults


def compare_path(name: str, settings: dict[str, Any], known: dict[str, Any], *, is_imitated: bool) -> int:
    """Print how many answers of one path are equal, part at a near-tie or are wrong; return the number of faults."""
    started_s, num_faults, first = time.monotonic(), 0, list[list[int]]()
    prompts, companies = (FEW_PROMPTS, FEW_COMPANIES) if is_imitated else (PROMPTS, COMPANIES)
    length = {"max_tokens": FEW_TOKENS if is_imitated else NUM_TOKENS}
    margin = QUANTIZED_MARGIN if "kv_cache_dtype" in settings else MARGINS[settings["dtype"]]
    with engine(device="cuda", **settings) as llm:
        for num_prompts in companies:
            found = [out.token_ids for out in answers(llm, prompts[:num_prompts], **GREEDY, **length)]
            gaps = [gap(*each) for each in zip(known["tokens"], known["logprobs"], found, strict=False)]
            num_equal, num_wrong = gaps.count(0.0), sum(each > 2 * margin for each in gaps)
            ties = [each for each in gaps if 0 < each <= 2 * margin]
            print(
                f"{name}, {num_prompts} at once: {num_equal} equal, {len(ties)} part at a near-tie (a gap of "
                f"{max(ties, default=0.0):.4f} at most), {num_wrong} WRONG", flush=True,
            )  # fmt: skip
            num_faults += num_wrong
            first = first or found
            if settings.get("exact") and found != first[:num_prompts]:
                print(f"{name}: NOT EXACT: other tokens in other company")
                num_faults += 1
        drawn = [out.token_ids for out in answers(llm, prompts, **DRAWN, **length)]
        metrics = [each for each in llm.get_metrics() if each.name == "quire:cuda_graphs"]
    graphs = {each.labels["state"]: int(each.value) for each in metrics}
    pairs = [pair for both in zip(known["drawn"], drawn, strict=False) for pair in zip(*both, strict=False)]
    share = sum(own == other for own, other in pairs) / len(pairs)
    print(
        f"{name}: {share:.0%} of drawn tokens equal; graphs {graphs['captured']} captured, {graphs['failed']} FAILED; "
        f"{time.monotonic() - started_s:.1f} s", flush=True,
    )  # fmt: skip
    return num_faults + graphs["failed"]


def gap(known: list[int], logprobs: list[dict[str, float]], found: list[int]) -> float:
    """Return how far below the likeliest token's logprob the first differing one is in the reference; 0: none differs.

    Infinity, if the token is not among those that were kept. What follows has another context, so it is not compared.
    """
    for own, other, place in zip(known, found, logprobs, strict=False):
        if own != other:
            return max(place.values()) - place.get(str(other), float("-inf"))
    return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("prepare", "run", "tokens", "machine"))
    parser.add_argument("--imitated", action="store_true", help="without a GPU; run writes --output alone")
    parser.add_argument("--output", type=Path, default=PAGE, metavar="FILE", help="where the page goes (docs/gpu.md)")
    arguments = parser.parse_args()
    if arguments.what == "prepare":
        prepare()
        return
    if not arguments.imitated and arguments.what == "run":
        import torch  # noqa: PLC0415 (a machine that prepares needs none)

        if not torch.cuda.is_available():
            raise SystemExit("torch sees no GPU; --imitated works without one")
    if arguments.what in ("run", "tokens") and not REFERENCE.exists():
        raise SystemExit("there is no reference: run `python bench/first_card.py prepare` where the C++ kernels are")
    if arguments.what == "machine":
        if arguments.imitated:
            from support import imitated_gpu  # noqa: PLC0415 (only then)

            imitated_gpu.turn_on()
        machine(is_imitated=arguments.imitated)
        return
    if arguments.what == "tokens":
        is_right = tokens(is_imitated=arguments.imitated)
    else:
        assert not (arguments.imitated and arguments.output == PAGE), "an imitation has no results for the page"
        is_right = run(arguments.output, is_imitated=arguments.imitated)
    raise SystemExit(not is_right)


if __name__ == "__main__":
    main()
