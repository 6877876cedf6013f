"""Load of the hostile soak: honest clients that stream, and attacks, each with its harmless counterpart.

An attack sends a request that costs more than it seems to, or none that is complete. Its counterpart asks for the same
accepted tokens without the hostile part, so that a phase with counterparts is the baseline of a phase with attacks. An
attack with refused requests has no counterpart: it asks for no tokens. Both run at the same rate, given by the
attack's period. Requests are bytes made beforehand, sent over plain sockets of the loopback interface, so that the
load's own work is small. Everything ends by itself at the end of the phase.
"""

import asyncio
import json
import random
import re
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

HOST = "127.0.0.1"
BODY_BYTES = (4 << 20) - 1024            # just within the server's bound
ANSWER_LIMIT_S = 60.0
GRACE_S = 5.0                            # for answers under way at the end of a phase
NUM_HONEST = 4
HONEST = {"max_tokens": 64, "temperature": 0, "ignore_eos": True, "stream": True}
_TOKENS = re.compile(rb'"completion_tokens":\s*(\d+)')
_REQUEST_ID = re.compile(rb"x-request-id:\s*(\S+)", re.IGNORECASE)

Json = dict[str, Any]


@dataclass(slots=True)
class Target:
    """A server on the loopback interface, and the key of a client, if it has one."""

    port: int
    key: str | None = None

    def request(self, method: str, path: str, body: bytes = b"", num_announced: int | None = None) -> bytes:
        """Return a whole request; `num_announced` bytes of body are announced, all of them by default."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        length = len(body) if num_announced is None else num_announced
        head = f"{method} {path} HTTP/1.1\r\nHost: {HOST}\r\nConnection: close\r\n{key}Content-Length: {length}\r\n\r\n"
        return head.encode() + body

    async def ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes]:
        """Return the status and the whole answer, head and body; status 0 if the connection broke or took too long."""
        answer = bytearray()
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(ANSWER_LIMIT_S):
                reader, writer = await asyncio.open_connection(HOST, self.port)
                try:
                    writer.write(self.request(method, path, body))
                    while piece := await reader.read(1 << 20):
                        answer += piece
                finally:
                    writer.close()
        return (int(answer[9:12]) if len(answer) > 12 else 0), bytes(answer)


@dataclass(slots=True)
class Tally:
    """Result of a phase. Times between frames in seconds."""

    statuses: Counter[str] = field(default_factory=Counter)
    accepted_tokens: int = 0
    gaps_s: list[float] = field(default_factory=list)
    num_streams: int = 0


Act = Callable[[Target, random.Random, Tally], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Attack:
    """A hostile act and its harmless counterpart, each of which returns a status; one every `period_s`."""

    name: str
    hostile: Act
    harmless: Act
    period_s: float = 2.0


# --- acts -------------------------------------------------------------------------------------------------------------


def posting(path: str, make: Callable[[random.Random], Json | bytes]) -> Act:
    """Return an act that posts what `make` returns, and counts the tokens of the answer."""

    async def act(target: Target, rng: random.Random, tally: Tally) -> int:
        made = make(rng)
        body = made if isinstance(made, bytes) else json.dumps(made).encode()
        status, answer = await target.ask("POST", path, body)
        found = _TOKENS.search(answer[-400:]) if status == 200 else None
        tally.accepted_tokens += int(found[1]) if found else 0
        return status

    return act


async def nothing(target: Target, rng: random.Random, tally: Tally) -> int:
    """Ask for nothing: the counterpart of what is never accepted."""
    return 200


def prompt(rng: random.Random, num_tokens: int) -> list[int]:
    """Return tokens that no earlier request has begun with."""
    return [rng.randrange(3, 250) for _ in range(num_tokens)]


def completion(num_tokens: int, **fields: Any) -> Callable[[random.Random], Json]:  # noqa: ANN401 (of the body)
    """Return a maker of bodies with a new prompt each time."""
    return lambda rng: {"prompt": prompt(rng, num_tokens), "ignore_eos": True, **fields}


def without(make: Callable[[random.Random], Json], *names: str) -> Callable[[random.Random], Json]:
    """Return a maker of the same bodies, but for some fields."""
    return lambda rng: {name: value for name, value in make(rng).items() if name not in names}


def completions(make: Callable[[random.Random], Json], *hostile: str) -> tuple[Act, Act]:
    """Return the acts of a completion that the fields `hostile` make an attack."""
    return posting("/v1/completions", make), posting("/v1/completions", without(make, *hostile))


BRACKETS = b'{"prompt":[' + b"[]," * (BODY_BYTES // 3 - 100) + b"[]]}"
OBJECTS = b'{"prompt":[7,8,9],"max_tokens":1,"x":[' + b"{}," * (BODY_BYTES // 3 - 100) + b"{}]}"
UNKNOWN_KEYS = b'{"prompt":[7,8,9],"max_tokens":1' + b"".join(b',"%x":1' % i for i in range(BODY_BYTES // 11)) + b"}"
PART = b'{"type":"text","text":""}'
PARTS = b'{"max_tokens":1,"messages":[{"role":"user","content":[' + (
    (PART + b",") * (BODY_BYTES // (len(PART) + 1) - 100)
) + PART + b"]}]}"
SPOILT_CHAT = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1,"chat_template_kwargs":{"x":[' + (
    b"[]," * (BODY_BYTES // 3 - 100)
) + b"[]]}}"
CHAT = b'{"messages":[{"role":"user","content":"hi"}],"max_tokens":1}'
FEW = b'{"prompt":[7,8,9],"max_tokens":1}'


async def unfinished_bodies(target: Target, rng: random.Random, tally: Tally) -> int:
    """Announce twenty long bodies, send most of each, and wait for the answers."""
    request = target.request("POST", "/v1/completions", b" " * (BODY_BYTES - 1000), BODY_BYTES)
    opened = []
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(10):
            for _ in range(20):
                _, writer = await asyncio.open_connection(HOST, target.port)
                opened.append(writer)
                writer.write(request)
            await asyncio.sleep(9)
    for writer in opened:
        writer.transport.abort()
    return 0


async def explained(target: Target, rng: random.Random, tally: Tally) -> int:
    """Send 1,024 prompts in one call and ask why each missed the cache."""
    return await _many_prompts(target, rng, tally, is_explained=True)


async def not_explained(target: Target, rng: random.Random, tally: Tally) -> int:
    """Send 1,024 prompts in one call."""
    return await _many_prompts(target, rng, tally, is_explained=False)


async def _many_prompts(target: Target, rng: random.Random, tally: Tally, *, is_explained: bool) -> int:
    body = {"prompt": [prompt(rng, 3) for _ in range(1024)], "max_tokens": 1, "ignore_eos": True}
    status, answer = await target.ask("POST", "/v1/completions", json.dumps(body).encode())
    if status == 200:
        tally.accepted_tokens += 1024
        request_id = _REQUEST_ID.search(answer)
        if is_explained and request_id is not None:
            await target.ask("GET", f"/v1/requests/{request_id[1].decode()}/explain")
    return status


async def flood(target: Target, rng: random.Random, tally: Tally) -> int:
    """Open 300 connections at once, say nothing, and leave."""
    opening = [asyncio.open_connection(HOST, target.port) for _ in range(300)]
    opened = await asyncio.gather(*opening, return_exceptions=True)
    await asyncio.sleep(0.5)
    for each in opened:
        if not isinstance(each, BaseException):
            each[1].transport.abort()
    return 0


async def aborted(target: Target, rng: random.Random, tally: Tally) -> int:
    """Ask for a long stream and leave after its first frame."""
    body = json.dumps(completion(16, max_tokens=512, stream=True)(rng)).encode()
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(ANSWER_LIMIT_S):
            reader, writer = await asyncio.open_connection(HOST, target.port)
            writer.write(target.request("POST", "/v1/completions", body))
            await reader.readuntil(b"data: ")
            writer.transport.abort()
    return 200


STOPS = [f"never {i} said" for i in range(64)]
WORDS = [" ".join(["x"] * (1 + i)) for i in range(64)]
SCORED = completion(1500, max_tokens=1, prompt_logprobs=20)
MANY = completion(8, max_tokens=16, n=64, stop=STOPS)
RANKED = completion(8, max_tokens=32, n=8, logprobs=20)
BANNED = completion(8, max_tokens=16, n=16, bad_words=WORDS)
URGENT = completion(200, max_tokens=16, priority=-100)

ATTACKS = (
    Attack("brackets", posting("/v1/completions", lambda rng: BRACKETS), nothing),
    Attack("objects", posting("/v1/completions", lambda rng: OBJECTS), posting("/v1/completions", lambda rng: FEW)),
    Attack("text parts", posting("/v1/chat/completions", lambda rng: PARTS),
           posting("/v1/chat/completions", lambda rng: CHAT)),
    Attack("unknown keys", posting("/v1/completions", lambda rng: UNKNOWN_KEYS),
           posting("/v1/completions", lambda rng: FEW)),
    Attack("unfinished bodies", unfinished_bodies, nothing, 10.0),
    Attack("templates", posting("/v1/chat/completions", lambda rng: SPOILT_CHAT),
           posting("/v1/chat/completions", lambda rng: CHAT)),
    Attack("explain", explained, not_explained, 20.0),
    Attack("prompt_logprobs", *completions(SCORED, "prompt_logprobs"), 4.0),
    Attack("stop strings", *completions(MANY, "stop"), 4.0),
    Attack("logprobs", *completions(RANKED, "logprobs"), 3.0),
    Attack("bad_words", *completions(BANNED, "bad_words"), 4.0),
    Attack("pins", posting("/v1/prefixes", lambda rng: {"prompt": prompt(rng, 400)}),
           posting("/v1/completions", completion(400, max_tokens=1)), 5.0),
    Attack("priority", *completions(URGENT, "priority"), 2.0),
    Attack("flood", flood, nothing, 3.0),
    Attack("aborts", aborted, posting("/v1/completions", completion(16, max_tokens=2)), 1.0),
)  # fmt: skip


# --- phases -----------------------------------------------------------------------------------------------------------


async def attack_until(
    target: Target, end_s: float, seed: int, refused: frozenset[str], kind: str, tally: Tally
) -> None:
    """Run all attacks until `end_s`, each at its rate. `kind`: "hostile", "harmless", or "refused": only those."""

    async def repeat(attack: Attack) -> None:
        rng = random.Random(f"{seed} {attack.name}")
        act = attack.harmless if kind == "harmless" else attack.hostile
        await asyncio.sleep(attack.period_s * rng.random())
        while (started_s := time.monotonic()) < end_s:
            status = await act(target, rng, tally)
            tally.statuses[f"{attack.name} {status or '-'}"] += 1
            await asyncio.sleep(max(0.0, started_s + attack.period_s - time.monotonic()))

    chosen = [each for each in ATTACKS if (each.name in refused) == (kind == "refused") or kind == "hostile"]
    with suppress(TimeoutError):
        async with asyncio.timeout(end_s + GRACE_S - time.monotonic()):
            await asyncio.gather(*map(repeat, chosen))


async def statuses_of_attacks(target: Target) -> dict[str, int]:
    """Return what each attack is answered when it runs alone, once."""
    rng = random.Random(0)
    return {attack.name: await attack.hostile(target, rng, Tally()) for attack in ATTACKS}


async def stream_until(target: Target, end_s: float, seed: int, tally: Tally) -> None:
    """Be the honest clients until `end_s`: note the time between two frames of a stream."""

    async def client(rng: random.Random) -> None:
        while time.monotonic() < end_s:
            body = json.dumps(HONEST | {"prompt": prompt(rng, 40)}).encode()
            try:
                async with asyncio.timeout(ANSWER_LIMIT_S):
                    await _stream(target, body, tally)
            except (OSError, TimeoutError, asyncio.IncompleteReadError):
                tally.statuses["honest broken"] += 1

    with suppress(TimeoutError):
        async with asyncio.timeout(end_s + GRACE_S - time.monotonic()):
            await asyncio.gather(*(client(random.Random(f"{seed} {number}")) for number in range(NUM_HONEST)))


async def _stream(target: Target, body: bytes, tally: Tally) -> None:
    reader, writer = await asyncio.open_connection(HOST, target.port)
    try:
        writer.write(target.request("POST", "/v1/completions", body))
        head = await reader.readuntil(b"\r\n\r\n")
        tally.statuses[f"honest {head[9:12].decode()}"] += 1
        last_s: float | None = None
        while line := await reader.readline():
            if not line.startswith(b"data: {"):
                continue
            now_s = time.monotonic()
            if last_s is not None:
                tally.gaps_s.append(now_s - last_s)
            last_s = now_s
        tally.num_streams += 1
    finally:
        writer.close()
