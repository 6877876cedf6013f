"""The JSON of answers: what completions and chats have in common.

An answer is an envelope around choices. A stream repeats the envelope around each piece of a choice, so it is encoded
once, and a chunk is its two halves around the one thing that is new.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from quire.core.beam_search_params import BeamSearchParams
from quire.core.outputs import CompletionOutput, Logprob, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.version import __version__
from quire.engine.input_processor import PreparedRequest
from quire.server.openai.bodies import ChatBody, CompletionBody

Json = dict[str, Any]
PromptLogprobs = list[dict[int, Logprob] | None]

FINGERPRINT = f"quire-{__version__}"
DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


def event(message: Json) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encode(message) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Call:
    """What an HTTP request asked for, checked; nothing is queued yet."""

    id: str
    model: str
    created: int
    body: CompletionBody | ChatBody
    params: SamplingParams
    beam: BeamSearchParams | None = None
    key_number: int = 0                         # of the API key that it came with, from 1; 0: none
    client_id: str = ""                         # see quire.server.gate.client_id_of
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
    def shows_tokens(self) -> bool:
        """Whether a token is worth a chunk even where its text is not complete yet."""
        return bool(self.body.return_token_ids) or self.params.logprobs is not None


class AnswerFormat(ABC):
    """Writes the answer to one call, whole or in chunks; one or the other."""

    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]

    def __init__(self, call: Call) -> None:
        self.call = call
        self._prompt_logprobs: dict[int, PromptLogprobs | None] = {}    # of the prompts whose first output has come
        self._halves = self._encoded_halves({})
        self._has_begun = False                                         # a stream has

    def answer(self, outputs: list[RequestOutput], usage: Json) -> bytes:
        """Return the whole answer, from the last output of each prompt."""
        choices: list[Json] = []
        for prompt_index, output in enumerate(outputs):
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
            choices += [self._choice(prompt_index, piece) for piece in output.outputs]
        return encode(self._envelope(self.OBJECT, choices) | {"usage": usage} | self._about_prompt())

    def chunks(self, prompt_index: int, output: RequestOutput) -> bytes:
        """Return a piece of the stream, for what is new; nothing if there is nothing to show."""
        if output.prompt_logprobs is not None or prompt_index not in self._prompt_logprobs:
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
        parts: list[bytes] = []
        for piece in output.outputs:
            for choice in self._chunk_choices(prompt_index, piece):
                head, tail = self._halves if self._has_begun else self._first_halves()
                parts += (head, encode(choice), tail)
        return b"".join(parts)

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
        return prompt_index * self.call.params.n + piece.index

    def _is_worth_a_chunk(self, piece: CompletionOutput) -> bool:
        return bool(piece.text or piece.finish_reason or (piece.token_ids and self.call.shows_tokens))

    def _tokens(self, piece: CompletionOutput) -> Json:
        """Return what a choice says of its tokens."""
        return {"token_ids": piece.token_ids} if self.call.body.return_token_ids else {}

    def _envelope(self, kind: str, choices: list[Json]) -> Json:
        """Return what surrounds choices."""
        call = self.call
        return {
            "id": call.id,
            "object": kind,
            "created": call.created,
            "model": call.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _first_halves(self) -> tuple[bytes, bytes]:
        self._has_begun = True
        return self._encoded_halves(self._about_prompt())

    def _encoded_halves(self, about_prompt: Json) -> tuple[bytes, bytes]:
        """Return what a chunk has before and after its choice."""
        usage = {"usage": None} if self.call.include_usage else {}
        encoded = encode(self._envelope(self.CHUNK_OBJECT, []) | usage | about_prompt)
        head, choices, tail = encoded.partition(b'"choices":[')  # inside a string the quotes would be escaped
        return b"data: " + head + choices, tail + b"\n\n"
