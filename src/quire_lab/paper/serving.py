"""The paper's serving experiments: figures 2 and 12 to 19, simulated at its scale."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import chain, pairwise
from math import log
from typing import NamedTuple, get_args

from quire.core.config import PreemptionKind
from quire.core.plan import StepPlan
from quire_lab.paper.figures import Comparison, Result, Row, Settings, figure
from quire_lab.paper.plots import Bars, Lines
from quire_lab.paper.runs import (
    FASTER_TRANSFORMER,
    MAX,
    ORACLE,
    PAGED,
    POW2,
    QUIRE,
    SYSTEMS,
    Point,
    latency_curve,
    map_processes,
    run_all,
)
from quire_lab.sim.models import set_up

ORCAS = (MAX, POW2, ORACLE)
LIMIT_S = 0.5       # normalized latency up to which curves are drawn
LATENCY = "normalized latency, s/token"
SUSTAINED_S = 0.2   # and at which systems are compared: at more, short traces flatter the slower system
MEMORY_NOTE = (
    "Max: by the paper's shares a sequence has 758 tokens on average, weighted by its stay, and 656 here. Outputs that "
    "differ more, with a coefficient of variation of 0.84 instead of 0.76, bring its parts to within 1.1 points."
)
BATCHED_NOTE = (
    "A short trace counts the time in which it fills and drains, where fewer run. vLLM's two bars are what the "
    "constants of the paper's software were fitted to; the rest follows."
)
LATENCY_NOTE = (
    f"Rates are compared at {SUSTAINED_S:g} s per token. FasterTransformer passes that while its batches are far from "
    "full: most of it are answers of a few tokens, which wait for the batch before and the longest of their own."
)
COMPUTE_NOTE = (
    "Paged and Quire are bound by computation here, Oracle by memory: without the 0.3 ms of software per sequence, the "
    "ratio is 2.08 at beam width 6, and 3.72 with 5 examples."
)
CHAT_NOTE = (
    "Of these prompts 40 % fill the 1,024 tokens, in the paper most. Where all do, the Orcas are alike, and paged has "
    "1.47 times their rate: memory holds 12 of its sequences and 7 of theirs."
)
BLOCKS_NOTE = "Each sequence leaves half of its last block empty: with blocks of 128, that is 64 slots of memory."
SWAP_NOTE = "Both come on top of a step that runs anyway. With 20 GB/s to the host instead of 25 the ratio is 1.11."
BLOCK_SIZE = "block size, tokens"
SIZES = (1, 4, 8, 16, 32, 64, 128, 256)
SWAPPED_LEN = 512   # tokens
GRID = [1.3**step for step in range(-16, 1)]  # rates, over the highest


class RatePanel(NamedTuple):
    """A plot of latency against rate, and what the paper says of pairs of systems in it."""

    title: str
    point: Point              # with the highest rate; the system is replaced
    systems: Sequence[str]
    ratios: dict[tuple[str, str], tuple[float, float]]


def rate_figure(panels: Sequence[RatePanel], notes: list[str]) -> Result:
    """Find each system's latency at rising rates; compare the rates that they sustain."""
    tasks = [(panel, system) for panel in panels for system in panel.systems]
    points = [[replace(p.point, system=system, rate=p.point.rate * each) for each in GRID] for p, system in tasks]
    found = map_processes(partial(latency_curve, limit_s=LIMIT_S), points)
    curves = {(panel.title, system): curve for (panel, system), curve in zip(tasks, found, strict=True)}
    rates = {key: sustained_rate(curve) for key, curve in curves.items()}
    rows: list[Row] = [
        {"workload": title, "system": system, f"requests/s at {SUSTAINED_S:g} s/token": rates[title, system],
         "highest rate run": curve[-1][0]}
        for (title, system), curve in curves.items()
    ]  # fmt: skip
    comparisons = [
        Comparison(f"{panel.title}: {one} over {other}", rates[panel.title, one] / rates[panel.title, other], *paper)
        for panel in panels
        for (one, other), paper in panel.ratios.items()
    ]

    plots = [
        Lines(panel.title, "requests per second", LATENCY,
              {system: curves[panel.title, system] for system in panel.systems}, LIMIT_S)
        for panel in panels
    ]  # fmt: skip
    return Result(rows, plots, comparisons, notes)


