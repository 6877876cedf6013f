"""Deadlines at twice the load that fits: which requests are in time, which are refused, and whether that was right.

    python bench/deadlines.py                     # the demo model, first tokens within 250 to 4,000 ms
    python bench/deadlines.py --spread 1          # all within 1,000 ms
    python bench/deadlines.py --deadline-ms 4000 MODEL

The rate that fits is measured first: the best of three bursts without deadlines, answered in full. Then requests
arrive at random at `--load` times that rate for `--seconds`, all with random prompts and a deadline for the first
token, `--deadline-ms` in the middle: its logarithm is uniform up to the factor `--spread` either way. With one deadline
for all, the queue stands at it, and each decision is about a few per cent. One in twenty asks for its first token
within 1 ms instead, to see whether that helps. Of those that are refused for the deadline, one in five is sent again at
once without it: had its first token been in time, the refusal was wrong, and how late it is is what `Retry-After`
should say, in whole seconds.
"""

import asyncio
import json
import math
import os
import random
import re
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import aiohttp
import typer
import uvloop

from http_overhead import server

NUM_SEATS = 16
PROMPT_TOKENS, VOCABULARY = (64, 512), 500
BURST = 96
SHORTEST_S = 0.001  # deadline of clients that try to gain by a short one
SHARE_OF_SHORTEST, SHARE_SENT_AGAIN = 0.05, 0.2
ARGUMENTS = ("--max-num-seqs", str(NUM_SEATS), "--max-queued-requests", "4000", "--no-enable-prefix-caching")

_PREDICTED = re.compile(r"after about (\d+) ms")


class Asked(NamedTuple):
    """A request and how it was answered."""

    status: int
    deadline_s: float           # for the first token
    ttft_s: float               # until the first token, or the refusal
    retry_after_s: int = 0
    predicted_s: float = 0.0    # first token, as a refusal names it
    again: "Asked | None" = None


class Load:
    """Requests to one server, each with a random prompt."""

    def __init__(self, session: aiohttp.ClientSession, max_tokens: int, seed: int) -> None:
        self._session, self._max_tokens, self._rng = session, max_tokens, random.Random(seed)

    async def ask(self, deadline_ms: int | None = None, prompt: list[int] | None = None) -> Asked:
        """Send a request, and send it again without a deadline if it is one of those that are."""
        prompt = prompt or [self._rng.randrange(3, VOCABULARY) for _ in range(self._rng.randint(*PROMPT_TOKENS))]
        body = {
            "prompt": prompt, "max_tokens": self._max_tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "ttft_deadline_ms": deadline_ms,
        }  # fmt: skip
        deadline_s = math.inf if deadline_ms is None else deadline_ms / 1e3
        started_s = time.perf_counter()
        async with self._session.post("/v1/completions", json=body) as response:
            if response.status != 200:
                refused_s = time.perf_counter() - started_s
                error = (await response.json())["error"]
                assert error["code"] == "deadline_unmeetable", error
                again = None
                if deadline_s > SHORTEST_S and self._rng.random() < SHARE_SENT_AGAIN:
                    again = await self.ask(prompt=prompt)
                predicted_s = int(_PREDICTED.findall(error["message"])[0]) / 1e3
                told_s = int(response.headers["Retry-After"])
                return Asked(response.status, deadline_s, refused_s, told_s, predicted_s, again)
            first = await response.content.readline()
            ttft_s = time.perf_counter() - started_s
            async for _ in response.content:
                pass
        return Asked(504 if b"deadline_exceeded" in first else 200, deadline_s, ttft_s)

    async def burst(self) -> float:
        """Return the requests per second of a burst that is answered in full."""
        started_s = time.perf_counter()
        await asyncio.gather(*(self.ask() for _ in range(BURST)))
        return BURST / (time.perf_counter() - started_s)

    async def arrive(self, rate: float, seconds: float, deadline_ms: int, spread: float) -> list[Asked]:
        """Send requests at random times for so many seconds."""
        tasks, ends_s = list[asyncio.Task[Asked]](), time.perf_counter() + seconds
        while time.perf_counter() < ends_s:
            is_shortest = self._rng.random() < SHARE_OF_SHORTEST
            drawn_ms = round(deadline_ms * spread ** self._rng.uniform(-1, 1))
            tasks.append(asyncio.create_task(self.ask(round(SHORTEST_S * 1e3) if is_shortest else drawn_ms)))
            await asyncio.sleep(self._rng.expovariate(rate))
        return await asyncio.gather(*tasks)


