"""Embeddings and scores of `LLM`: its arguments become requests, and their vectors outputs."""

from array import array
from collections.abc import Callable, Sequence
from dataclasses import replace

from quire.core.checks import one_each
from quire.core.outputs import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    RequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from quire.core.pooling import PoolingParams, PoolingTask
from quire.engine.messages import Ready
from quire.engine.requests.input_processor import InputProcessor, PreparedRequest, Prompt, TokenizedPrompt
from quire.engine.requests.pair_scoring import check_pairs, pair_options, tokenize_pairs
from quire.engine.requests.pooling_inputs import PoolingInputs

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
