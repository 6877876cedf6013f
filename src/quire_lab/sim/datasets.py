"""Workloads by name: lengths and arrivals of real data, of the package or of a folder with files of the same names.

Where a folder lacks a file, a log-normal fit of the lengths stands in, and the arrivals have the trace's rate. A fit
has the mean and the standard deviation of the prompts and of the outputs, each by itself; that of ShareGPT and Alpaca
the means that Kwon et al. 2023, section 6.1, give. Prompts are random tokens; those of a translation begin with the
same instruction and examples. A mix draws each request from one of several: `sharegpt:3,alpaca:1`.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire.core.errors import ConfigError
from quire_lab.sim.workloads import (
    NO_LIMIT,
    Lengths,
    TraceSlice,
    WorkItem,
    fitting,
    is_trace,
    poisson_arrivals,
    read_columns,
    read_lengths,
    token_id_workload,
    trace_arrivals,
    trace_workload,
    with_random_prompts,
)

DATA_FOLDER = Path(__file__).with_name("data")  # README.md there has sources and licences
VOCAB_SIZE = 32_000
CHAT_PROMPT, CHAT_OUTPUT = 1024, 1024  # tokens; Kwon et al. 2023, section 6.5


@dataclass(frozen=True, slots=True)
class Fit:
    """Log-normal lengths: their mean, and the standard deviation of their logarithms."""

    mean: float
    sigma: float

    def draw(self, generator: np.random.Generator, count: int) -> NDArray[np.int64]:
        """Return lengths of at least 1."""
        drawn = generator.lognormal(math.log(self.mean) - self.sigma**2 / 2, self.sigma, count)
        return np.maximum(drawn.round(), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Dataset:
    """Source of lengths, and the workload made of them."""

    file: str
    prompt: Fit
    output: Fit
    read: Callable[[Path], list[Lengths]] = read_lengths
    max_total_len: int = NO_LIMIT         # longer ones are left out
    prefix_len: int = 0                   # tokens that all prompts begin with, besides their own
    cut: Lengths | None = None            # longest prompt and output; what is longer is cut
    rate: float | None = None             # a trace's own, requests per second


def _alpaca(path: Path) -> list[Lengths]:
    """Instruction and input, with the token that OPT puts before every text."""
    return [(prompt + 1, output) for prompt, output in read_columns(path, prompt_plain_tokens=int, output_tokens=int)]


def _chat_rounds(path: Path) -> list[Lengths]:
    """Workload of conversations: every answer is requested with the whole conversation before it."""
    rounds = []
    turns = read_columns(path, conversation=int, tokens=int, role=str)
    for _, turns_of_one in groupby(turns, key=lambda turn: turn[0]):
        num_said = 0
        for _, num_tokens, role in turns_of_one:
            if role == "gpt" and num_said:
                rounds.append((num_said, num_tokens))
            num_said += num_tokens
    return rounds


_CHAT = Dataset(
    "sharegpt_sample_turns.csv.gz", Fit(886.5, 0.670), Fit(324.2, 0.734), _chat_rounds, cut=(CHAT_PROMPT, CHAT_OUTPUT)
)
_WMT = Dataset("wmt16_en_de_lengths.csv.gz", Fit(26.8, 0.535), Fit(40.2, 0.544))
DATASETS = {
    "alpaca": Dataset("alpaca_lengths.csv.gz", Fit(19.31, 0.622), Fit(58.45, 0.828), _alpaca),
    "sharegpt": Dataset(
        "sharegpt_sample_turns.csv.gz", Fit(161.31, 1.265), Fit(337.99, 0.688), max_total_len=2048
    ),
    "chat": _CHAT,
    "translation-1-shot": replace(_WMT, prefix_len=80),
    "translation-5-shot": replace(_WMT, prefix_len=341),
    "azure-code": Dataset("azure_llm_2023_code.csv.gz", Fit(2047.8, 0.811), Fit(27.9, 1.313), rate=2.57),
    "azure-conv": Dataset("azure_llm_2023_conv.csv.gz", Fit(1154.7, 0.808), Fit(211.1, 0.683), rate=5.53),
    "mooncake": Dataset("mooncake_conversation.jsonl.gz", Fit(13066.0, 0.997), Fit(346.1, 0.651), rate=3.14),
    "mooncake-synthetic": Dataset(
        "mooncake_synthetic.jsonl.gz", Fit(15325.5, 0.944), Fit(149.1, 0.942), rate=3.91
    ),
    "arxiv": Dataset("arxiv_summarization_lengths.csv.gz", Fit(2588.1, 0.354), Fit(291.4, 1.209)),
    "creation": Dataset("creation_lengths.csv.gz", Fit(307.7, 0.294), Fit(1144.3, 0.371)),
}


def named_file(name: str) -> Path | None:
    """Return the file at this path, or the package's of this name; None if there is neither."""
    paths = [Path(name), *([DATA_FOLDER / name] if name == Path(name).name else [])]
    return next((path for path in paths if path.is_file()), None)


def is_dataset(name: str) -> bool:
    """Return whether the name is that of a data set, or of a mix of data sets."""
    return all(part.strip().partition(":")[0] in DATASETS for part in name.split(","))


def absent_files(name: str, data: Path) -> list[str]:
    """Return the files of a workload's data sets that the folder lacks, so that fits stand in."""
    if named_file(name) is not None:
        return []
    files = dict.fromkeys(DATASETS[part].file for part in _shares(name))
    return [file for file in files if not (data / file).is_file()]


