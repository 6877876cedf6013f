"""The soak: hours of load with everything that goes wrong in a day, and nothing may grow. `make soak MINUTES=10`.

A server with a tiny pool of blocks, so that requests are preempted all the time, gets requests of every kind in rounds:
10 % go away at some moment, 5 % are invalid. After each round everything must be idle, and what the processes hold is
looked at. The first round touches all memory there is to touch; from then on nothing may grow. Exit status 1, with the
reasons, if anything did, if an answer was wrong, or if the last answers to fixed prompts differ from the first.
"""

import asyncio
import json
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx

from support.clients import LIMIT_S, MODEL
from support.cut_requests import MOMENTS, cut_request
from support.metrics_page import read_metrics, wait_until_idle
from support.reciting_model import TEXT, Reciter, write_reciter
from support.server import ServerProcess, running_server
from support.small_tokenizers import byte_level

NUM_CLIENTS = 24
NUM_BLOCKS = 96              # blocks of 16 tokens: a small part of what the clients ask for at once
ARGUMENTS = ("--num-kv-blocks", str(NUM_BLOCKS), "--num-swap-blocks", "40", "--max-num-seqs", "24",
             "--max-model-len", "512", "--served-model-name", MODEL)  # fmt: skip
ROUND_S, MIN_ROUNDS, MAX_ROUNDS = 15, 6, 60
SHARE_CUT, SHARE_INVALID = 0.10, 0.05
MAX_GROWTH_BYTES = 16 << 20  # growth of a process, by a straight line through its rounds but the first tenth
MAX_MORE = 4                 # descriptors, threads, tasks: what happens to be open when it is looked at
INVALID: tuple[dict[str, Any], ...] = (
    {"prompt": ""},
    {"prompt": [2**31]},
    {"prompt": "a", "temperature": -1},
    {"prompt": "a", "n": 10**6},
    {"prompt": "a", "max_tokens": 10**9},
    {"prompt": [[1, 2], 5]},
    {"prompt": "a", "logit_bias": {"x": 1}},
    {"prompt": "a", "stop": ["x"] * 1000},
)
# The server, and a thread that writes down how many tasks its event loop has.
ENTRY = """
import asyncio, gc, os, threading, time
def count():
    while True:
        time.sleep(1)
        tasks = sum(isinstance(thing, asyncio.Task) and not thing.done() for thing in gc.get_objects())
        with open(os.environ["SOAK_TASKS"] + ".new", "w") as file:
            file.write(str(tasks))
        os.replace(file.name, os.environ["SOAK_TASKS"])
threading.Thread(target=count, daemon=True).start()
from quire.cli.main import main
main()
"""


@dataclass(frozen=True, slots=True)
class Holdings:
    """What one process holds while nothing runs."""

    rss_bytes: int
    num_descriptors: int
    num_threads: int


@dataclass(slots=True)
class Round:
    """What the end of a round looks like."""

    at_s: float
    asked: Counter[str]
    holdings: dict[str, Holdings]
    num_tasks: int
    num_preemptions: int


