"""Tokens that SnapKV and H2O keep of one document before two questions: what caches with dropped tokens could share.

    python bench/kv_dropping.py --model "$(python tools/real_files.py smollm2)"

SnapKV (Li et al. 2024, section 4): the last tokens of the prompt vote by their attention, the votes are pooled over
neighbours, and each KV head keeps the tokens with the most. H2O (Zhang et al. 2023): all tokens of the prompt vote.
Votes of heads that share keys are added. Documents are pages of docs/, and a question ends each prompt.

Beside them, how much of the attention to the document is left: StreamingLLM (Xiao et al. 2024) keeps its first tokens
and its last ones; Quest (Tang et al. 2024) keeps all, and a head reads the pages with the highest bound of a score, by
the least and the greatest of each element of their keys, here for the last token of the prompt.
"""

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from quire.core.arrays import Array
from quire.engine.formats import load_tokenizer, read_source
from quire.kernels.choice import choose_back_end
from quire.kernels.paged_attention import AttentionMetadata, AttentionSpec
from quire.model.decoder import Decoder
from quire.model.kv_cache import KVCache
from quire.model.language_model import ForwardBatch
from quire.model.loader import load_model

PAGES = ("prefix-caching.md", "scaling.md", "speculation.md", "security.md", "quantization.md", "structured-output.md")
QUESTIONS = (
    "What is this text about, in one sentence?",
    "Which settings does it name, and what are their defaults?",
    "Which numbers are measured, and on which machine?",
    "What does it advise against, and why?",
)
METHODS = ("SnapKV", "H2O")
BUDGETS = (0.5, 0.25, 0.125)
NUM_SINKS = 4           # first tokens that StreamingLLM keeps
WINDOW, POOLED = 32, 7  # tokens that vote; neighbours that share a vote
BLOCK_SIZE = 16


class Votes(NamedTuple):
    """Attention to the tokens of a document, [num_layers, num_kv_heads, num_tokens]: of the window, of all tokens.

    Of the last token to its pages, and the bounds of their scores: [num_layers, num_heads, num_pages].
    """

    window: Array
    all: Array
    pages: Array
    bounds: Array


class Recorder:
    """Attention of the C++ back end in float32 that also adds up to which tokens it attends."""

    def __init__(self, attend: Callable[..., Array]) -> None:
        self._attend = attend
        self.window, self.all, self.pages, self.bounds = (list[Array]() for _ in range(4))

    def __call__(
        self, spec: AttentionSpec, query: Array, keys: Array, values: Array, metadata: AttentionMetadata
    ) -> Array:
        num_tokens, _, head_dim = query.shape
        stored = keys.transpose(1, 2, 0, 3).reshape(keys.shape[1], head_dim, -1)[:, :, :num_tokens]  # blocks in order
        groups = query.reshape(num_tokens, len(stored), -1, head_dim)
        of_window, of_all = (np.zeros((len(stored), num_tokens), np.float32) for _ in range(2))
        num_pages = num_tokens // BLOCK_SIZE
        pages, bounds = list[Array](), list[Array]()
        future = np.triu(np.full((num_tokens, num_tokens), -np.inf, np.float32), 1)
        for head, own in enumerate(stored):
            paged = own[:, : num_pages * BLOCK_SIZE].reshape(head_dim, num_pages, BLOCK_SIZE)
            for number in range(groups.shape[2]):
                scores = groups[:, head, number] @ own * np.float32(spec.scale) + future
                weights = np.exp(scores - scores.max(-1, keepdims=True))
                weights /= weights.sum(-1, keepdims=True)
                of_window[head] += weights[-WINDOW:].sum(0)
                of_all[head] += weights.sum(0)
                last = groups[-1, head, number][:, None]
                bounds.append(np.maximum(last * paged.min(-1), last * paged.max(-1)).sum(0))
                pages.append(weights[-1, : num_pages * BLOCK_SIZE].reshape(num_pages, BLOCK_SIZE).sum(-1))
        self.pages.append(np.stack(pages))
        self.bounds.append(np.stack(bounds))
        self.window.append(of_window)
        self.all.append(of_all)
        return self._attend(spec, query, keys, values, metadata)


