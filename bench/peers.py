"""Quire beside other engines on the same machine, model and requests, taking turns; writes the README's table.

    python bench/peers.py MODEL [MODEL ...] --vllm PYTHON --openvino PYTHON --openvino-model FOLDER --output peers.md

(PEERS_VLLM, PEERS_OPENVINO and PEERS_OPENVINO_MODEL in the environment do the same as the options.)

Each engine loads once, in a process of its own environment, and takes one workload after the other as it is told; the
others sleep. All get the same token ids at once, greedy, with the answers' lengths given, and other ids in every turn.
Prefix caches are off, but for `--only prefix`, a burst that shares 512 tokens: there they are on, what a turn finds it
has computed itself, and Quire without its cache takes part. A shared machine changes its speed: figures of one turn are
compared with each other, and its speed is with each turn in the JSON. Every engine is warmed up first. The first
model meets every peer, the others OpenVINO and vLLM. `--quantization int8` quantizes Quire's weights, and Quire without
it takes part, too; give OpenVINO an export of as many bits. `--quick` tries everything in a few minutes; do that first,
as vLLM compiles on its first start. More servers join http32: --server "llama.cpp=llama-server -m MODEL.gguf --port
{port} -np 64 -kvu".

Transformers' models through Quire beside transformers' own continuous batching, without the other peers:

    python bench/peers.py MODEL --only offline64 --loads 1 --burst-turns 1 \\
        --engines "Quire, through transformers;transformers, continuous"

(`--requests 4` cuts workloads short for a try.)

A model of a shape without files, and llama.cpp's library on a random file of that shape (bench/random_gguf.py):

    python bench/peers.py FOLDER --load-format dummy -q int8 --llama-cpp LIBRARIES --gguf FILE --only decode1,prefill

On a busy machine: taskset -c 0, which lends all engines one CPU and one thread, and --cpu-time.
"""

import json
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from quire_lab.bench.report import client_facts
from quire_lab.sim.workloads import WorkItem, token_id_workload
from side_by_side import roster, table
from side_by_side.calibration import Calibration
from side_by_side.contest import Contest, ContestRecord
from side_by_side.engines import EngineFailedError, EngineSpec
from side_by_side.roster import OURS, OURS_FALLBACK, Installed
from side_by_side.workloads import peer_workloads

READ_CHUNK = 1 << 24
CACHES_ON = "prefix caches on"
QUICK_REQUESTS, QUICK_PROMPT, QUICK_OUTPUT = 4, 64, 4

Workloads = dict[str, list[WorkItem]]


@dataclass(frozen=True, slots=True)
class Plan:
    """Numbers of repetitions."""

    loads: int
    turns: int
    burst_turns: int

    def turns_of(self, items: Sequence[WorkItem]) -> int:
        """Return the turns of a workload: bursts take long, and vary less."""
        return self.turns if len(items) == 1 else self.burst_turns


class Session:
    """Measures contests, keeps what was found, and writes it after each."""

    def __init__(
        self, workloads: Workloads, calibration: Calibration, folder: Path, facts: dict[str, Any], *, by_cpu: bool
    ) -> None:
        self._workloads = workloads
        self._calibration = calibration
        self._folder = folder
        self._facts = facts
        self._by_cpu = by_cpu
        self._contests: list[tuple[str, str, ContestRecord]] = []  # model, way of asking

    def hold(self, model: str, way: str, specs: list[EngineSpec], names: list[str], plan: Plan) -> None:
        """Let engines that are asked in one way run the named workloads in turn."""
        busy = [spec for spec in specs if not spec.left_out.issuperset(names)]
        with Contest(busy, self._calibration, self._folder) as contest:
            self._contests.append((model, way, contest.record))
            contest.load(plan.loads)
            for name in warm_ups(self._workloads, names):
                contest.warm_up(self._workloads[name], name)
            for name in names:
                items = self._workloads[name]
                contest.play(name, items, plan.turns_of(items))
            if way == CACHES_ON:
                check_computed_once(contest.record)

    def table(self) -> str:
        """Return the table and, under it, what it depends on."""
        found = (table.workload_rows(model, record, by_cpu=self._by_cpu) for model, _, record in self._contests)
        rows = [row for each in found for row in each]
        for model, way, record in self._contests:
            rows += table.rows(model, record) if way == "in process" else ()
        return table.markdown(rows) + "\n" + self._conditions() + "\n"

    def write(self, output: Path) -> None:
        """Write the table, and everything that was measured beside it as JSON."""
        output.write_text(self.table(), encoding="utf-8")
        contests = [{"model": model, "way": way} | asdict(record) for model, way, record in self._contests]
        record = {"facts": self._facts, "contests": contests}
        output.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")

    def _conditions(self) -> str:
        records = [record for _, _, record in self._contests]
        versions = {
            name: version
            for record in records
            for engine in record.engines.values()
            for name, version in engine.facts.get("versions", {}).items()
        }
        speeds = [c for r in records for t in r.turns for c in (t.calibration_before, t.calibration_after) if c]
        parts = [f"{key} {value}" for key, value in (self._facts | versions).items() if isinstance(value, str | int)]
        for name, unit in (("huge_pages", "GB/s read"), ("amx_tflops", "TFLOP/s of AMX")):
            measured = sorted(float(speed[name]) for speed in speeds if speed.get(name))
            parts += [f"{measured[0]:.3g} to {measured[-1]:.3g} {unit}"] if measured else []
        steal = [run.steal_share for record in records for turn in record.turns for run in turn.runs.values()]
        parts += ["prefix caches on for the workload prefix alone, new token ids in every turn"]
        return ", ".join([*parts, f"steal at most {max(steal, default=0.0):.1%} of a run"])


