"""Builder of the response object of /v1/responses, and of the events of a stream."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from quire.core.deltas import FinishReason
from quire.core.logprob_table import Position
from quire.core.outputs import CompletionOutput, RequestMetrics, RequestOutput
from quire.server.api.chat import MessageReader
from quire.server.api.generation import TokenUsage, request_times
from quire.server.api.http_responses import JsonStream, array_from_values, encode, encode_streamed
from quire.server.api.preparation import ApiRequest
from quire.server.api.token_logprobs import TokenNames
from quire.server.apis.responses.output_items import ItemWriter, Json
from quire.server.apis.responses.responses_bodies import NO_TOOLS, ResponsesBody, Tools
from quire.server.errors import ApiError
from quire.server.tools.call_reader import Content, Event
from quire.text.tokenizer import Tokenizer, incremental_detokenizer

MAX_ECHO_BYTES = 256 << 10      # most bytes of one field; a stream holds them until its end
_UNIT_CHARS = 16                # as much text, or ids, takes as long to encode as one candidate of logprobs
_EVENT_UNITS = 4
_TIMES_WRITTEN = 5              # each text: as it comes, and in the four events that end it
_TOKENS_PER_SLICE = 64          # read one by one


@dataclass(slots=True, kw_only=True)
class ResponsesRequest(ApiRequest):
    """A call of /v1/responses, with the body that its response repeats."""

    body: ResponsesBody
    given_tools: Tools = NO_TOOLS


class ResponsesBuilder:
    """Builds the response to one call: a `ResponseBuilder`."""

    def __init__(self, request: ResponsesRequest, tokenizer: Tokenizer | None) -> None:
        self._request, self._tokenizer, self.streams = request, tokenizer, request.stream
        prompt, reading = request.requests[0].prompt, request.reading
        self._usage = TokenUsage(len(prompt.token_ids), 0, 0)
        self._metrics: RequestMetrics | None = None     # metrics of the last output
        has_names = request.checked.params.logprobs is not None
        names = TokenNames(tokenizer, as_ids=request.names_tokens_by_id) if has_names else None
        num_top = request.checked.params.logprobs or 0
        self._items = ItemWriter(request.id, reading, request.given_tools, names, num_top)
        self._reader = None if reading is None else MessageReader(reading, tokenizer, prompt.token_ids)
        self._length_of: Callable[[int], int] | None = None     # chars of a token, where tokens are read one by one
        if names is not None and self._reader is not None and tokenizer is not None:
            skips = request.checked.params.skip_special_tokens and not request.requests[0].kept_token_ids
            detokenizer = incremental_detokenizer(tokenizer, prompt.token_ids, skip_special_tokens=skips)
            self._length_of = lambda token_id: len(detokenizer.append((token_id,)))
        self._raw: tuple[list[str], list[int]] = [], []         # texts and tokens of the output
        self._echo = _echo(request)
        self._sequence_number = 0
        self._num_units = 0         # units of the output so far

    def response(self, outputs: Sequence[RequestOutput], usage: TokenUsage) -> Iterator[bytes]:
        """Yield the whole response, from the last output."""
        last: CompletionOutput | None = None
        for piece in outputs[0].outputs:
            last = piece
            for number, _ in enumerate(self._events(piece)):
                if number % _TOKENS_PER_SLICE == 0:
                    yield b""
        self._usage, self._metrics = usage, outputs[0].metrics
        yield from encode_streamed(self._response(_status(None if last is None else last.finish_reason), last))

    def first_chunk(self) -> bytes:
        """Return the events that begin a stream."""
        response = self._response("in_progress")
        return b"".join(
            piece for kind in ("response.created", "response.in_progress")
            for piece in self._event(kind, {"response": response})
        )  # fmt: skip

    def chunks(self, prompt_index: int, output: RequestOutput) -> Iterator[bytes]:
        """Yield the events for the new part of the output."""
        self._num_units += self.weight(prompt_index, output)
        self._metrics = output.metrics
        for piece in output.outputs:
            num_output_tokens = self._usage.num_output_tokens + len(piece.token_ids)
            self._usage = TokenUsage(self._usage.num_prompt_tokens, num_output_tokens, output.num_cached_tokens)
            for kind, fields in self._events(piece):
                yield from self._event(kind, fields)
            if piece.finish_reason is not None:
                status = _status(piece.finish_reason)
                response = self._response(status, piece)
                yield from self._event(f"response.{status}", {"response": response})

    def weight(self, prompt_index: int, output: RequestOutput) -> int:
        """Return the work of encoding an output, in candidates of logprobs."""
        num_units = 0
        for piece in output.outputs:
            num_units += _EVENT_UNITS + (len(piece.text) + len(piece.token_ids)) // _UNIT_CHARS
            if piece.packed_logprobs is not None:
                num_units += piece.packed_logprobs.num_candidates
            if piece.finish_reason is not None:
                num_units += (_TIMES_WRITTEN - 1) * (self._num_units + num_units)
        return num_units

    def last_chunk(self, usage: TokenUsage) -> bytes:
        """Return nothing: the event of the last output has ended the stream."""
        return b""

    def error_chunk(self, error: ApiError) -> bytes:
        """Return the end of a stream that failed: the error, and the response without logprobs."""
        self._items.abandon()
        code = "rate_limit_exceeded" if error.status == 429 else "server_error"
        response = self._response("failed") | {"error": {"code": code, "message": error.message}}
        told = {"code": error.code or error.type, "message": error.message, "param": error.param}
        return b"".join((*self._event("error", told), *self._event("response.failed", {"response": response})))

    def _events(self, piece: CompletionOutput) -> Iterator[tuple[str, Json]]:
        """Yield the events of a piece of the output as (type, fields)."""
        is_last = piece.finish_reason is not None
        self._raw[0].append(piece.text)
        self._raw[1].extend(piece.token_ids)
        for events, positions in self._read(piece, is_last=is_last):
            yield from self._items.write(events, positions)
        if is_last:
            yield from self._items.finish(_status(piece.finish_reason))

    def _read(
        self, piece: CompletionOutput, *, is_last: bool
    ) -> Iterator[tuple[Iterable[Event], Iterable[Position]]]:
        """Yield what a piece says, and the logprobs of its tokens."""
        table = piece.packed_logprobs
        if self._reader is None:
            positions = table.positions(0, len(table)) if table is not None else ()
            yield ([Content(piece.text)] if piece.text else []), positions
        elif self._length_of is None or table is None or len(piece.token_ids) < 2:
            positions = table.positions(0, len(table)) if table is not None else ()
            for events in self._reader.events(piece, is_last=is_last):
                yield events, positions
                positions = ()
        else:
            for number, token in enumerate(_tokens(piece, self._length_of)):
                is_end = is_last and number == len(piece.token_ids) - 1
                positions = table.positions(number, number + 1)
                for events in self._reader.events(token, is_last=is_end):
                    yield events, positions
                    positions = ()

    def _event(self, kind: str, fields: Json) -> Iterator[bytes]:
        """Yield a server-sent event."""
        number, self._sequence_number = self._sequence_number, self._sequence_number + 1
        yield f"event: {kind}\ndata: ".encode()
        yield from encode_streamed({"type": kind, "sequence_number": number} | fields)
        yield b"\n\n"

    def _response(self, status: str, last: CompletionOutput | None = None) -> Json:
        """Return the response object as it is now. `last`: the piece that ends the output."""
        is_begun, is_over = bool(self._items.items), status in ("completed", "incomplete")
        added: Json = {}
        if is_over and self._request.tells_times and self._request.num_answers == 1:
            added["metrics"] = request_times(self._metrics, self._usage.num_output_tokens)
        if is_over and self._request.body.enable_response_messages:
            prompt = self._request.requests[0].prompt
            read, written = (prompt.text or "", prompt.token_ids.tolist()), ("".join(self._raw[0]), self._raw[1])
            for name, (text, token_ids) in {"input_messages": read, "output_messages": written}.items():
                added[name] = [{"type": "raw_message_tokens", "message": text, "tokens": token_ids}]
        output = (encode_streamed(self._items.item_json(item)) for item in self._items.items)
        return self._echo | {
            "status": status,
            "completed_at": int(time.time()) if status == "completed" else None,
            "incomplete_details": _incomplete_details(last),
            "output": JsonStream(array_from_values(output)) if is_begun else [],
            "usage": self._usage_json() if is_over else None,
            **added,
        }

    def _usage_json(self) -> Json:
        usage, reader = self._usage, self._reader
        return {
            "input_tokens": usage.num_prompt_tokens,
            "input_tokens_details": {"cached_tokens": usage.num_cached_tokens, "cache_write_tokens": 0},
            "output_tokens": usage.num_output_tokens,
            "output_tokens_details": {"reasoning_tokens": 0 if reader is None else reader.num_reasoning_tokens},
            "total_tokens": usage.num_prompt_tokens + usage.num_output_tokens,
        }


def _status(reason: FinishReason | None) -> str:
    return "completed" if reason in ("stop", "repetition") else "incomplete"


def _incomplete_details(last: CompletionOutput | None) -> Json | None:
    """Return why an output is incomplete, if it was cut; `last` ends it."""
    if last is None or last.finish_reason != "length":
        return None
    return {"reason": "deadline" if last.stop_reason == "deadline" else "max_output_tokens"}


def _tokens(piece: CompletionOutput, length_of: Callable[[int], int]) -> Iterator[CompletionOutput]:
    """Yield a piece of several tokens as pieces of one, each with its part of the text."""
    start, last = 0, len(piece.token_ids) - 1
    for number, token_id in enumerate(piece.token_ids):
        length = length_of(token_id)
        stop = len(piece.text) if number == last else start + length
        yield replace(piece, text=piece.text[start:stop], token_ids=[token_id])
        start = min(stop, len(piece.text))


def _echo(request: ResponsesRequest) -> Json:
    """Return the fields of the response that repeat the request, encoded once."""
    body, params = request.body, request.checked.params
    reasoning, text = body.reasoning, body.text
    used = [tool for tool in body.tools or () if tool["type"] in ("function", "custom", "namespace")]
    tools = [tool | ({"strict": bool(tool.get("strict"))} if tool["type"] != "namespace" else {}) for tool in used]
    return {
        "id": request.id,
        "object": "response",
        "created_at": request.created,
        "model": request.model,
        "error": None,
        "background": False,
        "instructions": _encoded(body.instructions, None),
        "max_output_tokens": params.max_tokens,
        "max_tool_calls": body.max_tool_calls,
        "metadata": _encoded(body.metadata or {}, {}),
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "prompt_cache_key": _encoded(body.prompt_cache_key, None),
        "prompt_cache_retention": _encoded(body.prompt_cache_retention, None),
        "reasoning": {"effort": reasoning.effort if reasoning is not None else None, "summary": None},
        "safety_identifier": _encoded(body.safety_identifier, None),
        "service_tier": "default",
        "store": False,
        "temperature": params.temperature,
        "text": {
            "format": _encoded((text and text.format) or {"type": "text"}, None),
            "verbosity": (text and text.verbosity) or "medium",
        },
        "tool_choice": _encoded(body.tool_choice or "auto", "auto"),
        "tools": _encoded(tools, []),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "user": _encoded(body.user, None),
    }


def _encoded(value: Any, otherwise: Any) -> msgspec.Raw:  # noqa: ANN401 (JSON)
    """Return the JSON of a value, or of another one if it has more than MAX_ECHO_BYTES."""
    encoded = encode(value)
    return msgspec.Raw(encoded if len(encoded) <= MAX_ECHO_BYTES else encode(otherwise))
