"""Checks of prompts and parameters of requests for vectors, against the model; they become `Request`s."""

from functools import cached_property, partial
from typing import Any, NamedTuple

from msgspec import structs

from quire.core.checks import check_int, refuse, shown
from quire.core.errors import InvalidRequestError
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
