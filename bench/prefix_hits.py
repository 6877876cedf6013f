"""Hit rates of the prefix cache, beside the most that can be found, for caches of several sizes.

    python bench/prefix_hits.py --output prefix_hits.md

Chats and traces run through the real scheduler and the real cache. The model is missing, and time with it: requests
come in the file's order, the next one as soon as one of `--max-open` is over.

* chat: sharegpt_sample_turns.csv.gz. Every answer is a request with all that was said before as its prompt, the earlier
  answers as the engine gave them. `--chats` conversations are open, and the next one to ask is drawn by lot; when one
  is over, another begins.
* Mooncake's traces: a prompt is what its hash ids say, 512 tokens for each. What the engine answers is never asked
  again, for the answers of the trace are in the next prompt under ids of their own.

The most that can be found: of a chat, all that was said up to the last answer; of a trace, the ids that have been there
with all before them. Neither knows of blocks, or that the last token of a prompt is always computed. For a cache with
an end, a plain list says what to expect: as many ids of a trace as the cache has room for, the last used, one request
at a time.
"""

import csv
import json
import random
import sys
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain, groupby, islice, repeat
from operator import itemgetter
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from quire.core.config import CacheConfig
from quire.core.sequence import Request
from quire_lab.bench.report import client_facts
from quire_lab.sim.datasets import DATA_FOLDER
from quire_lab.sim.workloads import HASH_SPAN, TraceRow, open_text, read_trace
from without_model import OUTPUT_TOKEN, Clients, InOrder, engine_without_model, request_of, run_all

CHATS = "sharegpt_sample_turns.csv.gz"
TRACES = {"conversation": "mooncake_conversation.jsonl.gz", "synthetic": "mooncake_synthetic.jsonl.gz"}
CHAT_POOLS_GIB, TRACE_POOLS_GIB = (0.5, 1.0, 1.5, 2.0), (4.0, 16.0, 64.0)
GIB = 1 << 30
QWEN_KV_BYTES = 12_288  # per token, of Qwen2.5-0.5B in bfloat16: 24 layers, 2 KV heads of 64
FIRST_CHAT_TOKEN = OUTPUT_TOKEN + 1  # every chat has a token of its own, and no other


class Turn(NamedTuple):
    """One turn of a chat: numbers of new and of repeated tokens."""

    input_len: int
    output_len: int


class Workload(NamedTuple):
    """Requests, and what is known of them beforehand."""

    title: str
    pools_gib: Sequence[float]
    clients: Callable[[], Clients]
    num_requests: int
    num_prompt_tokens: int
    num_tokens: int             # with the answers
    longest: int                # a request with its answer
    most_found: int             # tokens
    most_spans: float | None    # the share of hash ids, of a trace
    spans_with_room: Callable[[int], float | None]  # the share of hash ids that a plain list of so many ids finds


@dataclass(frozen=True, slots=True)
class Run:
    """One workload with one cache."""

    workload: str
    pool_gib: float | None      # None: everything fits
    num_blocks: int
    hit_rate: float             # share of prompt tokens
    most_possible: float
    hit_rate_spans: float | None        # share of hash ids: what the data's README gives
    most_possible_spans: float | None
    plain_list_spans: float | None
    evicted_blocks: int
    num_preemptions: int
    num_steps: int
    wall_s: float


class Tally:
    """Clients that are watched: what was asked for, and what was found of it."""

    def __init__(self, clients: Clients) -> None:
        self._clients = clients
        self.num_prompt_tokens = self.num_found = self.num_spans = self.num_found_spans = self.num_preemptions = 0

    def next(self) -> Request | None:
        return self._clients.next()

    def take(self, request: Request) -> None:
        length, found = len(request.prompt_token_ids), request.num_cached_tokens
        self.num_prompt_tokens += length
        self.num_found += found
        self.num_spans += spans(length)
        self.num_found_spans += spans(length) if found == length - 1 else found // HASH_SPAN
        self.num_preemptions += request.num_preemptions
        self._clients.take(request)


# --- chats ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Chat:
    """A conversation under way."""

    token: int           # what its user says, over and over
    turns: deque[Turn]   # yet to come
    said: list[int] = field(default_factory=list)


class Chats:
    """Conversations, so many at a time. The next one to ask is drawn by lot from those that have been answered."""

    def __init__(self, conversations: Sequence[Sequence[Turn]], num_open: int) -> None:
        self._unopened = (Chat(token, deque(turns)) for token, turns in enumerate(conversations, FIRST_CHAT_TOKEN))
        self._ready = list(islice(self._unopened, num_open))
        self._asking: dict[int, Chat] = {}
        self._num_asked = 0
        self._lot = random.Random(0)

    def next(self) -> Request | None:
        if not self._ready:
            return None
        chat = self._ready.pop(self._lot.randrange(len(self._ready)))
        chat.said += [chat.token] * chat.turns[0].input_len
        self._num_asked += 1
        self._asking[self._num_asked] = chat
        return request_of(self._num_asked, chat.said.copy(), chat.turns[0].output_len)

    def take(self, request: Request) -> None:
        chat = self._asking.pop(request.request_id)
        chat.said += [OUTPUT_TOKEN] * chat.turns.popleft().output_len
        following = chat if chat.turns else next(self._unopened, None)
        if following is not None:
            self._ready.append(following)


