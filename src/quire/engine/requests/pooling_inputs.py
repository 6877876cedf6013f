"""Requests for vectors and for scores of pairs: their checks, their prompts, and the outputs of `LLM`.

A reranker reads a pair as one prompt, in the words of Qwen3-Reranker's model card, and its score is the probability of
"yes" against "no"; one with a classifier reads the two texts as its tokenizer joins them. With an embedder the score of
a pair is the cosine of the texts' embeddings.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from quire.core.checks import check_int, check_text, one_each, refuse, shown
from quire.core.errors import InvalidRequestError
from quire.core.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.core.pooling import Pool, PoolerConfig, PoolingParams, PoolingTask
from quire.engine.messages import Ready
from quire.engine.requests.input_processor import (
    ANY_TOKEN,
    CheckedParams,
    InputProcessor,
    PreparedRequest,
    Prompt,
    TokenizedPrompt,
    Truncation,
    truncated,
)
from quire.text.tokenizer import Tokenizer


class CheckedPooling(NamedTuple):
    """Parameters of requests for vectors, checked against the model. Only `PoolingInputs.check` makes them.

    `params`: those of any request, with the priority; nothing is sampled.
    """

    task: Pool
    params: CheckedParams


class PoolingInputs:
    """As `InputProcessor`, for requests for the vector of a prompt."""

    def __init__(self, inputs: InputProcessor, ready: Ready) -> None:
        self.inputs = inputs
        self._found, self._no_pooler_reason = ready.pooler, ready.no_pooler_reason

    @property
    def _tokenizer(self) -> Tokenizer:
        if self.inputs.tokenizer is None:
            raise InvalidRequestError("the model has no tokenizer: scores need one", param="model")
        return self.inputs.tokenizer

    @property
    def max_model_len(self) -> int:
        """The longest prompt, in tokens."""
        return self.inputs.limits.max_model_len

    @cached_property
    def pooler(self) -> PoolerConfig:
        """The pooling of the model. InvalidRequestError, with the reason, for one that gives no vectors."""
        if self._found is None:
            message = f"the model gives no embeddings or scores: {self._no_pooler_reason}"
            raise InvalidRequestError(message, param="model", code="unsupported_parameter")
        if self._found.score_tokens is None:
            return self._found
        return self._with_score_token_ids(self._found, self._found.score_tokens)

    def _with_score_token_ids(self, pooler: PoolerConfig, tokens: tuple[str, str]) -> PoolerConfig:
        no, yes = (self._tokenizer.token_id(token) for token in tokens)
        if no is None or yes is None or max(no, yes) >= self.inputs.vocab_size:
            message = f"classifier_from_token: the tokenizer does not have both tokens {shown(', '.join(tokens))}"
            raise InvalidRequestError(message, param="model")
        return structs.replace(pooler, score_token_ids=(no, yes), score_tokens=None)

    def check(self, params: PoolingParams, task: PoolingTask = "embed", priority: int = 0) -> CheckedPooling:
        """Return parameters for `prepare`; InvalidRequestError if no prompt can have them."""
        if not isinstance(params, PoolingParams):
            raise InvalidRequestError(
                f"pooling_params must be PoolingParams, got {type(params).__name__}", param="pooling_params"
            )
        pool = _pool_for(params, self.pooler, task)
        self.inputs.check_priority(priority)
        return CheckedPooling(pool, CheckedParams(ANY_TOKEN, None, priority, None))

    def prepare(
        self, request_id: int, prompt: TokenizedPrompt, checked: CheckedPooling, client_id: str = "",
        weight: float = 1.0,
    ) -> PreparedRequest:  # fmt: skip
        """Return a request for the vector of a prompt. ContextLengthError if one of this length could never run."""
        self.inputs.limits.check_admissible(len(prompt.token_ids), 0, 1)
        task = checked.task
        if prompt.second_text:
            task = structs.replace(task, second_text=prompt.second_text)
        request = self.inputs.new_request(request_id, prompt, checked.params.params, task)
        request.priority, request.client_id, request.weight = checked.params.priority, client_id, weight
        return PreparedRequest(request, prompt)

    def check_truncation(self, max_tokens: int | None, side: object = None) -> Truncation | None:
        """Return the truncation of prompts that are pooled, by default from the right; None: there is none.

        InvalidRequestError for one that the model could not have.
        """
        if max_tokens is not None:
            check_int("truncate_prompt_tokens", max_tokens, -1, self.max_model_len)
            if max_tokens == 0:
                refuse("truncate_prompt_tokens", max_tokens, "-1 (as many as the model takes) or above 0")
        if side not in (None, "left", "right"):
            refuse("truncation_side", side, "left or right")
        if max_tokens is None:
            return None
        return Truncation(self.max_model_len if max_tokens == -1 else max_tokens, keeps_last=side == "left")

    def tokenize(self, prompt: Prompt, **how: Any) -> TokenizedPrompt:  # noqa: ANN401 (as in `InputProcessor.tokenize`)
        """Return the tokens of a prompt for one vector; a text is lowercased if the model's folder says so."""
        if isinstance(prompt, str):
            prompt = self.cased(prompt)
        elif isinstance(prompt, dict) and isinstance(text := prompt.get("prompt"), str):
            changed: Any = {**prompt, "prompt": self.cased(text)}
            prompt = changed
        return self.inputs.tokenize(prompt, **how)

    def cased(self, text: str) -> str:
        """Return a text as it is tokenized: in lower case, as sentence-transformers makes it, or as it is."""
        return text.lower() if self.pooler.lowers_case else text

    def tokenize_framed(self, before: str, text: str, after: str, truncation: Truncation | None) -> TokenizedPrompt:
        """Return the tokens of a text between two others, each tokenized by itself. It is truncated, they are not."""
        encode = partial(self._tokenizer.encode, add_special_tokens=False)
        head, tail, most = encode(before), encode(after), None if truncation is None else truncation.num_tokens
        if most is not None and most <= len(head) + len(tail):
            message = f"truncate_prompt_tokens must be above {len(head) + len(tail)}, the tokens around a pair"
            raise InvalidRequestError(f"{message}, got {most}", param="truncate_prompt_tokens")
        if most is None and len(text) > self.max_model_len:
            self.inputs.limits.check_length(self._tokenizer.min_num_tokens(text))
        ids = encode(text)
        if truncation is not None and most is not None:
            ids = truncated(ids, truncation._replace(num_tokens=most - len(head) - len(tail)))
        return TokenizedPrompt(before + text + after, self.inputs.check_token_ids([*head, *ids, *tail]))

    def tokenize_pair(self, first: str, second: str, truncation: Truncation | None) -> TokenizedPrompt:
        """Return the tokens of two texts as the tokenizer joins them; of truncated ones the longer loses first."""
        most, keeps_last = (0, False) if truncation is None else truncation
        if most == 0 and len(first) + len(second) > self.max_model_len:
            self.inputs.limits.check_length(sum(map(self._tokenizer.min_num_tokens, (first, second))))
        ids, second_text = self._tokenizer.encode_pair(first, second, most, keeps_last=keeps_last)
        return TokenizedPrompt(None, self.inputs.check_token_ids(ids), second_text=second_text)

    def cut_text(self, text: str, max_tokens: int) -> str:
        """Return the beginning of a text that has at most so many tokens; 0: all of it."""
        return self._tokenizer.cut(text, max_tokens) if max_tokens else text


