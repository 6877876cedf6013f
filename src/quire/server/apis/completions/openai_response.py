"""OpenAI's JSON responses: what completions and chats have in common, and responses of /v1/completions.

A response is an envelope around choices. A stream repeats the envelope around each new part of a choice, so it is
encoded once, and a chunk is its two halves around the choice; of parts that are text alone the choice is encoded once,
too, and a chunk is two halves around the text. All is encoded in slices of bounded work: `weight` is the
number of units of an output.
"""

from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import InitVar, dataclass, field
from functools import cached_property
from itertools import chain
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from quire.core.logprob_table import Logprobs
from quire.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.core.sequence import KVTransfer
from quire.core.version import __version__
from quire.engine.requests.input_processor import TokenizedPrompt
from quire.server.api.generation import TokenUsage, request_times
from quire.server.api.http_responses import encode, encode_streamed
from quire.server.api.preparation import ApiRequest
from quire.server.api.token_logprobs import TokenNames
from quire.server.apis.completions.completion_bodies import ChatBody, CompletionBody
from quire.server.apis.completions.openai_logprobs import (
    CompletionLogprobs,
    LogprobPiece,
    completion_logprobs,
    prompt_logprobs,
    prompt_scores,
)
from quire.server.errors import ApiError
from quire.text.conversation import content_text, split_reasoning
from quire.text.tokenizer import Tokenizer

Json = dict[str, Any]

ROLE = "assistant"

FINGERPRINT = f"quire-{__version__}"
DONE = b"data: [DONE]\n\n"

# Fields of vLLM's that never have a value here: of whole responses, of their choices, of chunks and their choices.
_UNUSED: Json = dict.fromkeys(("service_tier", "kv_transfer_params", "ec_transfer_params", "metrics"))
_UNUSED_OF_CHUNKS: Json = {"kv_transfer_params": None}
UNUSED_OF_CHOICES: Json = dict.fromkeys(("routed_experts", "weight_versions"))
UNUSED_OF_CHUNK_CHOICES: Json = {"weight_versions": None}
_UNUSED_OF_PROMPT_USAGE: Json = dict.fromkeys(("created_cache_tokens", "multimodal_tokens"))

_SOME_TEXT = "some text"
_CHOICE_UNITS = 4
_UNIT_CHARS = 16  # characters or token ids that take as long to encode as one candidate of logprobs


def event(message: Json) -> bytes:
    """Return a server-sent event."""
    return b"data: " + encode(message) + b"\n\n"


def _with_nulls(usage: Json) -> Json:
    """Return the usage of a whole response; the last chunk of a stream has the fields with a value only."""
    prompt_details = usage["prompt_tokens_details"] | _UNUSED_OF_PROMPT_USAGE
    return {"completion_tokens_details": None} | usage | {"prompt_tokens_details": prompt_details}


@dataclass(slots=True, kw_only=True)
class OpenAIRequest(ApiRequest):
    """A call of /v1/completions or /v1/chat/completions, with what its response takes from the body.

    The body itself is not held: it has 60 fields, and most requests that wait have set five.
    """

    body: InitVar[CompletionBody | ChatBody]
    always_includes_usage: bool = False
    include_usage: bool = field(init=False)          # a stream ends with its usage
    includes_usage_so_far: bool = field(init=False)  # each chunk has the usage of its choice so far
    writes_token_ids: bool = field(init=False)       # logprobs name tokens by their ids
    returns_token_ids: bool = field(init=False)
    returns_prompt_text: bool = field(init=False)
    returns_prompt_logprobs: bool = field(init=False)
    transfer: KVTransfer | None = None               # moves keys and values to or from another engine
    kv_transfer_params: Json | None = None           # what a producer's answer has
    shows_prompt: bool = field(init=False)           # choices begin with their prompt, or with a part of it
    message_echo: str = field(init=False)            # text that messages begin with

    def __post_init__(self, body: CompletionBody | ChatBody) -> None:
        """Take what the response depends on."""
        stream, names_ids = body.stream_options, body.return_tokens_as_token_ids
        self.include_usage = self.always_includes_usage or (stream is not None and bool(stream.include_usage))
        so_far = self.include_usage and stream is not None and bool(stream.continuous_usage_stats)
        self.includes_usage_so_far = self.always_includes_usage or so_far
        self.writes_token_ids = self.names_tokens_by_id if names_ids is None else names_ids
        self.returns_token_ids = bool(body.return_token_ids)
        self.returns_prompt_text = isinstance(body, ChatBody) and bool(body.return_prompt_text)
        self.returns_prompt_logprobs = body.prompt_logprobs is not None
        self.shows_prompt = self.returns_token_ids or self.returns_prompt_text or bool(body.echo)
        self.message_echo = _message_echo(body) if isinstance(body, ChatBody) and body.echo else ""

    @property
    def shows_tokens(self) -> bool:
        """True if a token is sent even while its text is incomplete."""
        return self.returns_token_ids or self.checked.params.logprobs is not None


