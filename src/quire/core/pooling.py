"""Pooling: tasks of requests, and how a model's hidden states become one vector per prompt.

A task is one record of a closed union. `beam_params` matches all kinds and ends in `assert_never`, so that the type
checker reports it when a kind is added; code that treats one kind apart tests for it with `isinstance`.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, assert_never

import msgspec

from quire.core.checks import check_bool, check_int, refuse
from quire.core.sampling_params import BeamSearchParams

PoolingKind = Literal["last", "mean", "cls"]  # the hidden state of the last token, their mean, that of the first token
PoolingTask = Literal["embed", "score"]
Runner = Literal["auto", "generate", "pooling"]  # what a model gives; auto: as its folder says
TASKS: tuple[PoolingTask, ...] = ("embed", "score")


class PoolerConfig(msgspec.Struct, frozen=True, array_like=True):
    """Pooling of a model, as its folder says. Hidden states are those that the output head reads.

    `score_token_ids`: of a reranker, the tokens for no and yes: their logits behind a prompt are its score, and it
    gives no embeddings. `score_tokens`: the same as texts, which the tokenizer has to look up. `has_classifier`: the
    reranker is an encoder with a classifier of one label, which reads a pair as two texts.
    """

    kind: PoolingKind
    num_dimensions: int                       # length of a hidden state
    normalizes: bool = True                   # to length 1, unless a request says otherwise
    is_matryoshka: bool = False               # the first dimensions of an embedding are an embedding, too
    matryoshka_dimensions: tuple[int, ...] = ()  # the only numbers of them; empty: any
    score_token_ids: tuple[int, int] | None = None
    score_tokens: tuple[str, str] | None = None
    has_classifier: bool = False
    is_probability: bool = True               # a reranker's score, unless a request says otherwise; else a logit
    lowers_case: bool = False                 # texts are lowercased before they are tokenized

    @property
    def is_reranker(self) -> bool:
        """True if it scores pairs by itself."""
        return self.score_token_ids is not None or self.score_tokens is not None or self.has_classifier

    def __str__(self) -> str:
        """Describe the pooling in words, for the banner and for `quire plan`."""
        if self.has_classifier:
            return "scores of pairs, by a classifier"
        if self.is_reranker:
            return "scores of pairs, by the logits of two tokens"
        end = ", normalized" if self.normalizes else ""
        return f"{self.kind} of {self.num_dimensions} dimensions{end}"


@dataclass(frozen=True, slots=True)
class FoundPooler:
    """The pooling of a model; or None, with the reason, as an error continues it.

    `max_seq_length`: tokens of the longest text that the folder names, in place of the model's positions.
    """

    config: PoolerConfig | None
    reason: str = ""
    max_seq_length: int | None = None


class Pool(msgspec.Struct, tag="pool", array_like=True, frozen=True):
    """The task of a request for the vector of its prompt; no token is sampled.

    With `token_ids` the vector is the logits of these tokens, or of these labels of a classifier, for the pooled hidden
    states; else it is the pooled hidden states, of which the first `num_dimensions` are kept
    (0: all), then normalized if asked for. `second_text`: where the second text of a pair begins; 0: nowhere.
    """

    kind: PoolingKind
    num_dimensions: int = 0
    normalizes: bool = True
    token_ids: tuple[int, ...] = ()
    second_text: int = 0

    @property
    def reads_all_states(self) -> bool:
        """True if the hidden states of the whole prompt are needed: none may come from the prefix cache."""
        return self.kind != "last"


@dataclass(frozen=True, slots=True)
class PoolingParams:
    """Parameters of a request for a vector, as in vLLM. A value out of range raises ValueError that names the field.

    task: "embed" or "score"; None: what the model gives. dimensions: how many of an embedding are kept, before it is
    normalized again; of models with Matryoshka embeddings alone. use_activation: whether an embedding is normalized,
    and a score mapped to 0 to 1; None: as the model says.
    """

    dimensions: int | None = None
    use_activation: bool | None = None
    task: PoolingTask | None = None

    def __post_init__(self) -> None:
        if self.dimensions is not None:
            check_int("dimensions", self.dimensions, 1)
        if self.use_activation is not None:
            check_bool("use_activation", self.use_activation)
        if self.task is not None and self.task not in TASKS:
            refuse("task", self.task, " or ".join(TASKS))


MAX_PINNED_PREFIXES = 64  # prefixes that are still being computed count too


class Generate(msgspec.Struct, tag="generate", array_like=True, frozen=True):
    """Sample n answers."""


class BeamTask(msgspec.Struct, tag="beam_search", array_like=True, frozen=True):
    """Search the best answers; the sequences of the request are beams."""

    params: BeamSearchParams


class PinTask(msgspec.Struct, tag="pin", array_like=True, frozen=True):
    """Compute the prompt and keep its blocks under the request's id; the output is ignored."""


Task = Generate | BeamTask | PinTask | Pool

GENERATE = Generate()


def beam_params(task: Task) -> BeamSearchParams | None:
    """Return the parameters of a beam search, None for other tasks."""
    match task:
        case BeamTask(params):
            return params
        case Generate() | PinTask() | Pool():
            return None
        case _:
            assert_never(task)


def pool_of(task: Task) -> Pool | None:
    """Return the pooling of a request for a vector, None for other tasks."""
    return task if isinstance(task, Pool) else None


class Scope(NamedTuple):
    """Limit of prefix sharing: requests of different scopes never share keys and values."""

    salt: str | None = None     # cache_salt of the client
    adapter: str | None = None  # digest of the adapter that changes keys and values; None: the model alone


NO_SCOPE = Scope()