def _pool_for(params: PoolingParams, pooler: PoolerConfig, task: PoolingTask) -> Pool:
    """Return the task of a request with these parameters. InvalidRequestError for what the model does not give."""
    if params.task is not None and params.task != task:
        raise InvalidRequestError(f"task must be {task} here, got {params.task}", param="task")
    if task == "score" and pooler.score_token_ids is not None:
        return Pool("last", token_ids=pooler.score_token_ids)
    if task == "score" and pooler.has_classifier:
        return Pool(pooler.kind, normalizes=False, token_ids=(0,))
    if pooler.is_reranker:
        raise InvalidRequestError("the model scores pairs of texts: it gives no embeddings", param="model")
    _check_dimensions(params.dimensions, pooler)
    normalizes = pooler.normalizes if params.use_activation is None else params.use_activation
    return Pool(pooler.kind, params.dimensions or 0, normalizes)


def _check_dimensions(dimensions: int | None, pooler: PoolerConfig) -> None:
    if dimensions is None:
        return
    if not pooler.is_matryoshka:
        message = (
            f"dimensions must be unset: the model's config.json does not say that it has Matryoshka embeddings "
            f"(is_matryoshka, matryoshka_dimensions), got {dimensions}"
        )
        raise InvalidRequestError(message, param="dimensions")
    check_int("dimensions", dimensions, 1, pooler.num_dimensions)
    allowed = pooler.matryoshka_dimensions
    if allowed and dimensions not in allowed:
        refuse("dimensions", dimensions, f"one of {', '.join(map(str, allowed))}")


BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
PAIR = "<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
MAX_INSTRUCTION_CHARS = 4096


class PairOptions(NamedTuple):
    """Options of prompts that are made of pairs: checked by `pair_options`. A maximum of 0 tokens is none."""

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


Priorities = int | Sequence[int] | None


class OfflinePooling:
    """One call for vectors. `finish` runs its requests to their end, of which the first one has the id `first_id`."""

    def __init__(
        self, inputs: InputProcessor, ready: Ready, first_id: int,
        finish: Callable[[list[PreparedRequest]], list[RequestOutput]],
    ) -> None:  # fmt: skip
        self._inputs, self._first_id, self._finish = PoolingInputs(inputs, ready), first_id, finish

    def tokenize(self, prompts: Sequence[Prompt], max_tokens: int | None) -> list[TokenizedPrompt]:
        """Return the tokens of prompts, of each the first `max_tokens`; None: all."""
        truncation = self._inputs.check_truncation(max_tokens)
        return [self._inputs.tokenize(prompt, truncation=truncation) for prompt in prompts]

    def embed(
        self, prompts: list[TokenizedPrompt], params: PoolingParams | Sequence[PoolingParams] | None,
        priority: Priorities,
    ) -> list[EmbeddingRequestOutput]:  # fmt: skip
        """Return the embedding of every prompt."""
        return [
            EmbeddingRequestOutput(
                each.request_id, EmbeddingOutput(_vector(each).tolist()), each.prompt_token_ids,
                each.num_cached_tokens, metrics=each.metrics,
            )
            for each in self._finish(self._prepare(prompts, params, "embed", priority))
        ]  # fmt: skip

    def score(
        self, data_1: str | Sequence[str], data_2: str | Sequence[str], params: PoolingParams,
        instruction: str | None, max_tokens: int | None, priority: int | None,
    ) -> list[ScoringRequestOutput]:  # fmt: skip
        """Return the score of every pair."""
        inputs = self._inputs
        queries, documents = ([data] if isinstance(data, str) else list(data) for data in (data_1, data_2))
        check_pairs(queries, documents, ("data_1", "data_2"))
        task: PoolingTask = "score" if inputs.pooler.is_reranker else "embed"
        truncation = inputs.check_truncation(max_tokens)
        activation = params.use_activation if isinstance(params, PoolingParams) else None
        options = pair_options(inputs, truncation, instruction=instruction, use_activation=activation)
        scoring = tokenize_pairs(inputs, queries, documents, options)
        if isinstance(params, PoolingParams) and task == "embed":
            params = replace(params, task=None, use_activation=None)
        outputs = self._finish(self._prepare(scoring.prompts, params, task, priority))
        found = []
        for index, score in enumerate(scoring.scores([_vector(output) for output in outputs])):
            parts = [outputs[number] for number in scoring.prompts_of_pair(index)]
            found.append(
                ScoringRequestOutput(
                    "_".join(part.request_id for part in parts),
                    ScoringOutput(score),
                    [token for part in parts for token in part.prompt_token_ids],
                    sum(part.num_cached_tokens for part in parts),
                )
            )
        return found

    def _prepare(
        self, prompts: list[TokenizedPrompt], params: PoolingParams | Sequence[PoolingParams] | None,
        task: PoolingTask, priority: Priorities,
    ) -> list[PreparedRequest]:  # fmt: skip
        """Check every request and queue none."""
        own = one_each("pooling_params", params, PoolingParams(), len(prompts))
        priorities = one_each("priority", priority, 0, len(prompts))
        return [
            self._inputs.prepare(request_id, prompt, self._inputs.check(each, task, level))
            for request_id, (prompt, each, level) in enumerate(
                zip(prompts, own, priorities, strict=True), self._first_id
            )
        ]


def _vector(output: RequestOutput) -> "array[float]":
    assert output.pooled is not None, "a request for a vector gave none"
    return output.pooled