def check_computed_once(record: ContestRecord) -> None:
    """Assert that Quire computed what prompts share once, as a burst that arrives at one moment."""
    for run in (turn.runs[OURS] for turn in record.turns):
        computed = run.num_prompt_tokens - (run.num_cached_tokens or 0)
        assert computed == run.least_to_compute, f"{computed} tokens computed: {run}"


def warm_ups(workloads: Workloads, names: list[str]) -> Iterator[str]:
    """Yield what to run before: short requests, every workload of one request, one burst (all batch sizes come by)."""
    yield "warmup"
    yield from (name for name in names if len(workloads[name]) == 1)
    yield from [name for name in names if len(workloads[name]) > 1][:1]


def named_workloads(path: Path | None, names: set[str], *, quick: bool, requests: int | None = None) -> Workloads:
    """Return the named workloads, of a file or made here, at most `requests` of each; for a quick try, cut short."""
    most, made = QUICK_REQUESTS if quick else requests, peer_workloads()
    if path is None and (unknown := names - set(made)):
        sys.exit(f"--only and --only-others name {', '.join(sorted(unknown))}; there are {', '.join(made)}")
    workloads = {name: made[name][:most] if path is None else token_id_workload(path, name, most) for name in names}
    if not quick:
        return workloads
    return {
        name: [
            replace(item, prompt_token_ids=item.prompt_token_ids[:QUICK_PROMPT],
                    output_len=min(item.output_len, QUICK_OUTPUT))
            for item in items
        ]
        for name, items in workloads.items()
    }


def fill_page_cache(folder: Path) -> None:
    """Read a model's files, so that no engine's start pays for the disk."""
    for path in folder.glob("*"):
        with path.open("rb") as file:
            while file.read(READ_CHUNK):
                pass


def ways(names: list[str]) -> Iterator[tuple[str, list[str]]]:
    """Yield the ways to ask, and their workloads. What shares a prefix runs with prefix caches on, the others off."""
    http = [name for name in names if name.startswith("http")]
    yield "in process", [name for name in names if name not in (*http, "prefix")]
    yield CACHES_ON, [name for name in names if name == "prefix"]
    yield "over HTTP", http


def engines_of(
    way: str, peers: Installed, model: Path, openvino_model: Path | None, quantization: str | None,
    engines: str | None, load_format: str,
) -> list[EngineSpec]:  # fmt: skip
    """Return the engines that are asked in that way: of `engines`, titles with ; between, if given, and Quire."""
    if way == "over HTTP":
        specs = roster.over_http(peers, model, quantization=quantization)
    else:
        caching = way == CACHES_ON
        specs = roster.in_process(
            peers, model, openvino_model, prefix_caching=caching, quantization=quantization, load_format=load_format
        )
    if engines is None:
        return specs
    asked = {OURS, *engines.split(";")}
    if missing := asked - {spec.title for spec in specs}:
        sys.exit(f"--engines names {', '.join(sorted(missing))}; there are {', '.join(spec.title for spec in specs)}")
    return [spec for spec in specs if spec.title in asked]