@dataclass(slots=True)
class Soak:
    """A run: the server, and what was found."""

    server: ServerProcess
    reciter: Reciter
    tasks_file: Path
    rng: random.Random = field(default_factory=lambda: random.Random(0))
    faults: list[str] = field(default_factory=list)
    rounds: list[Round] = field(default_factory=list)

    def run(self, seconds: float) -> None:
        """Ask until the time is over, and look at what is left each time."""
        first, start_s = self.fixed_answers(), time.monotonic()
        num_rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(seconds / ROUND_S)))
        for _ in range(num_rounds):
            asked = asyncio.run(self.load(time.monotonic() + seconds / num_rounds))
            self.rounds.append(self.look(time.monotonic() - start_s, asked))
            print(described(self.rounds[-1]), flush=True)
        if self.fixed_answers() != first:
            self.faults.append("the last answers to fixed prompts are not the first")
        self.judge()

    # --- the load -------------------------------------------------------------------------------------------------

    async def load(self, end_s: float) -> Counter[str]:
        """Ask from all clients until `end_s`; return how often what was asked."""
        asked: Counter[str] = Counter()
        async with httpx.AsyncClient(base_url=self.server.url, timeout=LIMIT_S) as http, asyncio.TaskGroup() as group:
            for _ in range(NUM_CLIENTS):
                group.create_task(self.be_client(http, random.Random(self.rng.randrange(2**32)), end_s, asked))
        return asked

    async def be_client(self, http: httpx.AsyncClient, rng: random.Random, end_s: float, asked: Counter[str]) -> None:
        while time.monotonic() < end_s:
            dice = rng.random()
            kind = "cut" if dice < SHARE_CUT else "invalid" if dice < SHARE_CUT + SHARE_INVALID else "whole"
            asked[kind] += 1
            if kind == "cut":
                await cut_request(self.server.port, rng, rng.choice(MOMENTS))
            elif kind == "invalid":
                await self.expect(http, "/v1/completions", rng.choice(INVALID), 400, None)
            else:
                await self.expect(http, *self.whole_request(rng))

    def whole_request(self, rng: random.Random) -> tuple[str, dict[str, Any], int, str | None]:
        """Return a route, a body, the status and, where it is known, the text of the answer."""
        fields: dict[str, Any] = {"stream": rng.random() < 0.5, "cache_salt": rng.choice(["", "a", "b"]) or None}
        kind = rng.random()
        if kind < 0.4:
            fields |= {"max_tokens": len(self.reciter.script), "temperature": 0}
            if kind < 0.2:
                return "/v1/chat/completions", fields | {"messages": self.reciter.messages}, 200, TEXT
            return "/v1/completions", fields | {"prompt": self.reciter.prompt()}, 200, TEXT
        fields |= {"n": rng.choice([1, 1, 2, 4]), "max_tokens": rng.randrange(50, 250), "seed": rng.randrange(99)}
        fields |= {"logprobs": rng.choice([None, 2]), "stop": rng.choice([None, "ok"]), "ignore_eos": True}
        if kind > 0.95:
            fields |= {"use_beam_search": True, "stream": False, "logprobs": None, "stop": None, "max_tokens": 20}
        prompt = [rng.randrange(3, 200) for _ in range(rng.choice([5, 20, 60, 250]))]
        return "/v1/completions", fields | {"prompt": prompt}, 200, None

    async def expect(
        self, http: httpx.AsyncClient, path: str, body: dict[str, Any], status: int, text: str | None
    ) -> None:
        response = await http.post(path, json=body)
        if response.status_code != status:
            self.faults.append(f"{response.status_code} instead of {status} for {body!r:.200}: {response.text[:200]}")
        elif text is not None and (got := "".join(texts_of(response))) != text:
            self.faults.append(f"wrong answer {got!r} for {body!r:.200}")

    def fixed_answers(self) -> list[object]:
        """Return the choices for prompts that are always the same, greedy, drawn and searched, with logprobs."""
        bodies: list[dict[str, Any]] = [
            {"prompt": self.reciter.prompt(3), "max_tokens": 90, "temperature": 0, "logprobs": 5},
            {"prompt": "the stop", "max_tokens": 90, "temperature": 1.0, "seed": 7, "n": 3, "logprobs": 5},
            {"prompt": [5, 6, 7], "max_tokens": 20, "n": 3, "use_beam_search": True},
        ]
        posts = (httpx.post(f"{self.server.url}/v1/completions", json=body, timeout=LIMIT_S) for body in bodies)
        return [post.raise_for_status().json()["choices"] for post in posts]

    # --- what is left ---------------------------------------------------------------------------------------------

    def look(self, at_s: float, asked: Counter[str]) -> Round:
        """Wait until nothing runs, check that all blocks are back, and note what the processes hold."""
        wait_until_idle(self.server.url)
        samples = read_metrics(self.server.url)
        there = sum(samples[f'quire:kv_blocks{{state="{state}"}}'] for state in ("free", "cached"))
        if there != NUM_BLOCKS or samples["quire:num_requests_swapped"]:
            self.faults.append(f"{there:g} blocks of {NUM_BLOCKS} are free or cached in an idle engine")
        before = self.tasks_file.stat().st_mtime_ns
        while self.tasks_file.stat().st_mtime_ns == before:
            time.sleep(0.1)  # for a count that is not of the load
        engine = self.server.engine_pid()
        (templates,) = [pid for pid in self.server.child_pids() if pid != engine]
        pids = {"server": self.server.pid, "engine": engine, "templates": templates}
        return Round(
            at_s,
            asked,
            {name: holdings(pid) for name, pid in pids.items()},
            int(self.tasks_file.read_text()),
            int(samples["vllm:num_preemptions_total"]),
        )

    def judge(self) -> None:
        """Note everything that has grown since the first tenth of the rounds, and a load that was none."""
        steady = self.rounds[max(1, len(self.rounds) // 10) :]
        for name in self.rounds[0].holdings:
            rss = [end.holdings[name].rss_bytes for end in steady]
            times = [end.at_s for end in steady]
            grown = statistics.linear_regression(times, rss).slope * (times[-1] - times[0])
            print(f"{name}: {rss[0] >> 20} MiB, then {grown / 2**20:+.1f} MiB in {times[-1] - times[0]:.0f} s")
            if grown > MAX_GROWTH_BYTES:
                self.faults.append(f"the memory of the {name} grows: {grown / 2**20:.1f} MiB")
            for noun in ("num_descriptors", "num_threads"):
                self.compare(f"{noun} of the {name}", [getattr(end.holdings[name], noun) for end in steady])
        self.compare("tasks of the server", [end.num_tasks for end in steady])
        preemptions = [end.num_preemptions for end in self.rounds]
        if any(later <= earlier for earlier, later in pairwise(preemptions)):
            self.faults.append(f"rounds without a preemption: {preemptions}")
        if "Traceback" in self.server.log:
            self.faults.append("a traceback in the server's log:" + self.server.log.partition("Traceback")[2][:2000])

    def compare(self, what: str, counts: list[int]) -> None:
        print(f"{what}: {min(counts)} to {max(counts)}, at last {counts[-1]}")
        if counts[-1] > counts[0] + MAX_MORE:
            self.faults.append(f"{what} grow: {counts}")


def texts_of(response: httpx.Response) -> Iterator[str]:
    """Yield the pieces of the first choice's text, streamed or not, of either route."""
    is_stream = response.headers["content-type"].startswith("text/event-stream")
    lines = response.text.split("\n\n") if is_stream else ["data: " + response.text]
    for line in lines:
        payload = line.removeprefix("data: ").strip()
        if payload in ("", "[DONE]"):
            continue
        for choice in json.loads(payload)["choices"]:
            message = choice.get("delta") or choice.get("message") or {}
            yield choice.get("text") or message.get("content") or ""


def holdings(pid: int) -> Holdings:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    status = {name: value.split() for name, _, value in (line.partition(":") for line in lines)}
    num_descriptors = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    return Holdings(int(status["VmRSS"][0]) * 1024, num_descriptors, int(status["Threads"][0]))


def described(end: Round) -> str:
    held = ", ".join(
        f"{name} {it.rss_bytes / 2**20:.1f} MiB {it.num_descriptors} fds {it.num_threads} threads"
        for name, it in end.holdings.items()
    )
    asked = ", ".join(f"{count} {kind}" for kind, count in sorted(end.asked.items()))
    return f"{end.at_s:6.0f} s: {asked}; {end.num_preemptions} preemptions so far; {end.num_tasks} tasks; {held}"


def main() -> int:
    minutes = float(sys.argv[1])
    with tempfile.TemporaryDirectory() as scratch:
        folder, tasks_file = Path(scratch) / "model", Path(scratch) / "tasks"
        folder.mkdir()
        tasks_file.touch()
        reciter = write_reciter(folder, byte_level())
        with running_server(str(folder), *ARGUMENTS, env={"SOAK_TASKS": str(tasks_file)}, entry=ENTRY) as server:
            soak = Soak(server, reciter, tasks_file)
            soak.run(minutes * 60)
            soak.faults += [] if server.stop() == 0 else ["the server did not end well"]
    total = sum((end.asked for end in soak.rounds), Counter())
    print(f"{sum(total.values())} requests in {minutes:g} minutes: {dict(total)}; {len(soak.faults)} faults")
    for fault in soak.faults[:20]:
        print(f"FAULT {fault}")
    return 1 if soak.faults else 0


if __name__ == "__main__":
    sys.exit(main())