def fit_note(names: Iterable[str], data: Path) -> str:
    """Return `lengths: log-normal fit (no FILE in FOLDER)` if a fit stands in for one of the workloads, else ""."""
    files = list(dict.fromkeys(file for name in names for file in absent_files(name, data)))
    return f"lengths: log-normal fit (no {' and no '.join(files)} in {data})" if files else ""


def workload(
    name: str,
    count: int,
    *,
    seed: int = 0,
    data: Path = DATA_FOLDER,
    vocab_size: int = VOCAB_SIZE,
    max_total_len: int = NO_LIMIT,
) -> list[WorkItem]:
    """Return `count` requests of a data set, a mix of several, or a file; those of a trace with their own times.

    A file is named by its path, or one of the package by its file name. A data set without times may be drawn from
    several times over; a trace or a file may have fewer. Raises ConfigError for an unknown name, or a file that does
    not fit.
    """
    path = named_file(name)
    if path is not None:
        return _of_file(path, count, seed, vocab_size, max_total_len)
    shares = _shares(name)
    if len(shares) == 1:
        return _of_dataset(DATASETS[next(iter(shares))], count, seed, data, vocab_size, max_total_len)
    generator, weights = np.random.default_rng(seed), np.array(list(shares.values()))
    chosen = generator.choice(len(shares), size=count, p=weights / weights.sum())
    parts = {
        i: iter(_of_dataset(DATASETS[part], int((chosen == i).sum()), seed + i, data, vocab_size, max_total_len))
        for i, part in enumerate(shares)
        if i in chosen
    }
    drawn = (next(parts[i], None) for i in chosen)
    return [replace(item, arrival_s=None) for item in drawn if item is not None]


def _shares(name: str) -> dict[str, float]:
    """Return the weights of a mix by data set; a name alone weighs 1."""
    shares = {}
    for part in name.split(","):
        dataset, _, weight = part.strip().partition(":")
        if dataset not in DATASETS:
            raise ConfigError(f"workload must be one of {', '.join(DATASETS)}, a mix of them, or a file, got {name!r}")
        try:
            shares[dataset] = float(weight or 1)
        except ValueError:
            shares[dataset] = 0.0
        if not 0 < shares[dataset] < math.inf:
            raise ConfigError(f"workload {name!r}: the weight of {dataset} must be a number above 0, got {weight!r}")
    return shares


def _of_file(path: Path, count: int, seed: int, vocab_size: int, limit: int) -> list[WorkItem]:
    if is_trace(path):
        return trace_workload(path, TraceSlice(count, limit), vocab_size, seed)
    if path.suffix == ".json":
        return token_id_workload(path, None, count)
    return with_random_prompts(_sample(read_lengths(path), count, limit, path.name, seed), vocab_size, seed)


def _of_dataset(
    dataset: Dataset, count: int, seed: int, data: Path, vocab_size: int, limit: int
) -> list[WorkItem]:
    """Return requests of one data set; those of a trace with its times, or for a fit Poisson arrivals at its rate."""
    path, limit = data / dataset.file, min(limit, dataset.max_total_len)
    has_file = path.is_file()
    if dataset.rate is not None and has_file:
        return trace_workload(path, TraceSlice(count, limit), vocab_size, seed)
    lengths = dataset.read(path) if has_file else _fitted(dataset, count, limit, seed)
    if dataset.cut is not None:
        lengths = [(min(prompt, dataset.cut[0]), min(output, dataset.cut[1])) for prompt, output in lengths]
    lengths = _sample(lengths, count, limit - dataset.prefix_len, dataset.file, seed)
    items = with_random_prompts(lengths, vocab_size, seed)
    if dataset.rate is not None:
        times_s = poisson_arrivals(count, dataset.rate, 1.0, seed)
        return [replace(item, arrival_s=time_s) for item, time_s in zip(items, times_s, strict=True)]
    if not dataset.prefix_len:
        return items
    prefix = np.random.default_rng(seed + 1).integers(vocab_size, size=dataset.prefix_len).tolist()
    return [replace(item, prompt_token_ids=prefix + item.prompt_token_ids) for item in items]


def _fitted(dataset: Dataset, count: int, limit: int, seed: int) -> list[Lengths]:
    """Return lengths by the fit, enough that some are left when the longest are dropped."""
    generator, count = np.random.default_rng(seed), 64 + 4 * count
    prompts, outputs = dataset.prompt.draw(generator, count), dataset.output.draw(generator, count)
    return list(zip(prompts.tolist(), outputs.tolist(), strict=True))


def _sample(lengths: Iterable[Lengths], count: int, limit: int, name: str, seed: int) -> list[Lengths]:
    """Return `count` of those that fit, each as likely as any other, none twice before all were taken."""
    lengths = fitting(lengths, name, limit)
    generator, order = np.random.default_rng(seed), list[int]()
    while len(order) < count:
        order.extend(generator.permutation(len(lengths)).tolist())
    return [lengths[i] for i in order[:count]]


def due_times(items: list[WorkItem], rate: float | None, seed: int) -> list[float]:
    """Return Poisson arrivals at `rate`, or the trace's own times. ConfigError if there is neither."""
    if rate is not None:
        if not 0 < rate < math.inf:
            raise ConfigError(f"rate must be above 0 requests per second, got {rate}")
        return poisson_arrivals(len(items), rate, 1.0, seed)
    return trace_arrivals(items)
