"""Requests that all engines get: token ids and lengths of answers from one seed, the same on every machine.

Lengths of bursts are log-normal, with the medians and means of short instructions (offline64; http32 is its first half)
and of chats. Ids are those of plain tokens of a vocabulary of 32,000.
"""

import math
import random

from quire_lab.sim.workloads import WorkItem

SEED = 20260101
FIRST_ID, END_ID = 300, 31_999


def peer_workloads() -> dict[str, list[WorkItem]]:
    """Return the requests of each workload by its name."""
    draw = random.Random(SEED)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(FIRST_ID, END_ID) for _ in range(count)]

    def length(median: int, mean: int, low: int, high: int) -> int:
        drawn = draw.lognormvariate(math.log(median), math.sqrt(2 * math.log(mean / median)))
        return max(low, min(high, round(drawn)))

    decode = [WorkItem(tokens(128), 128)]
    offline = [WorkItem(tokens(length(20, 40, 4, 256)), length(50, 65, 8, 256)) for _ in range(64)]
    chat = [WorkItem(tokens(length(150, 230, 16, 768)), length(145, 185, 16, 512)) for _ in range(32)]
    prefill = [WorkItem(tokens(2048), 1)]
    shared = tokens(512)
    prefix = [WorkItem(shared + tokens(32), 16) for _ in range(32)]
    warm_up = [WorkItem(tokens(count), 12) for count in (16, 40, 128, 300)]
    return {
        "decode1": decode, "offline64": offline, "chat32": chat, "prefill": prefill, "prefix": prefix,
        "http32": offline[:32], "warmup": warm_up,
    }  # fmt: skip
