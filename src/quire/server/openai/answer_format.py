"""The JSON of answers: what completions and chats have in common.

An answer is an envelope around choices. A stream repeats the envelope around each piece of a choice, so it is encoded
once, and a chunk is its two halves around the one thing that is new.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import msgspec
from msgspec import UNSET, UnsetType

from quire.core.outputs import CompletionOutput, Logprob, RequestOutput
from quire.core.sampling_params import SamplingParams
from quire.core.version import __version__
from quire.engine.client import PreparedRequest
from quire.server.openai.tally import Usage

PromptLogprobs = list[dict[int, Logprob] | None]

FINGERPRINT = f"quire-{__version__}"
DONE = b"data: [DONE]\n\n"

encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Call:
    """What an HTTP request asked for, checked and tokenized; nothing is queued yet."""

    id: str
    model: str
    created: int
    params: SamplingParams
    requests: list[PreparedRequest]
    stream: bool
    include_usage: bool
    return_token_ids: bool
    return_prompt_logprobs: bool
    hides_output: bool              # the engine cannot do without a token; the client asked for none

    @property
    def shows_tokens(self) -> bool:
        """Whether a token is worth a chunk even where its text is not complete yet."""
        return self.return_token_ids or self.params.logprobs is not None


class Envelope(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What surrounds choices. What it says of the prompt stands in the first chunk, where the answer is a stream."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[msgspec.Struct]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
    prompt_logprobs: PromptLogprobs | UnsetType | None = UNSET


class AnswerFormat(ABC):
    """Writes the answer to one call, whole or in chunks; one or the other."""

    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]

    def __init__(self, call: Call) -> None:
        self.call = call
        self._prompt_logprobs: dict[int, PromptLogprobs | None] = {}    # of the prompts whose first output has come
        self._halves = self._encoded_halves()
        self._has_begun = False                                         # a stream has

    def answer(self, outputs: list[RequestOutput], usage: Usage) -> bytes:
        """Return the whole answer, from the last output of each prompt."""
        choices: list[msgspec.Struct] = []
        for prompt_index, output in enumerate(outputs):
            self._prompt_logprobs[prompt_index] = output.prompt_logprobs
            choices += [self._choice(prompt_index, piece) for piece in output.outputs]
        return encode(self._about_prompt(self._envelope(self.OBJECT, choices, usage)))

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

    def usage_chunk(self, usage: Usage) -> bytes:
        """Return the chunk without choices that tells the usage."""
        return b"data: " + encode(self._envelope(self.CHUNK_OBJECT, [], usage)) + b"\n\n"

    @abstractmethod
    def _choice(self, prompt_index: int, output: CompletionOutput) -> msgspec.Struct:
        """Return a choice from all of its output."""

    @abstractmethod
    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Sequence[msgspec.Struct]:
        """Return a choice from what is new of it, after those that have to come before; none if none is to be shown."""

    def _about_prompt(self, envelope: Envelope) -> Envelope:
        """Return the envelope with what the format says there of the prompt."""
        return envelope

    def _index(self, prompt_index: int, piece: CompletionOutput) -> int:
        """Return the number of a choice: the choices of a prompt follow those of the prompt before."""
        return prompt_index * self.call.params.n + piece.index

    def _is_worth_a_chunk(self, piece: CompletionOutput) -> bool:
        return bool(piece.text or piece.finish_reason or (piece.token_ids and self.call.shows_tokens))

    def _envelope(self, kind: str, choices: list[msgspec.Struct], usage: Usage | UnsetType | None) -> Envelope:
        call = self.call
        return Envelope(
            id=call.id,
            object=kind,
            created=call.created,
            model=call.model,
            system_fingerprint=FINGERPRINT,
            choices=choices,
            usage=usage,
        )

    def _first_halves(self) -> tuple[bytes, bytes]:
        self._has_begun = True
        return self._encoded_halves(about_prompt=True)

    def _encoded_halves(self, *, about_prompt: bool = False) -> tuple[bytes, bytes]:
        """Return what a chunk has before and after its choice."""
        envelope = self._envelope(self.CHUNK_OBJECT, [], None if self.call.include_usage else UNSET)
        encoded = encode(self._about_prompt(envelope) if about_prompt else envelope)
        head, choices, tail = encoded.partition(b'"choices":[')  # inside a string the quotes would be escaped
        return b"data: " + head + choices, tail + b"\n\n"