async def measure(
    url: str, load: float, seconds: float, deadline_ms: int, spread: float, max_tokens: int, seed: int
) -> tuple[float, list[Asked]]:
    """Return the rate that fits, and the answers at `load` times that rate."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector, timeout=aiohttp.ClientTimeout(600)) as session:
        clients = Load(session, max_tokens, seed)
        rate = max([await clients.burst() for _ in range(3)])
        return rate, await clients.arrive(load * rate, seconds, deadline_ms, spread)


def share(part: int, whole: int) -> str:
    """Return a share in per cent, with both numbers."""
    return f"{100 * part / max(whole, 1):.1f} % ({part} of {whole})"


def report(answers: Sequence[Asked]) -> None:
    """Print the shares."""
    usual = [each for each in answers if each.deadline_s > SHORTEST_S]
    accepted = [each for each in usual if each.status != 429]
    in_time = [each for each in accepted if each.status == 200 and each.ttft_s <= each.deadline_s]
    refused = [each for each in usual if each.status == 429]
    print(f"accepted: {share(len(accepted), len(usual))}; of these in time: {share(len(in_time), len(accepted))}")
    print(f"504 of the accepted: {share(sum(each.status == 504 for each in accepted), len(accepted))}")
    truths = [(each.retry_after_s, each.again.ttft_s - each.deadline_s) for each in refused if each.again]
    wrong = [excess_s for _, excess_s in truths if excess_s <= 0]
    print(f"wrongly refused: {share(len(wrong), len(truths))} of those sent again without a deadline")
    wholes = [(told, max(1, math.ceil(excess_s))) for told, excess_s in truths]
    right = sum(told <= 2 * truth and truth <= 2 * told for told, truth in wholes)
    print(f"Retry-After within 2 x of the truth: {share(right, len(wholes))}")
    ratios = sorted(each.again.ttft_s / each.predicted_s for each in refused if each.again)
    if ratios:
        ends = f"{ratios[len(ratios) // 10]:.2f} and {ratios[-1 - len(ratios) // 10]:.2f}"
        print(f"first token of these over the prediction: median {statistics.median(ratios):.2f}, p10 and p90 {ends}")
    shortest = [each for each in answers if each.deadline_s == SHORTEST_S]
    print(f"within 1 ms: {len(shortest)} asked, {sum(each.status == 200 for each in shortest)} answered")
    times_s = [each.ttft_s for each in in_time]
    if times_s:
        print(f"first token, in time: median {statistics.median(times_s):.3f} s, longest {max(times_s):.3f} s")


def main(
    model: Annotated[str | None, typer.Argument()] = None, deadline_ms: int = 1000, spread: float = 4.0,
    load: float = 2.0, seconds: float = 30.0, max_tokens: int = 64, seed: int = 0,
) -> None:  # fmt: skip
    """Measure a server of its own."""
    with tempfile.TemporaryDirectory() as folder:
        with server(Path(folder), [*([model] if model else []), *ARGUMENTS]) as url:
            before = os.getloadavg()[0]
            rate, answers = uvloop.run(measure(url, load, seconds, deadline_ms, spread, max_tokens, seed))
        log = (Path(folder) / "server.log").read_text(encoding="utf-8")
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    inside_s = [line["duration_s"] for line in lines if line["status"] == 429]
    machine = f"load {before:.1f} on {os.cpu_count()} cores"
    print(f"{rate:.1f} requests/s fit; {len(answers)} at {load:g} times that; {machine}")
    report(answers)
    num_in_time = sum(each.status == 200 and each.ttft_s <= each.deadline_s for each in answers)
    print(f"answered in time: {num_in_time / seconds:.1f} requests/s, {num_in_time / seconds / rate:.2f} of what fits")
    if len(inside_s) > 1:
        percent = statistics.quantiles(inside_s, n=100, method="inclusive")
        print(f"a refusal, read to written: median {percent[49] * 1e3:.2f} ms, p90 {percent[89] * 1e3:.2f} ms")


if __name__ == "__main__":
    typer.run(main)
