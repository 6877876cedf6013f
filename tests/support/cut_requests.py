"""Requests of clients that go away, at whatever moment."""

import asyncio
import json
import random
import socket
import struct
from typing import Any

MOMENTS = ("in the head", "in the body", "at once", "after a while", "in the answer", "after it")
LONGEST_WAIT_S = 0.2
RESET = struct.pack("ii", 1, 0)  # SO_LINGER: the connection is reset, not closed


def random_body(rng: random.Random) -> tuple[str, dict[str, Any]]:
    """Return a route and a body for it, whose answer takes from no time to seconds."""
    fields = {"stream": rng.random() < 0.6, "n": rng.choice([1, 1, 1, 3, 8]), "max_tokens": rng.choice([1, 30, 250])}
    fields |= {"ignore_eos": True, "logprobs": rng.choice([None, 1]), "stop": rng.choice([None, "nowhere"])}
    num_tokens = rng.randint(1, 100)
    if rng.random() < 0.3:
        fields |= {"logprobs": fields["logprobs"] is not None}
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * num_tokens}], **fields}
    return "/v1/completions", {"prompt": [rng.randrange(3, 200) for _ in range(num_tokens)], **fields}


async def cut_request(port: int, rng: random.Random, moment: str) -> None:
    """Send a request, or a part of one, and go away."""
    path, fields = random_body(rng)
    if moment == "after it":
        fields |= {"n": 1, "max_tokens": 8}
    body = json.dumps(fields).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(body)}\r\n"
    head += "Connection: close\r\n\r\n"
    whole = head.encode() + body
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lengths = {"in the head": rng.randrange(1, len(head)), "in the body": rng.randrange(len(head), len(whole))}
    writer.write(whole[: lengths.get(moment, len(whole))])
    await writer.drain()
    if moment == "after a while":
        await asyncio.sleep(rng.uniform(0, LONGEST_WAIT_S))
    if moment == "in the answer":
        await reader.read(rng.randint(1, 3000))
    if moment == "after it":
        assert (await reader.read()).startswith(b"HTTP/1.1 200")
    if rng.random() < 0.5:
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    writer.close()