def chat_workload(path: Path, num_open: int) -> Workload:
    """Return the conversations of a file of turns."""
    conversations = [turns for turns in read_conversations(path) if turns]
    prompts, answers, known = list[int](), list[int](), list[int]()
    for turns in conversations:
        said = 0
        for turn in turns:
            known.append(said)
            prompts.append(said + turn.input_len)
            answers.append(turn.output_len)
            said += turn.input_len + turn.output_len
    return Workload(
        title="chat",
        pools_gib=CHAT_POOLS_GIB,
        clients=lambda: Chats(conversations, num_open),
        num_requests=len(prompts),
        num_prompt_tokens=sum(prompts),
        num_tokens=sum(prompts) + sum(answers),
        longest=max(map(sum, zip(prompts, answers, strict=True))),
        most_found=sum(known),
        most_spans=None,
        spans_with_room=lambda _: None,
    )


def read_conversations(path: Path) -> Iterator[list[Turn]]:
    """Yield each conversation's asks: what was said since the last answer, then the answer.

    An answer to nothing, as at the beginning of a conversation that is cut, belongs to the next prompt.
    """
    with open_text(path) as lines:
        for _, rows in groupby(csv.DictReader(lines), itemgetter("conversation")):
            turns, unanswered = list[Turn](), 0
            for row in rows:
                is_answer = row["role"] == "gpt" and unanswered > 0 and int(row["tokens"]) > 0
                if is_answer:
                    turns.append(Turn(unanswered, int(row["tokens"])))
                unanswered = 0 if is_answer else unanswered + int(row["tokens"])
            yield turns


# --- traces ---------------------------------------------------------------------------------------------------------


def trace_workload(path: Path, num_requests: int | None) -> Workload:
    """Return the requests of a trace with hash ids."""
    rows = [row for row in read_trace(path)[:num_requests] if row.input_len > 0 and row.output_len > 0]
    shared = list(known_spans(rows))
    known = [min(num_spans * HASH_SPAN, row.input_len) for num_spans, row in zip(shared, rows, strict=True)]
    return Workload(
        title=path.name.partition(".")[0],
        pools_gib=TRACE_POOLS_GIB,
        clients=lambda: InOrder(request_of(i, prompt_of(row), row.output_len) for i, row in enumerate(rows)),
        num_requests=len(rows),
        num_prompt_tokens=sum(row.input_len for row in rows),
        num_tokens=sum(row.input_len + row.output_len for row in rows),
        longest=max(row.input_len + row.output_len for row in rows),
        most_found=sum(known),
        most_spans=sum(shared) / sum(len(row.hash_ids) for row in rows),
        spans_with_room=lambda room: found_in_list(rows, room),
    )


def prompt_of(row: TraceRow) -> list[int]:
    """Return a prompt in which an id's tokens are all the same: the cache compares them, and only ids count."""
    tokens = chain.from_iterable(repeat(FIRST_CHAT_TOKEN + hash_id, HASH_SPAN) for hash_id in row.hash_ids)
    return list(tokens)[: row.input_len]


def known_spans(rows: Sequence[TraceRow]) -> Iterator[int]:
    """Yield how many of each prompt's leading ids have been there before."""
    seen: set[int] = set()
    for row in rows:
        new = (number for number, hash_id in enumerate(row.hash_ids) if hash_id not in seen)
        yield next(new, len(row.hash_ids))
        seen.update(row.hash_ids)


def found_in_list(rows: Sequence[TraceRow], room: int) -> float:
    """Return the share of ids found if requests came one by one, and a list kept the `room` ids used last."""
    kept: OrderedDict[int, None] = OrderedDict()
    num_found = 0
    for row in rows:
        missing = (number for number, hash_id in enumerate(row.hash_ids) if hash_id not in kept)
        num_found += next(missing, len(row.hash_ids))
        for hash_id in reversed(row.hash_ids):  # the end of a prompt goes before its beginning
            kept[hash_id] = None
            kept.move_to_end(hash_id)
        while len(kept) > room:
            kept.popitem(last=False)
    return num_found / sum(len(row.hash_ids) for row in rows)


