"""Tokens that SnapKV and H2O keep of one document before two questions: what caches with dropped tokens could share.

    python bench/kv_dropping.py --model "$(python tools/real_files.py smollm2)"

SnapKV (Li et al. 2024, section 4): the last tokens of the prompt vote by their attention, the votes are pooled over
neighbours, and each KV head keeps the tokens with the most. H2O (Zhang et al. 2023): all tokens of the prompt vote.
Votes of heads that share keys are added. Documents are pages of docs/, and a question ends each prompt.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import max_pool1d

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
WINDOW, POOLED = 32, 7  # tokens that vote; neighbours that share a vote
BLOCK_SIZE = 16


class Votes(NamedTuple):
    """Attention to the tokens of a document, [num_layers, num_kv_heads, num_tokens]: of the window, of all tokens."""

    window: Tensor
    all: Tensor


class Recorder:
    """Attention of a back end that also adds up to which tokens it attends."""

    def __init__(self, attend: object) -> None:
        self._attend = attend
        self.window, self.all = list[Tensor](), list[Tensor]()

    def __call__(
        self, spec: AttentionSpec, query: Tensor, keys: Tensor, values: Tensor, metadata: AttentionMetadata
    ) -> Tensor:
        num_tokens, _, head_dim = query.shape
        stored = keys.reshape(-1, *keys.shape[2:])[:num_tokens].float()      # blocks are in order, [tokens, heads, dim]
        groups = query.float().view(num_tokens, stored.shape[1], -1, head_dim)
        scores = torch.einsum("qhgd,khd->hgqk", groups * spec.scale, stored)
        future = torch.ones(num_tokens, num_tokens, dtype=torch.bool).triu(1)
        weights = scores.masked_fill_(future, -torch.inf).softmax(-1)
        self.window.append(weights[:, :, -WINDOW:].sum((1, 2)))
        self.all.append(weights.sum((1, 2)))
        found: Tensor = self._attend(spec, query, keys, values, metadata)  # type: ignore[operator]
        return found


def votes(decoder: Decoder, recorder: Recorder, tokens: Sequence[int], num_document: int) -> Votes:
    """Compute a prompt that begins with a document of so many tokens."""
    recorder.window, recorder.all = [], []
    num_tokens = len(tokens)
    num_blocks = -(-num_tokens // BLOCK_SIZE)
    cache = KVCache.allocate(decoder.kv_geometry, num_blocks, BLOCK_SIZE, decoder.back_end)
    places = torch.arange(num_tokens)
    decoder.forward(ForwardBatch(
        torch.tensor(tokens), places, places, torch.tensor([0, num_tokens], dtype=torch.int32),
        torch.tensor([num_tokens], dtype=torch.int32), torch.arange(num_blocks, dtype=torch.int32)[None],
    ), cache)  # fmt: skip
    return Votes(torch.stack(recorder.window)[..., :num_document], torch.stack(recorder.all)[..., :num_document])


def kept(scores: Tensor, budget: float, *, is_pooled: bool) -> Tensor:
    """Return which tokens each head keeps, bool [num_layers, num_kv_heads, num_tokens]."""
    if is_pooled:
        scores = max_pool1d(scores, POOLED, stride=1, padding=POOLED // 2)
    places = scores.topk(int(budget * scores.shape[-1]), dim=-1).indices
    return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, places, True)


def measure(decoder: Decoder, recorder: Recorder, documents: list[list[int]], questions: list[list[int]]) -> None:
    budgets = (0.5, 0.25, 0.125)
    rows: dict[tuple[str, float], list[list[float]]] = {(name, each): [] for name in METHODS for each in budgets}
    for document in documents:
        found = [votes(decoder, recorder, document + question, len(document)) for question in questions]
        for one, other in combinations(found, 2):
            for name, scores in zip(METHODS, ((one.window, other.window), (one.all, other.all)), strict=True):
                for budget in budgets:
                    first, second = (kept(each, budget, is_pooled=name == "SnapKV") for each in scores)
                    common = (first & second).sum() / second.sum()
                    seen, own = ((other.window * each).sum() for each in (first, second))
                    by_some_head = first.flatten(0, 1).any(0).float().mean()
                    in_layer = first.any(1).float().mean()
                    rows[name, budget].append([float(each) for each in (common, seen / own, in_layer, by_some_head)])
    print("kept; of the second question's choice, also the first's (least, most); of the second's attention to its own")
    print("choice, on the first's; tokens that some head of a layer keeps, that some head of any layer keeps")
    for (name, budget), pairs in rows.items():
        columns = np.array(pairs)
        common, low, high = columns[:, 0].mean(), columns[:, 0].min(), columns[:, 0].max()
        seen, layer, some = columns[:, 1:].mean(0)
        shares = f"{common:.1%} ({low:.1%} to {high:.1%}); {seen:.1%}; {layer:.1%}; {some:.1%}"
        print(f"{name} {budget:.1%}: {shares}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder or a GGUF file, with its tokenizer")
    parser.add_argument("--tokens", type=int, default=1024, help="of a document")
    arguments = parser.parse_args()
    back_end = choose_back_end("cpu", "torch")
    recorder = Recorder(back_end.paged_attention)
    source = read_source(arguments.model)
    decoder = load_model(source, dtype="float32", back_end=replace(back_end, paged_attention=recorder))
    tokenizer = load_tokenizer(arguments.model, "required")
    assert tokenizer is not None
    pages = Path(__file__).parents[1] / "docs"
    documents = [tokenizer.encode((pages / name).read_text())[: arguments.tokens] for name in PAGES]
    questions = [tokenizer.encode(f"\n\nQuestion: {each}\nAnswer:") for each in QUESTIONS]
    sizes = [f"{min(map(len, each))} to {max(map(len, each))} tokens" for each in (documents, questions)]
    print(f"{len(documents)} documents of {sizes[0]}, {len(questions)} questions of {sizes[1]}; all pairs of questions")
    with torch.inference_mode():
        measure(decoder, recorder, documents, questions)


if __name__ == "__main__":
    main()
