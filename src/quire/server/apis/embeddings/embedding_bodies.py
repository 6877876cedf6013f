"""Bodies of requests for embeddings and scores, in OpenAI's, vLLM's, Jina's and Cohere's names."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, ClassVar

from pydantic import Field

from quire.core.checks import check_optional_int, refuse
from quire.core.pooling import PoolingParams
from quire.engine.requests.input_processor import MAX_PRIORITY
from quire.server.api.request_bodies import NULL, TEXT, Body, OtherFields, Schema, documented_as, integer, list_of
from quire.server.errors import invalid

TOKEN: Schema = {"type": "integer", "minimum": 0}
_ONE_INPUT = ({"type": "string"}, list_of(TOKEN, least=1))
_TEXTS = documented_as({"type": "string"}, list_of({"type": "string"}, least=1))

Input = Annotated[Any, documented_as(*_ONE_INPUT, list_of({"anyOf": list(_ONE_INPUT)}, least=1), NULL)]
Messages = Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)]
Texts = Annotated[Any, _TEXTS]
OptionalTexts = Annotated[Any, documented_as({"type": "string"}, list_of({"type": "string"}, least=1), NULL)]

# The pairs of names under which vLLM takes the two sides of scores.
SIDES = (("text_1", "text_2"), ("queries", "documents"), ("queries", "items"), ("data_1", "data_2"))

# Cohere's names: forms of a vector, and the ends of a text that is too long.
EMBEDDING_TYPES = ("float", "base64", "binary", "ubinary")
TRUNCATIONS = ("NONE", "START", "END")

_OTHERS = OtherFields(
    unsupported={
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "messages": (),
        "mm_processor_kwargs": ({},),
        "normalize": (),                       # use_activation, since vLLM 0.33
        "padding": ("do_not_pad",),
    },
    without_effect=frozenset(("metadata", "request_id", "user")),
)
_OF_CHATS = ("chat_template_kwargs", "messages")
_OTHERS_OF_EMBEDDINGS = replace(
    _OTHERS, unsupported={name: values for name, values in _OTHERS.unsupported.items() if name not in _OF_CHATS}
)


class PooledBody(Body):
    """Fields of all bodies of these routes."""

    OTHERS: ClassVar[OtherFields] = _OTHERS

    truncate_prompt_tokens: Annotated[int | None, integer(-1)] = None
    truncation_side: Annotated[str | None, documented_as({"enum": ["left", "right", None]})] = None
    priority: Annotated[int | None, integer(-MAX_PRIORITY, MAX_PRIORITY)] = None
    cache_salt: Annotated[str | None, documented_as(TEXT, NULL)] = None
    use_activation: bool | None = None


class EmbeddingBody(PooledBody):
    """The body of /v1/embeddings: `input`, or the `messages` of a conversation and options of rendering them."""

    OTHERS: ClassVar[OtherFields] = _OTHERS_OF_EMBEDDINGS

    input: Input = None
    messages: Messages | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    encoding_format: Annotated[str | None, documented_as({"enum": ["float", "base64", None]})] = None
    dimensions: Annotated[int | None, integer(1)] = None
    add_special_tokens: bool | None = None

    @property
    def params(self) -> PoolingParams:
        """The parameters of each input. InvalidRequestError names the field that is wrong."""
        return PoolingParams(self.dimensions, self.use_activation)


class PoolingBody(EmbeddingBody):
    """The body of /pooling."""

    task: str | None = None

    @property
    def params(self) -> PoolingParams:
        """The parameters of each input."""
        return PoolingParams(self.dimensions, self.use_activation, self.task)  # type: ignore[arg-type]


class EmbedBody(Body):
    """The body of /v2/embed, in Cohere's form: texts alone, without prompts of the server."""

    OTHERS: ClassVar[OtherFields] = OtherFields({"images": ([],), "input_type": (), "inputs": ([],)}, ())

    texts: Annotated[list[str], Field(min_length=1, fail_fast=True)]
    embedding_types: Annotated[list[str] | None, documented_as(list_of({"enum": list(EMBEDDING_TYPES)}), NULL)] = None
    output_dimension: Annotated[int | None, integer(1)] = None
    truncate: Annotated[str | None, documented_as({"enum": [*TRUNCATIONS, None]})] = None
    max_tokens: Annotated[int | None, integer(1)] = None
    priority: Annotated[int | None, integer(-MAX_PRIORITY, MAX_PRIORITY)] = None

    @property
    def types(self) -> list[str]:
        """The forms of each vector, without repetitions. InvalidRequestError names one that does not exist."""
        asked = list(dict.fromkeys(self.embedding_types or ["float"]))
        for each in asked:
            if each not in EMBEDDING_TYPES:
                refuse("embedding_types", each, f"a list of {', '.join(EMBEDDING_TYPES)}")
        return asked

    @property
    def whole(self) -> EmbeddingBody:
        """The same request in OpenAI's form. InvalidRequestError names the field that is wrong."""
        truncate = self.truncate or "END"
        if truncate not in TRUNCATIONS:
            refuse("truncate", truncate, f"one of {', '.join(TRUNCATIONS)}")
        check_optional_int("max_tokens", self.max_tokens, 1)
        if truncate == "NONE" and self.max_tokens is not None:
            refuse("max_tokens", self.max_tokens, "null where truncate is NONE")
        return EmbeddingBody(
            model=self.model, input=self.texts, dimensions=self.output_dimension, priority=self.priority,
            truncate_prompt_tokens=None if truncate == "NONE" else self.max_tokens or -1,
            truncation_side="left" if truncate == "START" else "right",
        )  # fmt: skip


class PairsBody(PooledBody):
    """Fields of both kinds of scores."""

    instruction: Annotated[str | None, documented_as(TEXT, NULL)] = None
    max_tokens_per_query: Annotated[int | None, integer(0)] = None
    max_tokens_per_doc: Annotated[int | None, integer(0)] = None


class ScoreBody(PairsBody):
    """The body of /score: one of the pairs of names in SIDES."""

    text_1: OptionalTexts = None
    text_2: OptionalTexts = None
    queries: OptionalTexts = None
    documents: OptionalTexts = None
    items: OptionalTexts = None
    data_1: OptionalTexts = None
    data_2: OptionalTexts = None

    @property
    def sides(self) -> Mapping[str, list[Any]]:
        """The texts of both sides by the names of their fields."""
        given = {name for pair in SIDES for name in pair if getattr(self, name) is not None}
        pair = next((pair for pair in SIDES if given == set(pair)), None)
        if pair is None:
            expected = " or ".join(f"{first} and {second}" for first, second in SIDES)
            invalid(f"a body must have {expected}, got {', '.join(sorted(given)) or 'none of them'}", param=SIDES[0][0])
        return {name: as_list(name, getattr(self, name)) for name in pair}


class RerankBody(PairsBody):
    """The body of /rerank, in the form of Jina and Cohere."""

    query: str
    documents: Texts
    top_n: Annotated[int | None, integer(0)] = None
    return_documents: bool | None = None

    @property
    def sides(self) -> Mapping[str, list[Any]]:
        """The texts of both sides by the names of their fields."""
        return {"query": [self.query], "documents": as_list("documents", self.documents)}


def as_list(name: str, value: Any) -> list[Any]:  # noqa: ANN401 (JSON)
    """Return the texts of a side as a list. InvalidRequestError for anything but a text or a list of texts."""
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        refuse(name, value, "a text or a list of texts that is not empty")
    return texts