def sustained_rate(curve: Sequence[tuple[float, float]]) -> float:
    """Return the rate at which the latency passes SUSTAINED_S, between points with latency on a logarithmic axis."""
    for (rate, latency_s), (next_rate, next_s) in pairwise(curve):
        if latency_s <= SUSTAINED_S < next_s:
            share: float = log(SUSTAINED_S / latency_s) / log(next_s / latency_s)
            return rate + share * (next_rate - rate)
    return curve[-1][0] if curve[-1][1] <= SUSTAINED_S else curve[0][0]


@figure("latency", "12", "Normalized latency against request rate", "sharegpt", "alpaca")
def latency(settings: Settings) -> Result:
    """Basic sampling: one answer for each request."""
    ratios = {(PAGED, ORACLE): (1.7, 2.7), (PAGED, MAX): (2.7, 8.0), (PAGED, FASTER_TRANSFORMER): (1.0, 22.0)}
    paper = {"sharegpt": ratios}
    places = [("OPT-13B", "sharegpt", 3.5), ("OPT-13B", "alpaca", 50.0)]
    if settings.full:
        places += [("OPT-66B", "sharegpt", 2.0), ("OPT-66B", "alpaca", 30.0)]
        places += [("OPT-175B", "sharegpt", 5.0), ("OPT-175B", "alpaca", 40.0)]
    panels = [
        RatePanel(f"{model}, {name}", _point(settings, model, name, rate), tuple(SYSTEMS), paper.get(name, {}))
        for model, name, rate in places
    ]
    return rate_figure(panels, [LATENCY_NOTE])


@figure("decoding", "14", "Parallel sampling and beam search, OPT-13B, Alpaca", "alpaca")
def decoding(settings: Settings) -> Result:
    """Several answers for each request, which share the prompt, or beams, which share more."""
    point, pair = _point(settings, "OPT-13B", "alpaca", 50.0), (ORACLE, PAGED)
    panels = [RatePanel("basic", point, pair, {(PAGED, ORACLE): (1.3, 1.3)})]
    for size in (2, 4, 6) if settings.full else (6,):
        point = replace(point, rate=70.0 / size)
        panels.append(RatePanel(f"parallel {size}", replace(point, n=size), pair, {}))
        paper = {(PAGED, ORACLE): (2.3, 2.3)} if size == 6 else {}
        panels.append(RatePanel(f"beam width {size}", replace(point, beam_width=size), pair, paper))
    return rate_figure(panels, [COMPUTE_NOTE])


@figure("prefix", "16", "Shared prefix, LLaMA-13B, translation with examples", "translation-1-shot")
def prefix(settings: Settings) -> Result:
    """Prompts that begin with the same instruction and examples, computed and stored once."""
    panels = [
        RatePanel(f"{shots}-shot, {tokens} tokens", _point(settings, "LLaMA-13B", f"translation-{shots}-shot", 80.0),
              (ORACLE, QUIRE), {(QUIRE, ORACLE): (paper, paper)})
        for shots, tokens, paper in ((1, 80, 1.67), (5, 341, 3.58))
    ]  # fmt: skip
    return rate_figure(panels, [COMPUTE_NOTE])


@figure("chat", "17", "Chatbot, OPT-13B", "chat")
def chat(settings: Settings) -> Result:
    """Long prompts: a whole conversation, cut to the last 1,024 tokens."""
    ratios = {(PAGED, orca): (2.0, 2.0) for orca in ORCAS}
    panel = RatePanel("chat", _point(settings, "OPT-13B", "chat", 2.0), (*ORCAS, PAGED, QUIRE), ratios)
    return rate_figure([panel], [CHAT_NOTE])


