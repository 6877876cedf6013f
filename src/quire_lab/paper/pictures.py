"""Figures without a clock: layout and growth of memory, block tables of the real cache, and lengths."""

from collections.abc import Iterator
from statistics import fmean

from quire.cache.block_pool import OutOfBlocksError
from quire.cache.manager import KVCacheManager
from quire.cache.prefixes import Prefixes
from quire.core.config import CacheConfig
from quire_lab.baselines.buddy_pool import ContiguousManager, num_reserved_tokens
from quire_lab.paper.figures import Comparison, Result, Row, Settings, figure
from quire_lab.paper.plots import Bars, Blocks, Grid, LengthHistogram, Lines, Panel
from quire_lab.paper.runs import MAX, MAX_MODEL_LEN, ORACLE, PAGED, POW2, SYSTEMS
from quire_lab.sim.datasets import workload
from quire_lab.sim.footprint import kv_bytes_per_token
from quire_lab.sim.models import read_model, set_up

GB = 1e9
NUM_LENGTHS = 5000
TABLES_NOTE = "Orange blocks have several owners. A2 is column 2 of A's block table."


@figure("layout", "1", "Memory of an A100-40GB with OPT-13B, and how the KV cache fills", "sharegpt")
def layout(settings: Settings) -> Result:
    """Parts of the device's memory; KV memory taken by ShareGPT requests that are half answered."""
    place, token_bytes = set_up("OPT-13B"), kv_bytes_per_token(read_model("OPT-13B").spec, 2)
    kv_gb = place.num_kv_slots * token_bytes / GB
    parts = {"parameters": 26.0, "KV cache": kv_gb, "other": 40.0 - 26.0 - kv_gb}
    systems, num_blocks = (MAX, POW2, ORACLE, PAGED), place.num_kv_slots // 16
    growth = {system: _growth(system, num_blocks, token_bytes, settings) for system in systems}
    rows: list[Row] = [{"part": part, "GB": size} for part, size in parts.items()]
    rows += [{"system": system, "requests that fit": curve[-1][0]} for system, curve in growth.items()]

    panels: list[Panel] = [
        Bars("", ["A100-40GB"], "GB", {part: [size] for part, size in parts.items()}, is_stacked=True),
        Lines("", "requests, half answered", "KV memory taken, GB", growth),
    ]
    return Result(rows, panels, [Comparison("KV cache, GB", kv_gb, 12.0, 12.0)], [])


