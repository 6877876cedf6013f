"""Responses with vectors and scores, each one JSON body that is encoded in slices."""

import base64
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NoReturn

import numpy as np

from quire.core.outputs import RequestOutput
from quire.engine.requests.pooling_inputs import Scoring
from quire.server.api.generation import TokenUsage
from quire.server.api.http_responses import JsonStream, array_from_values, encode
from quire.server.api.http_responses import encode_streamed as encoded
from quire.server.api.preparation import ApiRequest
from quire.server.errors import ApiError

Json = dict[str, Any]
_Form = Callable[["array[float]"], Any]  # what a vector becomes in JSON

_FLOATS_PER_UNIT = 16  # numbers that are written in the time of a unit


def vector_of(output: RequestOutput) -> "array[float]":
    """Return the pooled vector of an output; asserts that the request asked for one."""
    assert output.pooled is not None, "a request for a vector gave none"
    return output.pooled


class WholeResponse:
    """A `ResponseBuilder` of one body, made by `fields` from the last output of each prompt and the usage."""

    streams = False

    def __init__(self, fields: Callable[[Sequence[RequestOutput], Json], Json]) -> None:
        self._fields = fields

    def response(self, outputs: Sequence[RequestOutput], usage: TokenUsage) -> Iterator[bytes]:
        """Yield the response."""
        counts = {
            "prompt_tokens": usage.num_prompt_tokens,
            "total_tokens": usage.num_prompt_tokens,
            "completion_tokens": 0,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens},
        }
        yield from encoded(self._fields(outputs, counts))

    def weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return the work of encoding an output."""
        return 1 + len(vector_of(output)) // _FLOATS_PER_UNIT

    def first_chunk(self) -> bytes:
        """Refuse: there is no stream."""
        self._refuse()

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Refuse: there is no stream."""
        self._refuse()

    def last_chunk(self, usage: TokenUsage) -> bytes:
        """Refuse: there is no stream."""
        self._refuse()

    def error_chunk(self, error: ApiError) -> bytes:
        """Refuse: there is no stream."""
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise AssertionError("these responses are not streamed")


def embeddings(
    call: ApiRequest, *, is_base64: bool, kind: str = "embedding", name: str = "embedding"
) -> WholeResponse:
    """Return the builder of a list of vectors. `kind`: of the objects in it; `name`: of the vector's key."""

    def pieces(outputs: Sequence[RequestOutput]) -> Iterator[Iterable[bytes]]:
        for index, output in enumerate(outputs):
            vector = vector_of(output)
            value = _base64(vector) if is_base64 else vector.tolist()
            yield (encode({"index": index, "object": kind, name: value}),)

    def fields(outputs: Sequence[RequestOutput], usage: Json) -> Json:
        return _envelope(call) | {"data": JsonStream(array_from_values(pieces(outputs))), "usage": usage}

    return WholeResponse(fields)


def embeddings_by_type(call: ApiRequest, types: Sequence[str], texts: Sequence[str]) -> WholeResponse:
    """Return the builder of Cohere's form: the vectors of all texts in each of the types, and the texts."""

    def vectors(form: _Form, outputs: Sequence[RequestOutput]) -> Iterator[Iterable[bytes]]:
        for output in outputs:
            yield (encode(form(vector_of(output))),)

    def fields(outputs: Sequence[RequestOutput], usage: Json) -> Json:
        found = {each: JsonStream(array_from_values(vectors(_FORMS[each], outputs))) for each in types}
        billed = {"input_tokens": usage["prompt_tokens"], "image_tokens": 0}
        meta = {"api_version": {"version": "2"}, "billed_units": billed}
        return {"id": call.id, "embeddings": found, "texts": texts, "meta": meta}

    return WholeResponse(fields)


def _bits(vector: "array[float]", offset: int = 0) -> list[int]:
    """Return a bit for each number, 1 if it is above 0, in bytes less `offset`; the last byte may end with zeros."""
    bits = np.packbits(np.frombuffer(vector, dtype=np.float32) > 0)
    return [int(byte) - offset for byte in bits]


def _base64(vector: "array[float]") -> str:
    return base64.b64encode(vector.tobytes()).decode()


_FORMS: Mapping[str, _Form] = {
    "float": lambda vector: vector.tolist(), "base64": _base64,
    "binary": partial(_bits, offset=128), "ubinary": _bits,
}  # fmt: skip


def scores(call: ApiRequest, scoring: Scoring) -> WholeResponse:
    """Return the builder of a list of scores."""

    def fields(outputs: Sequence[RequestOutput], usage: Json) -> Json:
        found = scoring.scores([vector_of(output) for output in outputs])
        data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(found)]
        return _envelope(call) | {"data": data, "usage": usage}

    return WholeResponse(fields)


def ranking(call: ApiRequest, scoring: Scoring, documents: Sequence[str] | None, top_n: int) -> WholeResponse:
    """Return the builder of documents from the best to the worst. `documents`: None where they are not shown."""

    def fields(outputs: Sequence[RequestOutput], usage: Json) -> Json:
        found = scoring.scores([vector_of(output) for output in outputs])
        order = sorted(range(len(found)), key=lambda index: -found[index])[: top_n or None]
        results = [{"index": index, **_document(documents, index), "relevance_score": found[index]} for index in order]
        tokens = {name: usage[name] for name in ("total_tokens", "prompt_tokens")}
        return {"id": call.id, "model": call.model, "usage": tokens, "results": results}

    return WholeResponse(fields)


def _document(documents: Sequence[str] | None, index: int) -> Json:
    """Return the field of a document of a ranking; nothing where documents are not shown."""
    return {} if documents is None else {"document": {"text": documents[index], "multi_modal": None}}


def _envelope(call: ApiRequest) -> Json:
    return {"id": call.id, "object": "list", "created": call.created, "model": call.model}