@figure("memory", "2", "What the KV cache's memory holds while requests wait, OPT-13B, ShareGPT", "sharegpt")
def memory(settings: Settings) -> Result:
    """More requests than any of the systems can serve."""
    kinds = ("token states", "reserved", "internal", "external and other")
    paper = {
        MAX: (20.4, 13.3, 57.3, 8.9), POW2: (26.8, 17.9, 13.6, 41.6), ORACLE: (38.2, 25.2, 0.0, 36.6), PAGED: (96.3,)
    }  # fmt: skip
    outcomes = run_all([_point(settings, "OPT-13B", "sharegpt", 4.0, system) for system in paper], watches=True)
    shares = [[100 * share for share in outcome.shares] for outcome in outcomes]
    rows: list[Row] = [
        {"system": system} | dict(zip(kinds, each, strict=True)) for system, each in zip(paper, shares, strict=True)
    ]
    comparisons = [
        Comparison(f"{system}: {kind}, %", ours, told, told)
        for (system, numbers), each in zip(paper.items(), shares, strict=True)
        for kind, ours, told in zip(kinds, each, numbers, strict=False)
        if told
    ]
    parts = dict(zip(kinds, zip(*shares, strict=True), strict=True))
    plot = Bars("", list(paper), "share of the KV slots, %", parts, is_stacked=True)
    return Result(rows, [plot], comparisons, [MEMORY_NOTE])


@figure("batched", "13", "Requests that run together, OPT-13B", "sharegpt", "alpaca")
def batched(settings: Settings) -> Result:
    """ShareGPT at 2 requests per second, Alpaca at 30."""
    paper = {("sharegpt", 2.0): (7.00, 9.81, 13.62, 30.42), ("alpaca", 30.0): (7.00, 43.24, 72.75, 132.44)}
    systems = (*ORCAS, PAGED)
    points = [_point(settings, "OPT-13B", *load, system) for load in paper for system in systems]
    found = [outcome.batched_requests for outcome in run_all(points)]
    rows: list[Row] = [
        {"workload": point.workload, "requests/s": point.rate, "system": point.system, "batched requests": mean}
        for point, mean in zip(points, found, strict=True)
    ]
    comparisons = [
        Comparison(f"{point.workload}: {point.system}", mean, told, told)
        for point, mean, told in zip(points, found, chain(*paper.values()), strict=True)
    ]
    plots = [
        Bars(f"{name}, {rate:g} requests/s", systems, "batched requests", {"ours": ours, "the paper": told})
        for ((name, rate), told), ours in zip(paper.items(), (found[:4], found[4:]), strict=True)
    ]
    return Result(rows, plots, comparisons, [BATCHED_NOTE])


@figure("sharing", "15", "KV blocks that sharing saves, OPT-13B", "alpaca", "sharegpt")
def sharing(settings: Settings) -> Result:
    """Parallel samples and beams, over the blocks that they would hold each by itself."""
    paper = {
        ("alpaca", "parallel"): (6.1, 9.8), ("alpaca", "beam"): (37.6, 55.2),
        ("sharegpt", "parallel"): (16.2, 30.5), ("sharegpt", "beam"): (44.3, 66.3),
    }  # fmt: skip
    sizes, rates = (2, 4, 6), {"alpaca": 3.0, "sharegpt": 0.3}
    points = []
    for name, way in paper:
        point = _point(settings, "OPT-13B", name, rates[name])
        if not settings.full:  # as many requests of both: what few of them save says little
            point = replace(point, trace_s=point.trace_s * max(rates.values()) / point.rate)
        points += [replace(point, n=s) if way == "parallel" else replace(point, beam_width=s) for s in sizes]
    saved = [100 * outcome.saved for outcome in run_all(points, watches=True)]
    by_way = {key: saved[3 * i : 3 * i + 3] for i, key in enumerate(paper)}
    rows: list[Row] = [
        {"workload": name, "decoding": way, "answers": size, "saved, %": each}
        for (name, way), found in by_way.items()
        for size, each in zip(sizes, found, strict=True)
    ]
    comparisons = [
        Comparison(f"{name}, {way} {sizes[end]}, %", by_way[name, way][end], told[end], told[end])
        for (name, way), told in paper.items()
        for end in (0, -1)
    ]

    series = {f"{size} answers": [found[i] for found in by_way.values()] for i, size in enumerate(sizes)}
    plot = Bars("", [f"{name},\n{way}" for name, way in by_way], "blocks saved, %", series)
    return Result(rows, [plot], comparisons, [])


