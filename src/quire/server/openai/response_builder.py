"""The JSON of answers: what completions and chats have in common.

An answer is an envelope around choices. A stream repeats the envelope around each piece of a choice, so it is encoded
once, and a chunk is its two halves around the one thing that is new. All is written in pieces of bounded work: `weight`
tells whether an output needs more than one iteration of the event loop.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar

from quire.core.beam_search_params import BeamSearchParams
from quire.core.logprob_table import Logprobs
from quire.core.outputs import CompletionOutput, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.version import __version__
from quire.engine.input_processor import PreparedRequest
from quire.server.api.json_encoding import JsonStream, array_from_values, encode, encode_streamed
from quire.server.openai.request_models import ChatBody, CompletionBody

Json = dict[str, Any]

FINGERPRINT = f"quire-{__version__}"
DONE = b"data: [DONE]\n\n"

_CHOICE_UNITS = 4
_UNIT_CHARS = 16  # of text, and as many token ids, are as much work as one candidate of logprobs


def event(message: Json) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encode(message) + b"\n\n"


@dataclass(frozen=True, slots=True)
class ApiRequest:
    """What an HTTP request asked for, checked; nothing is queued yet."""

    id: str
    model: str
    created: int
    body: CompletionBody | ChatBody
    params: SamplingParams
    beam: BeamSearchParams | None = None
    key_number: int = 0                         # of the API key that it came with, from 1; 0: none
    client_id: str = ""                         # see quire.server.http.api_keys.client_id_of
    requests: Sequence[PreparedRequest] = ()    # one for each prompt, once they are tokenized

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with its usage."""
        return self.body.stream_options is not None and bool(self.body.stream_options.include_usage)

    @property
    def hides_output(self) -> bool:
        """Whether no token is wanted; the engine cannot do without one."""
        return self.body.max_tokens == 0

    @property
    def shows_prompt(self) -> bool:
        """Whether choices begin with their prompt."""
        return bool(self.body.return_token_ids or (isinstance(self.body, CompletionBody) and self.body.echo))

    @property
    def shows_tokens(self) -> bool:
        """Whether a token is worth a chunk even where its text is not complete yet."""
        return bool(self.body.return_token_ids) or self.params.logprobs is not None


class ResponseBuilder(ABC):
    """Writes the answer to one call, whole or in chunks; one or the other."""

    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]

    def __init__(self, api_request: ApiRequest) -> None:
        self.request = api_request
        self._prompt_logprobs: dict[int, Logprobs | None] = {}      # of the prompts whose first output has come
        self._halves = self._encoded_halves()
        self._has_begun = False                                         # a stream has

    def answer(self, outputs: Sequence[RequestOutput], usage: Json) -> Iterator[bytes]:
        """Yield the whole answer, from the last output of each prompt."""
        for prompt_index, output in enumerate(outputs):
            self._prompt_logprobs[prompt_index] = output.packed_prompt_logprobs
        choices = (
            encode_streamed(self._choice(prompt_index, piece))
            for prompt_index, output in enumerate(outputs)
            for piece in output.outputs
        )
        envelope = self._envelope(self.OBJECT, JsonStream(array_from_values(choices)))
        yield from encode_streamed(envelope | {"usage": usage} | self._about_prompt())

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Yield a piece of the stream, for what is new; nothing if there is nothing to show."""
        if output.packed_prompt_logprobs is not None or prompt_index not in self._prompt_logprobs:
            self._prompt_logprobs[prompt_index] = output.packed_prompt_logprobs
        for piece in output.outputs:
            for choice in self._chunk_choices(prompt_index, piece):
                yield from self._chunk(choice)

    def weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return how much work it is to write an output, in candidates of logprobs."""
        num_units = 0
        for piece in output.outputs:
            num_units += _CHOICE_UNITS + (len(piece.text) + len(piece.token_ids)) // _UNIT_CHARS
            if piece.packed_logprobs is not None:
                num_units += piece.packed_logprobs.num_candidates
        is_first = output.finished or prompt_index not in self._prompt_logprobs
        return num_units + self._prompt_weight(prompt_index, output) if is_first else num_units

    def _prompt_weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return how much work it is to write what was asked of a prompt, once for each of its choices."""
        prompt, table = self.request.requests[prompt_index].prompt, output.packed_prompt_logprobs
        num_chars = len(prompt.text or "") + len(prompt.token_ids) if self.request.shows_prompt else 0
        num_candidates = 0 if table is None else table.num_candidates
        return self.request.params.n * (num_candidates + num_chars // _UNIT_CHARS)

    def usage_chunk(self, usage: Json) -> bytes:
        """Return the chunk without choices that tells the usage."""
        return event(self._envelope(self.CHUNK_OBJECT, []) | {"usage": usage})

    @abstractmethod
    def _choice(self, prompt_index: int, output: CompletionOutput) -> Json:
        """Return a choice from all of its output."""

    @abstractmethod
    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Sequence[Json]:
        """Return a choice from what is new of it, after those that have to come before; none if none is to be shown."""

    def _about_prompt(self) -> Json:
        """Return what the format says of the prompt beside the choices, in the first chunk where there are several."""
        return {}

    def _index(self, prompt_index: int, piece: CompletionOutput) -> int:
        """Return the number of a choice: the choices of a prompt follow those of the prompt before."""
        return prompt_index * self.request.params.n + piece.index

    def _is_worth_a_chunk(self, piece: CompletionOutput) -> bool:
        return bool(piece.text or piece.finish_reason or (piece.token_ids and self.request.shows_tokens))

    def _tokens(self, piece: CompletionOutput) -> Json:
        """Return what a choice says of its tokens."""
        return {"token_ids": piece.token_ids} if self.request.body.return_token_ids else {}

    def _envelope(self, kind: str, choices: Sequence[Json] | JsonStream) -> Json:
        """Return what surrounds choices."""
        api_request = self.request
        return {
            "id": api_request.id,
            "object": kind,
            "created": api_request.created,
            "model": api_request.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _chunk(self, choice: Json) -> Iterable[bytes]:
        """Return the event of a choice; the first one of a stream tells of the prompt."""
        if self._has_begun:
            head, tail = self._halves
            return chain((head,), encode_streamed(choice), (tail,))
        self._has_begun = True
        message = self._envelope(self.CHUNK_OBJECT, [choice]) | self._usage_field() | self._about_prompt()
        return chain((b"data: ",), encode_streamed(message), (b"\n\n",))

    def _usage_field(self) -> Json:
        return {"usage": None} if self.request.include_usage else {}

    def _encoded_halves(self) -> tuple[bytes, bytes]:
        """Return what a chunk has before and after its choice."""
        encoded = encode(self._envelope(self.CHUNK_OBJECT, []) | self._usage_field())
        head, choices, tail = encoded.partition(b'"choices":[')  # inside a string the quotes would be escaped
        return b"data: " + head + choices, tail + b"\n\n"