def main(
    models: Annotated[list[Path], typer.Argument(exists=True, help="folders in Hugging Face format")],
    workloads: Annotated[
        Path | None, typer.Option(exists=True, help="JSON of others by name", show_default="made from a seed")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(exists=True, help="script that measures the machine's speed beside each turn")
    ] = None,
    vllm: Annotated[Path | None, typer.Option(envvar="PEERS_VLLM", help="its environment's python")] = None,
    openvino: Annotated[Path | None, typer.Option(envvar="PEERS_OPENVINO", help="its environment's python")] = None,
    openvino_model: Annotated[
        list[Path] | None, typer.Option(exists=True, envvar="PEERS_OPENVINO_MODEL", help="in the models' order")
    ] = None,
    quantization: Annotated[
        str | None, typer.Option("--quantization", "-q", help="of our weights; Quire without it takes part, too")
    ] = None,
    transformers: Annotated[Path | None, typer.Option(help="default: this one, if it has transformers")] = None,
    llama_cpp: Annotated[Path | None, typer.Option(help="folder of its libraries; in process, with --gguf")] = None,
    gguf: Annotated[Path | None, typer.Option(exists=True, help="what llama.cpp runs, and Quire, too")] = None,
    load_format: Annotated[str, typer.Option(help="dummy: random weights for each folder's config.json")] = "auto",
    no_transformers: Annotated[bool, typer.Option("--no-transformers", help="leave it out")] = False,
    server: Annotated[list[str] | None, typer.Option(help="TITLE=COMMAND of an OpenAI server, with {port}")] = None,
    engines: Annotated[str | None, typer.Option(help="titles that take part beside Quire, with ; between")] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="of each workload, at most")] = None,
    only: Annotated[str, typer.Option(help="of the first model")] = "decode1,prefill,offline64,chat32,http32",
    only_others: Annotated[str, typer.Option(help="of the other models")] = "decode1,prefill",
    loads: Annotated[int, typer.Option(min=1, help="starts of each engine in process")] = 3,
    turns: Annotated[int, typer.Option(min=1, help="of single requests")] = 5,
    burst_turns: Annotated[int, typer.Option(min=1, help="of bursts")] = 3,
    quick: Annotated[bool, typer.Option("--quick", help="everything once, cut short: no figures")] = False,
    cpu_time: Annotated[bool, typer.Option("--cpu-time", help="of all threads: for a busy machine")] = False,
    output: Annotated[Path, typer.Option(help="Markdown; JSON beside it")] = Path("peers.md"),
) -> None:
    """Measure, print the table, and write it."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # engines are ended on the way out
    if transformers is None and not no_transformers and find_spec("transformers"):
        transformers = Path(sys.executable)
    fallback = OURS_FALLBACK in (engines or "").split(";")
    peers = Installed(vllm, openvino, transformers, tuple(server or ()), fallback, llama_cpp, gguf)
    for title, reason in roster.absent(peers, openvino_model or []).items():
        print(f"{title} is left out: {reason}", flush=True)
    plan = Plan(1, 1, 1) if quick else Plan(loads, turns, burst_turns)
    names = [only.split(","), *[only_others.split(",")] * (len(models) - 1)]
    all_names = {"warmup", *(name for of_model in names for name in of_model)}
    asked_of_all = named_workloads(workloads, all_names, quick=quick, requests=requests)
    exported = [*(openvino_model or []), *[None] * len(models)]
    facts = client_facts() | {"date": time.strftime("%Y-%m-%d %H:%M"), "plan": asdict(plan)}
    facts["quantization"] = quantization or "none"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        session = Session(asked_of_all, Calibration(calibration, folder), folder, facts, by_cpu=cpu_time)
        for number, model in enumerate(models):
            present = peers if number == 0 else replace(peers, transformers=None)
            for path in filter(None, (model, exported[number])):
                fill_page_cache(path)
            for way, asked in ways(names[number]):
                if asked:
                    specs = engines_of(way, present, model, exported[number], quantization, engines, load_format)
                    once = plan if way == "in process" else replace(plan, loads=1)
                    try:
                        session.hold(model.name, way, specs, asked, once)
                    except EngineFailedError as error:
                        sys.exit(str(error))
                    finally:
                        session.write(output)
    print(session.table())


if __name__ == "__main__":
    typer.run(main)