def _growth(system: str, num_blocks: int, token_bytes: int, settings: Settings) -> list[tuple[float, float]]:
    """Return (requests, GB taken) as requests are admitted to an empty cache, until the next one does not fit."""
    policy = SYSTEMS[system].memory_policy
    config = CacheConfig(num_blocks, enable_prefix_caching=False, memory_policy=policy)
    cache = KVCacheManager(config, Prefixes(config)) if policy == "paged" else ContiguousManager(config)
    curve = [(0.0, 0.0)]
    for number, item in enumerate(workload("sharegpt", 200, seed=settings.seed, data=settings.data)):
        prompt_len = len(item.prompt_token_ids)
        try:
            cache.create(number, num_reserved=num_reserved_tokens(policy, prompt_len, item.output_len, MAX_MODEL_LEN))
            cache.append(number, prompt_len + item.output_len // 2)
        except OutOfBlocksError:
            break
        curve.append((number + 1.0, (num_blocks - cache.num_free_blocks) * 16 * token_bytes / GB))
    return curve


Step = tuple[str, list[tuple[str, int, int]]]
BEGIN = [("create", 0, 0)]
WALKS: dict[str, list[Step]] = {  # calls of the manager, with a second number where the call takes one
    "one request (6)": [
        ("prompt of 7", [*BEGIN, ("append", 0, 7)]),
        ("first output token", [("append", 0, 1)]), ("second output token", [("append", 0, 1)]),
    ],
    "two requests (7)": [
        ("prompts of 7 and 5", [*BEGIN, ("append", 0, 7), ("create", 1, 0), ("append", 1, 5)]),
        ("two tokens each", [("append", 0, 2), ("append", 1, 2)]), ("A has ended", [("free", 0, 0)]),
    ],
    "two samples (8)": [
        ("prompt of 7, shared", [*BEGIN, ("append", 0, 7), ("fork", 0, 1)]),
        ("A writes: a copy", [("append", 0, 1)]), ("B writes in place", [("append", 1, 1)]),
    ],
    "four beams (9)": [
        ("all of 16 tokens", [
            *BEGIN, ("append", 0, 4), ("fork", 0, 3), *[("append", beam, 4) for beam in (0, 3, 0, 3)],
            ("fork", 0, 1), ("fork", 0, 2), *[("append", beam, 4) for beam in range(4)],
        ]),
        ("twice B, twice C", [("free", 0, 0), ("free", 3, 0), ("fork", 1, 0), ("fork", 2, 3)]),
        ("one token each", [("append", beam, 1) for beam in range(4)]),
    ],
}  # fmt: skip


@figure("tables", "6 to 9", "Block tables step by step, drawn from the cache; blocks of 4 tokens")
def tables(_settings: Settings) -> Result:
    """One request, two requests, samples and beams: the owners of each block, and its filled slots."""
    scenes = {f"{name}\n{caption}": grid for name, steps in WALKS.items() for caption, grid in _walk(steps)}
    rows: list[Row] = [
        {"scene": title.replace("\n", ", "), "block": block, "filled": filled, "references": references, "by": owner}
        for title, grid in scenes.items()
        for block, (filled, references, owner) in grid.items()
    ]

    first, beams = next(iter(scenes.values())), list(scenes.values())[-3:]
    comparisons = [
        Comparison("one request: blocks of a prompt of 7", len(first), 2, 2),
        Comparison("four beams: blocks in use", len(beams[0]), 9, 9),
    ]
    panels = [Blocks(title, grid) for title, grid in scenes.items()]
    return Result(rows, panels, comparisons, [TABLES_NOTE])


def _walk(steps: list[Step]) -> Iterator[tuple[str, Grid]]:
    """Yield what the blocks of a cache are after each step."""
    cache = KVCacheManager(CacheConfig(16, 4, enable_prefix_caching=False))
    for caption, calls in steps:
        for name, seq_id, number in calls:
            getattr(cache, name)(seq_id, *([] if name in {"create", "free"} else [number]))
        yield caption, {
            entry.block: (
                entry.owners[0].filled,
                entry.ref_count,
                " ".join(f"{'ABCD'[owner.holder]}{owner.index}" for owner in entry.owners),
            )
            for entry in cache.view_blocks(0, cache.num_blocks)
            if entry.owners
        }


@figure("lengths", "11", "Lengths of requests", "sharegpt", "alpaca")
def lengths(settings: Settings) -> Result:
    """Tokens of prompts and answers."""
    paper = {"sharegpt": (161.31, 337.99), "alpaca": (19.31, 58.45)}
    found = {
        name: [(len(item.prompt_token_ids), item.output_len) for item in items]
        for name in paper
        for items in [workload(name, NUM_LENGTHS, seed=settings.seed, data=settings.data)]
    }
    means = {name: [fmean(side) for side in zip(*pairs, strict=True)] for name, pairs in found.items()}
    rows: list[Row] = [{"workload": name, "prompt": mean[0], "output": mean[1]} for name, mean in means.items()]
    comparisons = [
        Comparison(f"{name}: mean {side}, tokens", ours, told, told)
        for name in paper
        for side, ours, told in zip(("prompt", "output"), means[name], paper[name], strict=True)
    ]

    panels = [
        LengthHistogram(name, dict(zip(("prompt", "output"), zip(*pairs, strict=True), strict=True)), longest)
        for (name, pairs), longest in zip(found.items(), (2048, 300), strict=True)
    ]
    return Result(rows, panels, comparisons)