def _message_echo(body: ChatBody) -> str:
    """Return the text that messages begin with: that of the last message, if it is the assistant's."""
    if body.messages[-1].role != ROLE:
        return ""
    content, _ = split_reasoning(body.messages[-1].content)
    return content_text("messages[-1]", content)


class OpenAIResponseBuilder(ABC):
    """Builds the response to one call: either `response` or `chunks`."""

    OBJECT: ClassVar[str]
    CHUNK_OBJECT: ClassVar[str]

    def __init__(self, request: OpenAIRequest) -> None:
        self.request, self.streams = request, request.stream
        self._prompt_logprobs: dict[int, Logprobs | None] = {}      # prompt -> its logprobs, once it has output
        self._prompt_scores: dict[int, NDArray[np.float32] | None] = {}  # likewise, if the request names token ids
        self._metrics: RequestMetrics | None = None                 # metrics of the last output
        self._text_halves: dict[int, tuple[bytes, bytes]] = {}          # chunks that are text alone, by choice
        self._has_begun = False                                         # the first chunk was built
        self._num_output_tokens: dict[int, int] | None = None           # choice -> count; None without usage in chunks
        if request.includes_usage_so_far:
            self._num_output_tokens = defaultdict(int)

    def response(self, outputs: Sequence[RequestOutput], usage: TokenUsage) -> Iterator[bytes]:
        """Yield the whole response, from the last output of each prompt."""
        for prompt_index, output in enumerate(outputs):
            self._note_prompt(prompt_index, output)
        yield encode(self._envelope(self.OBJECT, []))[:-2]  # up to the elements of the empty list of choices
        between = b""
        for prompt_index, output in enumerate(outputs):
            for piece in output.outputs:
                if between:
                    yield between
                yield from self._choice_pieces(prompt_index, piece)
                between = b","
        fields = _UNUSED | {"usage": _with_nulls(self._usage(usage))} | self._prompt_fields()
        if self.request.kv_transfer_params is not None:
            fields["kv_transfer_params"] = self.request.kv_transfer_params
        if self.request.tells_times and self.request.num_answers == 1:
            fields["metrics"] = request_times(outputs[0].metrics, usage.num_output_tokens)
        pieces = iter(encode_streamed(fields))
        yield b"]," + next(pieces)[1:]
        yield from pieces

    def _note_prompt(self, prompt_index: int, output: RequestOutput) -> None:
        self._prompt_logprobs[prompt_index] = output.packed_prompt_logprobs
        self._prompt_scores[prompt_index] = output.prompt_token_id_logprobs

    def _scores_of_prompt(self, prompt_index: int) -> Json:
        """Return the field of the token ids that the request names for its prompt; no field if there are none."""
        rows, scores = self.request.checked.params.prompt_logprob_token_ids, self._prompt_scores[prompt_index]
        if rows is None:
            return {}
        return {"prompt_token_id_logprobs": None if scores is None else prompt_scores(rows, scores)}

    def _choice_pieces(self, prompt_index: int, output: CompletionOutput) -> Iterable[bytes]:
        """Return the JSON of a choice, in slices of bounded work."""
        return encode_streamed(self._choice(prompt_index, output))

    def _usage(self, usage: TokenUsage) -> Json:
        """Return the usage object, once all choices were built."""
        images = {"image_tokens": usage.num_image_tokens} if usage.num_image_tokens else {}
        return {
            "prompt_tokens": usage.num_prompt_tokens,
            "completion_tokens": usage.num_output_tokens,
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": usage.num_cached_tokens, **images},
        }

    def first_chunk(self) -> bytes:
        """Return nothing: a stream begins with its first output."""
        return b""

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Yield the events for the new part of an output; nothing if there is nothing to show."""
        if prompt_index not in self._prompt_logprobs or _scores_prompt(output):
            self._note_prompt(prompt_index, output)
        self._metrics = output.metrics
        if not self._has_begun:
            for choice in self._first_choices():
                yield from self._chunk(prompt_index, choice)
        for piece in output.outputs:
            if self._is_text(prompt_index, piece):
                yield self._text_chunk(prompt_index, piece)
                continue
            if self._num_output_tokens is not None:
                self._num_output_tokens[self._index(prompt_index, piece)] += len(piece.token_ids)
            for choice in self._chunk_choices(prompt_index, piece):
                yield from self._chunk(prompt_index, choice)

    def _is_text(self, prompt_index: int, piece: CompletionOutput) -> bool:
        """Return whether a chunk has the text of a piece, and else what all chunks of its choice have."""
        is_alone = piece.finish_reason is None and piece.packed_logprobs is None and bool(piece.text)
        shows_more = self._num_output_tokens is not None or self.request.shows_tokens
        return is_alone and not shows_more and self._has_text_chunks(self._index(prompt_index, piece))

    def _text_chunk(self, prompt_index: int, piece: CompletionOutput) -> bytes:
        """Return the event of a piece that is text alone."""
        index = self._index(prompt_index, piece)
        halves = self._text_halves.get(index)
        if halves is None:
            (choice,) = self._chunk_choices(prompt_index, CompletionOutput(piece.index, _SOME_TEXT, []))
            before, _, behind = encode(choice).partition(encode(_SOME_TEXT))
            halves = self._text_halves[index] = self._halves[0] + before, behind + self._halves[1]
        return halves[0] + encode(piece.text) + halves[1]

    def _first_choices(self) -> Iterable[Json]:
        """Return choices without text that a stream begins with."""
        return ()

    @abstractmethod
    def _has_text_chunks(self, index: int) -> bool:
        """Return whether a choice has begun, and is not read for tool calls and reasoning."""

    def _usage_so_far(self, prompt_index: int, choice: Json) -> Json:
        """Return the field `usage` of a chunk, with the tokens of its choice so far; no field if chunks have none."""
        if self._num_output_tokens is None:
            return {}
        num_prompt = len(self.request.requests[prompt_index].prompt.token_ids)
        num_output = self._num_output_tokens[choice["index"]]
        usage = {"prompt_tokens": num_prompt, "completion_tokens": num_output, "total_tokens": num_prompt + num_output}
        return {"usage": usage}

    def weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return the work of encoding an output, in candidates of logprobs."""
        num_units = 0
        for piece in output.outputs:
            num_units += _CHOICE_UNITS + (len(piece.text) + len(piece.token_ids)) // _UNIT_CHARS
            if piece.packed_logprobs is not None:
                num_units += piece.packed_logprobs.num_candidates
        is_first = output.finished or prompt_index not in self._prompt_logprobs
        return num_units + self._prompt_weight(prompt_index, output) if is_first else num_units

    def _prompt_weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return the work of encoding the prompt's fields, once for each of its choices."""
        prompt, table = self.request.requests[prompt_index].prompt, output.packed_prompt_logprobs
        num_chars = len(prompt.text or "") + len(prompt.token_ids) if self.request.shows_prompt else 0
        scores = output.prompt_token_id_logprobs
        num_candidates = (0 if table is None else table.num_candidates) + (0 if scores is None else scores.size)
        return self.request.checked.params.n * (num_candidates + num_chars // _UNIT_CHARS)

    def last_chunk(self, usage: TokenUsage) -> bytes:
        """Return the end of a stream, after the usage if the client asked for it."""
        if not self.request.include_usage:
            return DONE
        message = self._envelope(self.CHUNK_OBJECT, []) | {"usage": self._usage(usage)}
        if self.request.tells_times and self.request.num_answers == 1:
            times = request_times(self._metrics, usage.num_output_tokens)
            message["metrics"] = {name: value for name, value in times.items() if value is not None}
        return event(message) + DONE

    def error_chunk(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed."""
        return event(error.body) + DONE

    @abstractmethod
    def _choice(self, prompt_index: int, output: CompletionOutput) -> Json:
        """Return a choice from all of its output."""

    @abstractmethod
    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Iterable[Json]:
        """Return the choices of chunks; none if there is nothing to show."""

    def _prompt_fields(self) -> Json:
        """Return the prompt's fields beside the choices, in the first chunk of a stream."""
        return {}

    def _index(self, prompt_index: int, piece: CompletionOutput) -> int:
        """Return the number of a choice: the choices of a prompt follow those of the prompt before."""
        return prompt_index * self.request.checked.params.n + piece.index

    def _is_shown(self, piece: CompletionOutput) -> bool:
        return bool(piece.text or piece.finish_reason or (piece.token_ids and self.request.shows_tokens))

    def _envelope(self, kind: str, choices: Sequence[Json]) -> Json:
        request = self.request
        return {
            "id": request.id,
            "object": kind,
            "created": request.created,
            "model": request.model,
            "system_fingerprint": FINGERPRINT,
            "choices": choices,
        }

    def _chunk(self, prompt_index: int, choice: Json) -> Iterable[bytes]:
        """Return the event of a choice; the first one of a stream has the prompt's fields."""
        if self._has_begun and self._num_output_tokens is None:
            head, tail = self._halves
            return chain((head,), encode_streamed(choice), (tail,))
        message = self._chunk_envelope([choice]) | self._usage_so_far(prompt_index, choice)
        if not self._has_begun:
            message |= self._prompt_fields()
        self._has_begun = True
        return chain((b"data: ",), encode_streamed(message), (b"\n\n",))

    def _chunk_envelope(self, choices: Sequence[Json]) -> Json:
        envelope = self._envelope(self.CHUNK_OBJECT, choices) | _UNUSED_OF_CHUNKS
        return envelope | {"usage": None} if self.request.include_usage else envelope

    @cached_property
    def _halves(self) -> tuple[bytes, bytes]:
        """Return the bytes of a chunk before and after its choice."""
        encoded = encode(self._chunk_envelope([]))
        head, choices, tail = encoded.partition(b'"choices":[')  # inside a string the quotes would be escaped
        return b"data: " + head + choices, tail + b"\n\n"


def _scores_prompt(output: RequestOutput) -> bool:
    """Return whether an output has logprobs of its prompt."""
    return output.packed_prompt_logprobs is not None or output.prompt_token_id_logprobs is not None


# Fields of a choice that are null unless they are set.
_NULL_FIELDS_OF_CHUNKS: Json = {"prompt_token_ids": None, "token_ids": None, **UNUSED_OF_CHUNK_CHOICES}
_NULL_FIELDS: Json = {"prompt_token_ids": None, "prompt_logprobs": None, "token_ids": None, **UNUSED_OF_CHOICES}


class CompletionResponseBuilder(OpenAIResponseBuilder):
    """Builder for completions. With `echo`, choices and logprobs begin with the prompt; construct it in a thread."""

    OBJECT = CHUNK_OBJECT = "text_completion"

    def __init__(self, request: OpenAIRequest, tokenizer: Tokenizer | None, *, echo: bool) -> None:
        super().__init__(request)
        self._tokenizer = tokenizer
        self._echoes = [self._echo(prompt_index) for prompt_index in range(len(request.requests))] if echo else None
        has_logprobs = echo and request.checked.params.logprobs is not None
        # characters that tokenizing added to each prompt
        self._num_added = [self._num_added_chars(each.prompt) for each in request.requests] if has_logprobs else None
        self._null_fields = _NULL_FIELDS_OF_CHUNKS if request.stream else _NULL_FIELDS
        self._logprobs: dict[int, CompletionLogprobs] = {}  # choice -> its logprobs, once it has output
        self._begun: dict[int, None] = {}        # choices with a first part; an empty set takes three times as much

    @cached_property
    def _names(self) -> TokenNames:
        """Texts of the tokens of logprobs."""
        return TokenNames(self._tokenizer, as_ids=self.request.writes_token_ids)

    def _choice(self, prompt_index: int, output: CompletionOutput) -> Json:
        index = self._index(prompt_index, output)
        choice: Json = {
            "index": index, "text": output.text, "logprobs": None, "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason, **self._null_fields,
        }  # fmt: skip
        if self.request.returns_token_ids:
            choice["token_ids"] = output.token_ids
        is_first = index not in self._begun
        if output.packed_logprobs is not None:
            written = self._logprobs.get(index) or self._choice_logprobs(prompt_index, index)
            pieces = [written.piece(output.token_ids, output.packed_logprobs)]
            if is_first and self._echoes is not None:
                pieces = [self._prompt_part(prompt_index), *pieces]
            choice["logprobs"] = completion_logprobs(pieces)
        if is_first:
            self._begun[index] = None
            self._add_prompt(choice, prompt_index)
        return choice

    def _chunk_choices(self, prompt_index: int, piece: CompletionOutput) -> Sequence[Json]:
        is_echo = self._echoes is not None and self._index(prompt_index, piece) not in self._begun
        return (self._choice(prompt_index, piece),) if is_echo or self._is_shown(piece) else ()

    def _has_text_chunks(self, index: int) -> bool:
        return index in self._begun

    def _add_prompt(self, choice: Json, prompt_index: int) -> None:
        """Add the prompt's fields to the first piece of a choice."""
        if self.request.returns_token_ids:
            choice["prompt_token_ids"] = self.request.requests[prompt_index].prompt.token_ids.tolist()
        if self.request.returns_prompt_logprobs:
            table = self._prompt_logprobs[prompt_index]
            choice["prompt_logprobs"] = None if table is None else prompt_logprobs(self._names, table)
        if self.request.checked.params.prompt_logprob_token_ids is not None:
            choice |= self._scores_of_prompt(prompt_index)
        if self._echoes is not None:
            choice["text"] = self._echoes[prompt_index] + choice["text"]

    def _echo(self, prompt_index: int) -> str:
        """Return the text of a prompt: as sent, or decoded from its tokens, special tokens included.

        Without a tokenizer it is empty, as all texts are.
        """
        prompt = self.request.requests[prompt_index].prompt
        if prompt.text is not None:
            return prompt.text
        if self._tokenizer is None:
            return ""
        return self._tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)

    def _prompt_part(self, prompt_index: int) -> LogprobPiece:
        """Return the logprobs of a prompt, which precede those of each choice."""
        table = self._prompt_logprobs[prompt_index]
        assert table is not None, "logprobs with echo include the prompt's"
        prompt = self.request.requests[prompt_index].prompt
        start = 0 if prompt.text is None or self._num_added is None else -self._num_added[prompt_index]
        written = CompletionLogprobs(
            self._tokenizer, [], skip_special_tokens=False, start=start, names=self._names
        )
        return written.piece(prompt.token_ids, table)

    def _num_added_chars(self, prompt: TokenizedPrompt) -> int:
        """Return the characters of special tokens that tokenizing added to a text; its echo does not show them."""
        if prompt.text is None:
            return 0
        assert self._tokenizer is not None, "a text was tokenized"
        decoded = self._tokenizer.decode(prompt.token_ids.tolist(), skip_special_tokens=False)
        return len(decoded) - len(prompt.text)

    def _choice_logprobs(self, prompt_index: int, index: int) -> CompletionLogprobs:
        start = 0 if self._echoes is None else len(self._echoes[prompt_index])
        token_ids = self.request.requests[prompt_index].prompt.token_ids
        skip = self.request.checked.params.skip_special_tokens
        written = self._logprobs[index] = CompletionLogprobs(
            self._tokenizer, token_ids, skip_special_tokens=skip, start=start, names=self._names
        )
        return written