@figure("block-size", "18b", "Latency by block size, OPT-13B", "sharegpt", "alpaca")
def block_size(settings: Settings) -> Result:
    """The same loads with small and large blocks: large ones waste what is left of each sequence's last."""
    loads = {"sharegpt": 2.0, "alpaca": 20.0}
    base = {f"{name}, {rate:g} requests/s": _point(settings, "OPT-13B", name, rate) for name, rate in loads.items()}
    found, rows = _by_block_size(base)
    plots = [Lines(title, BLOCK_SIZE, LATENCY, {PAGED: curve}, log2="x") for title, curve in found.items()]
    return Result(rows, plots, [], [BLOCKS_NOTE])


@figure("swap", "19", "Swapping against recomputation by block size, OPT-13B, ShareGPT", "sharegpt")
def swap(settings: Settings) -> Result:
    """Cost of one preempted sequence on top of steps that run anyway, and latency under many preemptions."""
    point = _point(settings, "OPT-13B", "sharegpt", 2.2)
    base = {kind: replace(point, recovery=kind) for kind in get_args(PreemptionKind)}
    found, rows = _by_block_size(base)
    costs = {size: set_up("OPT-13B").cost_model(size) for size in SIZES}
    again = StepPlan(rows=[0], starts=[0], counts=[SWAPPED_LEN], sample_rows=[0], sample_tokens=[SWAPPED_LEN - 1])
    once_ms = {
        "recompute": [(size, 1e3 * (cost.step_s(again) - cost.step_s(StepPlan()))) for size, cost in costs.items()],
        "swap": [(size, 2e3 * cost.swap_s(SWAPPED_LEN // size)) for size, cost in costs.items()],
    }
    rows += [
        {"way": way, "block size": size, f"ms for {SWAPPED_LEN} tokens": ms}
        for way, times_ms in once_ms.items()
        for size, ms in times_ms
    ]
    most = once_ms["recompute"][0][1] / min(ms for _, ms in once_ms["swap"])
    plots = [
        Lines(f"{SWAPPED_LEN} tokens, out and in", BLOCK_SIZE, "milliseconds", once_ms, log2="xy"),
        Lines("2.2 requests/s", BLOCK_SIZE, LATENCY, found, log2="x"),
    ]
    comparison = Comparison("recomputation over the cheapest swap, at most", most, 0.0, 1.2)
    return Result(rows, plots, [comparison], [SWAP_NOTE])


def _by_block_size(base: Mapping[str, Point]) -> tuple[dict[str, list[tuple[float, float]]], list[Row]]:
    """Return (block size, latency) of each point at all block sizes, and the rows of a table."""
    points = [replace(point, block_size=size) for point in base.values() for size in SIZES]
    outcomes = run_all(points)
    rows: list[Row] = [
        {"workload": point.workload, "way": point.recovery or "", "block size": point.block_size,
         "latency, s/token": outcome.latency_s, "preemptions": outcome.num_preemptions}
        for point, outcome in zip(points, outcomes, strict=True)
    ]  # fmt: skip
    found = iter(outcomes)
    return {name: [(size, next(found).latency_s) for size in SIZES] for name in base}, rows


def _point(settings: Settings, model: str, name: str, rate: float, system: str = PAGED) -> Point:
    trace_s = set_up(model).trace_s if settings.full else settings.trace_s
    return Point(system, model, name, rate, trace_s, seed=settings.seed, data=settings.data)
