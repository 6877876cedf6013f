"""Scores of pairs of texts: their prompts, and from the vectors of these the scores.

A reranker reads a pair as one prompt, in the words of Qwen3-Reranker's model card, and its score is the probability of
"yes" against "no"; one with a classifier reads the two texts as its tokenizer joins them. With an embedder the score of
a pair is the cosine of the texts' embeddings.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quire.core.checks import check_int, check_text
from quire.core.errors import InvalidRequestError
from quire.engine.requests.input_processor import TokenizedPrompt, Truncation
from quire.engine.requests.pooling_inputs import PoolingInputs

BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MAX_INSTRUCTION_CHARS = 4096


class PairOptions(NamedTuple):
    """How pairs become prompts: checked by `pair_options`. A maximum of 0 tokens is none."""

    truncation: Truncation | None = None
    instruction: str = INSTRUCTION
    max_query_tokens: int = 0
    max_document_tokens: int = 0
    is_probability: bool = True  # a reranker's score; else the logit, or the difference of the two


class Scoring(NamedTuple):
    """The prompts of a call for scores. With `num_queries` they are the queries, then the documents; else pairs."""

    prompts: list[TokenizedPrompt]
    num_queries: int
    is_probability: bool

    def scores(self, vectors: Sequence["array[float]"]) -> list[float]:
        """Return the score of each pair, from the vector of each prompt."""
        if not self.num_queries:
            return [_pair_score(vector, is_probability=self.is_probability) for vector in vectors]
        found = [np.asarray(vector, dtype=np.float64) for vector in vectors]
        queries, documents = found[: self.num_queries], found[self.num_queries :]
        if len(queries) == 1:
            queries = queries * len(documents)
        return [_cosine(query, document) for query, document in zip(queries, documents, strict=True)]

    def prompts_of_pair(self, index: int) -> list[int]:
        """Return the numbers of the prompts that a pair consists of."""
        if not self.num_queries:
            return [index]
        return [0 if self.num_queries == 1 else index, self.num_queries + index]


def pair_options(
    inputs: PoolingInputs, truncation: Truncation | None, *, instruction: object = None,
    max_tokens_per_query: object = 0, max_tokens_per_doc: object = 0, use_activation: bool | None = None,
) -> PairOptions:  # fmt: skip
    """Check the options of pairs. InvalidRequestError names the field."""
    longest = inputs.max_model_len - 1
    text = INSTRUCTION
    if instruction is not None:
        text = check_text("instruction", instruction, MAX_INSTRUCTION_CHARS)
        if inputs.pooler.has_classifier:
            raise InvalidRequestError("the model scores pairs without an instruction", param="instruction")
    return PairOptions(
        truncation,
        text,
        check_int("max_tokens_per_query", max_tokens_per_query, 0, longest),
        check_int("max_tokens_per_doc", max_tokens_per_doc, 0, longest),
        inputs.pooler.is_probability if use_activation is None else use_activation,
    )


def check_pairs(queries: Sequence[str], documents: Sequence[str], names: tuple[str, str]) -> None:
    """Raise InvalidRequestError unless there is one query for all documents, or one each. `names`: of the fields."""
    for name, texts in zip(names, (queries, documents), strict=True):
        if not texts:
            raise InvalidRequestError(f"{name} is empty: it must have at least one text", param=name)
        if not all(isinstance(text, str) for text in texts):
            raise InvalidRequestError(f"{name} must be a text or a list of texts", param=name)
    if len(queries) not in (1, len(documents)):
        message = f"{names[0]} must be one text or as many as {names[1]}: got {len(queries)} for {len(documents)}"
        raise InvalidRequestError(message, param=names[0])


def tokenize_pairs(
    inputs: PoolingInputs, queries: Sequence[str], documents: Sequence[str], options: PairOptions
) -> Scoring:
    """Return the prompts of pairs that `check_pairs` has passed. InvalidRequestError as `InputProcessor.tokenize`."""
    queries = [inputs.cut_text(inputs.cased(text), options.max_query_tokens) for text in queries]
    documents = [inputs.cut_text(inputs.cased(text), options.max_document_tokens) for text in documents]
    if not inputs.pooler.is_reranker:
        prompts = [inputs.inputs.tokenize(text, truncation=options.truncation) for text in (*queries, *documents)]
        return Scoring(prompts, len(queries), options.is_probability)
    if len(queries) == 1:
        queries = queries * len(documents)
    if inputs.pooler.has_classifier:
        pairs = zip(queries, documents, strict=True)
        return Scoring([inputs.tokenize_pair(*pair, options.truncation) for pair in pairs], 0, options.is_probability)
    prompts = [
        inputs.tokenize_framed(
            BEFORE, PAIR.format(instruction=options.instruction, query=query, document=document), AFTER,
            options.truncation,
        )
        for query, document in zip(queries, documents, strict=True)
    ]  # fmt: skip
    return Scoring(prompts, 0, options.is_probability)


def _pair_score(logits: Sequence[float], *, is_probability: bool) -> float:
    """Return the softmax of the logits of no and yes, for yes, or the sigmoid of the only one."""
    difference = logits[-1] - (logits[0] if len(logits) > 1 else 0.0)
    if not is_probability:
        return difference
    if difference >= 0:
        return 1 / (1 + math.exp(-difference))
    return math.exp(difference) / (1 + math.exp(difference))


def _cosine(a: NDArray[np.float64], b: NDArray[np.float64]) -> float:
    lengths = math.sqrt(float(a @ a) * float(b @ b))
    return float(a @ b) / lengths if lengths > 0 else 0.0