def votes(decoder: Decoder, recorder: Recorder, tokens: Sequence[int], num_document: int) -> Votes:
    """Compute a prompt that begins with a document of so many tokens."""
    recorder.window, recorder.all, recorder.pages, recorder.bounds = [], [], [], []
    num_tokens, num_blocks = len(tokens), -(-len(tokens) // BLOCK_SIZE)
    cache = KVCache.allocate(decoder.kv_geometry, num_blocks, BLOCK_SIZE, decoder.back_end)
    places = np.arange(num_tokens)
    decoder.forward(ForwardBatch(
        np.array(tokens), places, places, np.array([0, num_tokens], np.int32), np.array([num_tokens], np.int32),
        np.arange(num_blocks, dtype=np.int32)[None],
    ), cache)  # fmt: skip
    pages, bounds = (np.stack(each)[..., : num_document // BLOCK_SIZE] for each in (recorder.pages, recorder.bounds))
    window, of_all = (np.stack(each)[..., :num_document] for each in (recorder.window, recorder.all))
    return Votes(window, of_all, pages, bounds)


def kept(scores: Array, budget: float, *, is_pooled: bool) -> Array:
    """Return which tokens each head keeps, bool [num_layers, num_kv_heads, num_tokens]."""
    if is_pooled:
        padded = np.pad(scores, ((0, 0), (0, 0), (POOLED // 2,) * 2))
        scores = np.lib.stride_tricks.sliding_window_view(padded, POOLED, axis=-1).max(-1)
    places = np.argsort(-scores, axis=-1, kind="stable")[..., : int(budget * scores.shape[-1])]
    found = np.zeros(scores.shape, bool)
    np.put_along_axis(found, places, True, axis=-1)
    return found


def measure(decoder: Decoder, recorder: Recorder, documents: list[list[int]], questions: list[list[int]]) -> None:
    rows: dict[tuple[str, float], list[list[float]]] = {(name, each): [] for name in METHODS for each in BUDGETS}
    left: dict[tuple[str, float], list[float]] = {each: [] for each in product(("StreamingLLM", "Quest"), BUDGETS)}
    for document in documents:
        found = [votes(decoder, recorder, document + question, len(document)) for question in questions]
        for each, budget in product(found, BUDGETS):
            num_last = int(budget * each.window.shape[-1]) - NUM_SINKS
            of_sinks, of_last = each.window[..., :NUM_SINKS].sum(), each.window[..., -num_last:].sum()
            left["StreamingLLM", budget].append(float((of_sinks + of_last) / each.window.sum()))
            read = kept(each.bounds, budget, is_pooled=False)
            left["Quest", budget].append(float((each.pages * read).sum() / each.pages.sum()))
        for one, other in combinations(found, 2):
            for name, scores in zip(METHODS, ((one.window, other.window), (one.all, other.all)), strict=True):
                for budget in BUDGETS:
                    first, second = (kept(each, budget, is_pooled=name == "SnapKV") for each in scores)
                    common = (first & second).sum() / second.sum()
                    seen, own = ((other.window * each).sum() for each in (first, second))
                    by_some_head = first.any((0, 1)).mean()
                    in_layer = first.any(1).mean()
                    rows[name, budget].append([float(each) for each in (common, seen / own, in_layer, by_some_head)])
    print("kept; of the second question's choice, also the first's (least, most); of the second's attention to its own")
    print("choice, on the first's; tokens that some head of a layer keeps, that some head of any layer keeps")
    for (name, budget), pairs in rows.items():
        columns = np.array(pairs)
        common, low, high = columns[:, 0].mean(), columns[:, 0].min(), columns[:, 0].max()
        seen, layer, some = columns[:, 1:].mean(0)
        shares = f"{common:.1%} ({low:.1%} to {high:.1%}); {seen:.1%}; {layer:.1%}; {some:.1%}"
        print(f"{name} {budget:.1%}: {shares}")
    print("read; of the attention to the document, on what is read (least, most)")
    for (name, budget), parts in left.items():
        print(f"{name} {budget:.1%}: {statistics.mean(parts):.1%} ({min(parts):.1%} to {max(parts):.1%})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file, with its tokenizer")
    parser.add_argument("--tokens", type=int, default=1024, help="of a document")
    arguments = parser.parse_args()
    back_end = choose_back_end("cpu", "cpp")
    recorder: Any = Recorder(back_end.paged_attention)
    unfused = replace(back_end, paged_attention=recorder, fuse=lambda program: program)
    decoder = load_model(read_source(arguments.model), dtype="float32", back_end=unfused)
    tokenizer = load_tokenizer(arguments.model, "required")
    assert tokenizer is not None
    pages = Path(__file__).parents[1] / "docs"
    documents = [tokenizer.encode((pages / name).read_text())[: arguments.tokens] for name in PAGES]
    questions = [tokenizer.encode(f"\n\nQuestion: {each}\nAnswer:") for each in QUESTIONS]
    sizes = [f"{min(map(len, each))} to {max(map(len, each))} tokens" for each in (documents, questions)]
    print(f"{len(documents)} documents of {sizes[0]}, {len(questions)} questions of {sizes[1]}; all pairs of questions")
    measure(decoder, recorder, documents, questions)


if __name__ == "__main__":
    main()