def spans(num_tokens: int) -> int:
    """Return how many hash ids stand for so many tokens."""
    return -(-num_tokens // HASH_SPAN)


# --- runs -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setting:
    """Settings of all runs."""

    block_size: int
    kv_bytes_per_token: int
    max_open: int
    max_num_batched_tokens: int

    def num_blocks(self, workload: Workload, pool_gib: float | None) -> int:
        """Return the blocks of a pool, or of one that holds all that a workload could store."""
        if pool_gib is None:
            return workload.num_tokens // self.block_size + workload.num_requests + 1
        return int(pool_gib * GIB) // (self.kv_bytes_per_token * self.block_size)

    def run(self, workload: Workload, pool_gib: float | None) -> Run | None:
        """Run a workload with a cache of that size; None if its longest request does not fit."""
        num_blocks = self.num_blocks(workload, pool_gib)
        if workload.longest > num_blocks * self.block_size:
            return None
        cache = CacheConfig(num_blocks, self.block_size)
        engine = engine_without_model(cache, self.max_open, self.max_num_batched_tokens)
        tally = Tally(workload.clients())
        started_s = time.perf_counter()
        num_steps = run_all(engine, tally, self.max_open)
        wall_s = time.perf_counter() - started_s
        assert tally.num_prompt_tokens == workload.num_prompt_tokens, "a prompt was lost"
        has_spans = workload.most_spans is not None
        return Run(
            workload=workload.title,
            pool_gib=pool_gib,
            num_blocks=num_blocks,
            hit_rate=tally.num_found / tally.num_prompt_tokens,
            most_possible=workload.most_found / workload.num_prompt_tokens,
            hit_rate_spans=tally.num_found_spans / tally.num_spans if has_spans else None,
            most_possible_spans=workload.most_spans,
            plain_list_spans=workload.spans_with_room(num_blocks * self.block_size // HASH_SPAN),
            evicted_blocks=engine.kv_stats().evicted_blocks,
            num_preemptions=tally.num_preemptions,
            num_steps=num_steps,
            wall_s=wall_s,
        )


def markdown(runs: Sequence[Run]) -> str:
    """Return the table."""
    lines = [
        "| workload | KV cache | prompt tokens found | at most | of 512-token ids | a plain list | at most | "
        "blocks evicted | preemptions | steps | s |",
        "| --- " * 11 + "|",
    ]
    for run in runs:
        pool = "endless" if run.pool_gib is None else f"{run.pool_gib:g} GiB"
        rates = (run.hit_rate, run.most_possible, run.hit_rate_spans, run.plain_list_spans, run.most_possible_spans)
        cells = [run.workload, pool, *("-" if rate is None else f"{rate:.1%}" for rate in rates)]
        cells += [f"{number:,}" for number in (run.evicted_blocks, run.num_preemptions, run.num_steps)]
        lines.append("| " + " | ".join([*cells, f"{run.wall_s:.0f}"]) + " |")
    return "\n".join(lines) + "\n"


def main(
    data: Annotated[Path, typer.Option(help="folder with the chats and traces")] = DATA_FOLDER,
    only: Annotated[str, typer.Option(help="chat, conversation, synthetic")] = "chat,conversation,synthetic",
    pool_gib: Annotated[list[float] | None, typer.Option(help="KV caches; 0 is one that holds everything")] = None,
    kv_bytes_per_token: Annotated[int, typer.Option(min=1, help="what a GiB holds; of Qwen2.5-0.5B")] = QWEN_KV_BYTES,
    block_size: Annotated[int, typer.Option(min=1, help="tokens per KV block")] = 16,
    chats: Annotated[int, typer.Option(min=1, help="conversations at a time")] = 128,
    max_open: Annotated[int, typer.Option(min=1, help="requests in the engine")] = 32,
    max_num_batched_tokens: Annotated[int, typer.Option(min=1, help="token budget of a step")] = 2048,
    num_requests: Annotated[int | None, typer.Option(min=1, help="of each trace: all")] = None,
    output: Annotated[Path | None, typer.Option(help="Markdown; JSON beside it")] = None,
) -> None:
    """Measure every workload with every cache, and print the table."""
    missing = [name for name in (CHATS, *TRACES.values()) if not (data / name).exists()]
    if missing:
        sys.exit(f"{data} has no {', '.join(missing)}: nothing to measure (--data FOLDER)")
    wanted = only.split(",")
    workloads = [chat_workload(data / CHATS, chats)] if "chat" in wanted else []
    workloads += [trace_workload(data / name, num_requests) for key, name in TRACES.items() if key in wanted]
    setting = Setting(block_size, kv_bytes_per_token, max_open, max_num_batched_tokens)
    runs: list[Run] = []
    for workload in workloads:
        for pool in pool_gib or [*workload.pools_gib, 0.0]:
            run = setting.run(workload, pool or None)
            if run is None:
                print(f"{workload.title}: {pool:g} GiB do not hold its longest request, {workload.longest} tokens")
                continue
            runs.append(run)
            print(markdown([run]).splitlines()[-1], flush=True)
    facts = client_facts() | asdict(setting) | {"chats": chats, "date": time.strftime("%Y-%m-%d")}
    table = markdown(runs) + "\n" + ", ".join(f"{key} {value}" for key, value in facts.items()) + "\n"
    print("\n" + table)
    if output is not None:
        output.write_text(table, encoding="utf-8")
        record = {"facts": facts, "runs": [asdict(run) for run in runs]}
        output.with_suffix(".json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    typer.run(main)
